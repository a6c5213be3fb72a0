"""The benchmark of draft tokens: its arithmetic, and all its cases on a small model."""

import numpy as np
import pytest

from benchmarks.lib.draft_cases import SHARES, some_right
from benchmarks.throughput import speculation
from benchmarks.throughput.speculation import Result, Run
from sgljax_engine import EngineCounters
from tests.engine.models import TINY

NUM_TOKENS = 24


def test_speeds_are_those_with_drafts_over_those_without():
    result = Result(
        name="x",
        rows=8,
        off_s=[2.0, 3.0, 1.0],
        auto_s=[1.0, 3.0, 4.0],
        tokens_per_step=[3.0, 2.0, 0.0],
        drafted_share=[1.0, 0.5, 0.0],
        num_draft_tokens=[9, 9, 0],
        num_accepted_tokens=[6, 3, 0],
    )
    assert result.ratios == [2.0, 1.0, 0.25]
    assert result.row() == ("| 8 | x | 2.000 | 3.000 | 1.000 | 0.250 to 2.000 | 3 | 2.00 | 50% |")


def test_tokens_per_step_are_those_of_one_run():
    before = EngineCounters(num_output_tokens=10, num_verified_tokens=5, num_verify_rows=4)
    after = EngineCounters(num_output_tokens=50, num_verified_tokens=35, num_verify_rows=14)
    run = Run([], 1.0, before, after)
    assert run.tokens_per_step == 30 / 10
    assert run.drafted_share == 30 / 40
    assert Run([], 1.0, before, before).tokens_per_step == 0


@pytest.mark.parametrize("share", SHARES)
def test_made_up_answers_are_right_as_often_as_they_should_be(share):
    answer = np.arange(10_000, dtype=np.int32) % 64
    (made_up,) = some_right([answer], share / 100, 64, np.random.default_rng(0))
    assert (made_up.min(), made_up.max(), made_up.dtype) == (0, 63, np.int32)
    assert np.mean(made_up == answer) == pytest.approx(share / 100, abs=0.02)


@pytest.mark.slow
def test_all_cases():
    results = speculation.measure_rows(TINY, 2, NUM_TOKENS, 1, tuple(speculation.TITLES))
    assert [len(results[name]) for name in ("made_up", "adversarial")] == [len(SHARES), 6]
    for result in (*results["made_up"], *results["adversarial"]):
        assert (result.rows, len(result.ratios)) == (2, 1)
        assert 0 <= result.num_accepted_tokens[0] <= result.num_draft_tokens[0]
        assert 0 <= result.drafted_share[0] <= 1
