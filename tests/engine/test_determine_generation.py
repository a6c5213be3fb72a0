"""Interrupted greedy generation gives what uninterrupted gives: the specification's four cases.

The engine has its default buckets, and prompts of more than one chunk: nothing is padded small.
"""

from __future__ import annotations

import pytest

from sgljax_engine import Engine
from tests.engine.interrupts import LONG, results, start_all
from tests.engine.models import TINY, random_prompts, spread_weights

PROMPTS = random_prompts(8, 2, 100, seed=5)


@pytest.fixture(scope="module")
def engine():
    with Engine(
        model_config=TINY,
        weights=spread_weights(),
        page_size=8,
        max_running_requests=8,
        decode_steps=8,
        chunked_prefill_size=64,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def baseline(engine):
    return [out.output_ids for out in engine.generate_requests(PROMPTS, LONG)]


def interrupted(engine, prompts, mode):
    calls = start_all(engine, prompts)
    engine.pause_generation(mode)
    engine.continue_generation()
    return results(calls)


@pytest.mark.parametrize("index", range(3))
def test_1_single_request_retract_vs_no_pause(engine, baseline, index):
    (out,) = interrupted(engine, [PROMPTS[index]], "retract")
    assert out.num_retractions == 1
    assert out.output_ids == baseline[index]


def test_2_single_request_abort_vs_no_pause(engine, baseline):
    (partial,) = interrupted(engine, [PROMPTS[0]], "abort")
    assert 0 < len(partial.output_ids) < len(baseline[0])
    assert partial.output_ids == baseline[0][: len(partial.output_ids)]
    (again,) = engine.generate_requests([PROMPTS[0]], LONG)
    assert again.output_ids == baseline[0]


def test_3_multiple_requests_retract_vs_no_pause(engine, baseline):
    outputs = interrupted(engine, PROMPTS, "retract")
    assert [out.num_retractions for out in outputs] == [1] * len(PROMPTS)
    assert [out.output_ids for out in outputs] == baseline


def test_4_multiple_requests_abort_vs_no_pause(engine, baseline):
    partial = interrupted(engine, PROMPTS, "abort")
    for out, whole in zip(partial, baseline, strict=True):
        assert out.finish is not None
        assert out.finish.type == "abort"
        assert out.output_ids == whole[: len(out.output_ids)]
    again = engine.generate_requests(PROMPTS, LONG)
    assert [out.output_ids for out in again] == baseline
