"""Latencies that outputs and counters report."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from sgljax_engine import Engine, SamplingParams
from sgljax_engine.core import commands as cmd
from tests import inside
from tests.engine.interrupts import update_in_flight
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL
from tests.threads import held, start, wait_for

GREEDY = {"temperature": 0, "max_new_tokens": 12}
WAIT_S = 0.05


@pytest.fixture(scope="module")
def engine():
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        yield engine


def test_time_to_first_token_begins_with_the_call(engine):
    with held(engine):
        answer = start(lambda: engine.generate(None, GREEDY, [1, 2, 3]))
        wait_for(lambda: not inside.tasks(engine).empty())
        time.sleep(WAIT_S)
    meta = answer.result()["meta_info"]
    assert WAIT_S <= meta["time_to_first_token"] < meta["e2e_latency"]


def test_time_to_first_token_is_that_of_one_dispatch(engine):
    """Pieces report the same time; neither they nor a retraction move it."""
    params = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    stream = engine.generate(None, params, [4, 5], stream=True)
    first = next(stream)
    version = update_in_flight(engine, spread_weights(), mode="retract")
    metas = [piece["meta_info"] for piece in (first, *stream)]
    assert len({meta["time_to_first_token"] for meta in metas}) == 1
    versions = [meta["token_weight_versions"] for meta in metas]
    assert (versions[0][0], versions[-1][-1]) == (version - 1, version)


def test_time_to_first_token_of_a_request_without_tokens(engine):
    with held(engine):
        answer = start(lambda: engine.generate_requests([[6]], SamplingParams())[0])
        tasks = inside.tasks(engine)
        wait_for(lambda: not tasks.empty())
        add = tasks.get()
        tasks.put(add)
        inside.submit(engine, cmd.AbandonRequests(add.command.requests, Future()))
        wait_for(lambda: tasks.qsize() == 2)
    output = answer.result()
    assert output.output_ids == []
    assert output.time_to_first_token_s is None
    assert output.to_dict()["meta_info"]["time_to_first_token"] is None


def test_counters_add_up(engine):
    before = engine.get_internal_state().counters
    metas = [out["meta_info"] for out in engine.generate(None, GREEDY, random_prompts(20, 1, 30))]
    now = engine.get_internal_state().counters
    assert now.num_first_tokens - before.num_first_tokens == 20
    assert now.time_to_first_token_s - before.time_to_first_token_s == pytest.approx(
        sum(meta["time_to_first_token"] for meta in metas)
    )
    # Counted a moment before the answer is sent.
    added_s = now.e2e_latency_s - before.e2e_latency_s
    assert 0 < added_s <= sum(meta["e2e_latency"] for meta in metas)
