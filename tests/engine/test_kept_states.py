"""The prefix cache of models with recurrent states: which states are kept, and that hits are right.

Every answer is compared with that of an engine without a cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sgljax_engine import Engine, EngineError, SamplingParams
from sgljax_engine.cache.states import StateSlots
from sgljax_engine.types import NO_STATE
from tests.engine.interrupts import assert_idle, settle, start_all
from tests.engine.models import HYBRID, make_requests, random_prompts, spread_weights
from tests.geometry import CHUNKED, SMALL
from tests.threads import gate_steps, running

WEIGHTS = spread_weights(HYBRID)
OPTIONS: dict[str, Any] = {**SMALL, "enable_deterministic_sampling": True}
GREEDY = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True)


def make_engine(**options: Any) -> Engine:
    return gate_steps(Engine(model_config=HYBRID, weights=WEIGHTS, **OPTIONS | options))


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared):
    shared.flush_cache()
    yield shared
    settle(shared)


@pytest.fixture(scope="module")
def plain():
    # As many states as `shared` has by itself: the same programs.
    with make_engine(disable_radix_cache=True, num_state_slots=16) as engine:
        yield engine


def generate(engine, prompts, params=GREEDY):
    with running():
        return engine.generate_requests(prompts, params)


def ids(outputs):
    return [output.output_ids for output in outputs]


def prefilled(engine):
    return engine.get_internal_state().counters.num_prefill_tokens


class TestGroups:
    @pytest.mark.parametrize("length", [1, 17, 50])
    def test_a_groups_prompt_is_computed_once(self, engine, plain, length):
        (prompt,) = random_prompts(1, length, length, seed=length)
        before = prefilled(engine)
        outputs = generate(engine, [prompt], dataclasses.replace(GREEDY, n=6))
        assert prefilled(engine) - before == length - 1
        assert ids(outputs) == ids(generate(plain, [prompt])) * 6
        assert [output.num_cached_tokens for output in outputs] == [0] + [length - 1] * 5


class TestWhatEndsThem:
    def test_an_update_drops_all(self, engine, plain):
        (prompt,) = random_prompts(1, 30, 30)
        other = spread_weights(HYBRID, seed=1)
        generate(engine, [prompt])
        assert engine.get_internal_state().kept_states > 0
        engine.update_weights(other)
        assert engine.get_internal_state().kept_states == 0
        (output,) = generate(engine, [prompt])
        assert output.num_cached_tokens == 0
        engine.update_weights(WEIGHTS)
        assert ids(generate(engine, [prompt])) == ids(generate(plain, [prompt])) != ids([output])

    def test_an_update_in_place_keeps_no_state_of_two_versions(self, engine):
        (prompt,) = random_prompts(1, 30, 30)
        (call,) = start_all(engine, [prompt], dataclasses.replace(GREEDY, max_new_tokens=60))
        engine.update_weights(WEIGHTS, mode="in_place")
        with running():
            call.result(600)
        assert engine.get_internal_state().kept_states == 0

    def test_a_retracted_request_goes_on_from_its_state(self, engine, plain):
        prompts = random_prompts(3, 20, 30)
        params = dataclasses.replace(GREEDY, max_new_tokens=40)
        calls = start_all(engine, prompts, params)
        before = prefilled(engine)
        engine.pause_generation("retract")
        assert engine.get_internal_state().kept_states == 3 + 3  # behind their prompts too
        engine.continue_generation()
        with running():
            outputs = [call.result(600) for call in calls]
        assert prefilled(engine) == before
        assert ids(outputs) == ids(generate(plain, prompts, params))

    def test_they_sleep_with_the_pages(self, engine, plain):
        (prompt,) = random_prompts(1, 30, 30)
        (first,) = generate(engine, [prompt])
        engine.sleep(level=1, preserve_state=True)
        engine.wake_up()
        longer = prompt + first.output_ids + [3, 4]
        (output,) = generate(engine, [longer])
        assert output.num_cached_tokens == 39
        assert ids([output]) == ids(generate(plain, [longer]))

    def test_flush_frees_every_slot(self, engine):
        generate(engine, random_prompts(5, 10, 30))
        assert engine.get_internal_state().kept_states >= 5
        assert engine.flush_cache().success
        state = engine.get_internal_state()
        assert (state.kept_states, state.free_state_slots) == (0, state.memory.state_slots)
        assert_idle(engine)


@pytest.mark.parametrize(
    ("num_slots", "num_rounds"),
    [
        (16, 20),
        *(pytest.param(slots, 200, marks=pytest.mark.soak) for slots in (1, 2, 3, 5, 16)),
    ],
)
def test_interleavings(plain, num_slots, num_rounds):
    """Groups, turns, repeated and cut prompts, in pools with room for few states or many.

    A hit has the bits of a fresh computation; the long runs are 1,000 rounds together.
    """
    rng = np.random.default_rng(num_slots)
    pool = random_prompts(4, 5, 45, seed=9)
    with make_engine(**CHUNKED, num_state_slots=num_slots) as engine:
        hits = 0
        for _ in range(num_rounds):
            prompts = []
            for _ in range(rng.integers(1, 5)):
                tokens = pool[rng.integers(len(pool))]
                cut = rng.integers(1, len(tokens) + 1) if rng.random() < 0.3 else len(tokens)
                prompts.append(tokens[:cut])
            params = dataclasses.replace(
                GREEDY, n=int(rng.integers(1, 4)), max_new_tokens=int(rng.integers(1, 12))
            )
            outputs = generate(engine, prompts, params)
            expected = generate(plain, prompts, params)
            assert ids(outputs) == ids(expected)
            assert [each.logprobs for each in outputs] == [each.logprobs for each in expected]
            engine.check_integrity()
            hits += sum(output.num_cached_tokens > 0 for output in outputs)
            last = outputs[-1]
            if len(last.prompt_ids) < 110:  # another turn, for which there are pages
                new = rng.integers(0, HYBRID.vocab_size, rng.integers(0, 6)).tolist()
                pool[rng.integers(len(pool))] = last.prompt_ids + last.output_ids + new
        assert hits > 0
        assert_idle(engine)


class TestSlots:
    def test_integrity_check_finds_planted_faults(self):
        slots, (a,) = StateSlots(2), make_requests(4)
        slots.start(a, None, is_late=False)
        with pytest.raises(EngineError, match="own the state slots"):
            slots.check_integrity([])
        slots.release(a, None)
        assert a.state_slot == NO_STATE
        slots._held.add(5)
        with pytest.raises(EngineError, match="is not kept"):
            slots.check_integrity([])
