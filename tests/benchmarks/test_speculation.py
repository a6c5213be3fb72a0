"""The benchmark of draft tokens: its arithmetic, and all its cases on a small model."""

import numpy as np
import pytest

from benchmarks.throughput import speculation
from benchmarks.throughput.speculation import SHARES, some_right
from tests.engine.models import TINY

NUM_TOKENS = 24


@pytest.mark.parametrize("share", SHARES)
def test_made_up_answers_are_right_as_often_as_they_should_be(share):
    answer = np.arange(10_000, dtype=np.int32) % 64
    (made_up,) = some_right([answer], share / 100, 64, np.random.default_rng(0))
    assert (made_up.min(), made_up.max(), made_up.dtype) == (0, 63, np.int32)
    assert np.mean(made_up == answer) == pytest.approx(share / 100, abs=0.02)


@pytest.mark.soak
def test_all_cases():
    results = speculation.measure_rows(TINY, 2, NUM_TOKENS, 1)
    assert len(results) == len(SHARES) + 2
    for result in results:
        assert (result.rows, len(result.seconds["auto"])) == (2, 1)
        assert 0 <= result.drafted_share <= 1
