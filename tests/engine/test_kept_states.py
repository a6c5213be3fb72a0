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
from sgljax_engine.types import NO_STATE, StateCopy
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
    @pytest.mark.parametrize("length", [1, 2, 5, 9, 17, 50, 130])
    def test_a_groups_prompt_is_computed_once(self, engine, plain, length):
        (prompt,) = random_prompts(1, length, length, seed=length)
        before = prefilled(engine)
        outputs = generate(engine, [prompt], dataclasses.replace(GREEDY, n=6))
        assert prefilled(engine) - before == length - 1
        assert ids(outputs) == ids(generate(plain, [prompt])) * 6
        assert [output.num_cached_tokens for output in outputs] == [0] + [length - 1] * 5

    def test_more_samples_than_rows(self, engine, plain):
        (prompt,) = random_prompts(1, 37, 37)
        before = prefilled(engine)
        outputs = generate(engine, [prompt], dataclasses.replace(GREEDY, n=20))
        assert prefilled(engine) - before == 36
        assert ids(outputs) == ids(generate(plain, [prompt])) * 20

    def test_groups_that_share_their_beginning(self, engine, plain):
        """Its keys are shared; the states behind it are computed again for each prompt."""
        start, *ends = random_prompts(4, 21, 21, seed=5)
        prompts = [start + end[: 3 + i] for i, end in enumerate(ends)]
        params = dataclasses.replace(GREEDY, n=4)
        found = [ids(generate(engine, [prompt], params)) for prompt in prompts]
        assert found == [ids(generate(plain, [prompt])) * 4 for prompt in prompts]
        together = generate(engine, prompts, params)
        assert ids(together) == [each for group in found for each in group]
        # All of it was there the second time.
        assert {output.num_cached_tokens > 20 for output in together[1:]} == {True}


class TestLaterPrompts:
    """Nobody waits with them."""

    @pytest.mark.parametrize("length", [17, 33, 50])
    def test_a_prompt_that_comes_again(self, engine, plain, length):
        (prompt,) = random_prompts(1, length, length, seed=length)
        found = [generate(engine, [prompt])[0] for _ in range(3)]
        assert ids(found) == ids(generate(plain, [prompt])) * 3
        assert [output.num_cached_tokens for output in found] == [0, length - 1, length - 1]

    def test_prompts_that_share_their_beginning(self, engine, plain):
        """The second leaves the pages of the first, and a state is kept there."""
        start, *ends = random_prompts(5, 48, 48, seed=6)
        prompts = [start + end[: 5 + i] for i, end in enumerate(ends)]
        found = [generate(engine, [prompt])[0] for prompt in prompts]
        assert ids(found) == ids(generate(plain, prompts))
        assert [output.num_cached_tokens for output in found] == [0, 0, 48, 48]


class TestTurns:
    def test_an_episode_goes_on_from_its_own_state(self, engine, plain):
        (tokens,) = random_prompts(1, 30, 30, seed=1)
        more = random_prompts(4, 3, 12, seed=2)
        for turn, new in enumerate([[], *more]):
            tokens = tokens + new
            before = prefilled(engine)
            (output,) = generate(engine, [tokens])
            assert ids([output]) == ids(generate(plain, [tokens]))
            # The last token of an answer has not been through the model.
            assert prefilled(engine) - before == (29 if turn == 0 else len(new))
            tokens = tokens + output.output_ids

    def test_a_turn_that_is_asked_again(self, engine, plain):
        (tokens,) = random_prompts(1, 26, 26, seed=3)
        (first,) = generate(engine, [tokens])
        longer = tokens + first.output_ids + [7]
        found = [generate(engine, [longer])[0] for _ in range(3)]
        assert ids(found) == ids(generate(plain, [longer])) * 3
        # Then there is also a state behind the prompt itself.
        assert [output.num_cached_tokens for output in found] == [26 + 10 - 1, 36, 36]

    def test_a_prefix_is_not_used_beyond_a_kept_state(self, engine, plain):
        """Keys of a prompt's first half are there, and no state behind them."""
        (tokens,) = random_prompts(1, 40, 40, seed=4)
        generate(engine, [tokens])
        (half,) = generate(engine, [tokens[:22]])
        assert half.num_cached_tokens == 0
        assert ids([half]) == ids(generate(plain, [tokens[:22]]))


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

    @pytest.mark.slow
    def test_checkpoints_compute_them_anew(self, engine, plain, tmp_path):
        prompts = random_prompts(3, 20, 30)
        params = dataclasses.replace(GREEDY, max_new_tokens=40)
        calls = start_all(engine, prompts, params)
        engine.pause_generation("in_place")
        engine.save_checkpoint(tmp_path)
        with make_engine() as other, running():
            futures = other.restore_checkpoint(tmp_path).values()
            restored = [future.result(600) for future in futures]
        engine.continue_generation()
        with running():
            found = [call.result(600) for call in calls]
        expected = generate(plain, prompts, params)
        assert ids(found) == ids(expected)
        # Computed anew, with the same bits.
        logprobs = [{tuple(each.logprobs) for each in outs} for outs in (restored, expected)]
        assert logprobs[0] == logprobs[1]
        assert {tuple(each) for each in ids(restored)} == {tuple(each) for each in ids(expected)}


@pytest.mark.parametrize(
    ("num_slots", "num_rounds"),
    [
        (16, 20),
        pytest.param(2, 20, marks=pytest.mark.slow),
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
    def test_the_longest_unused_goes_first(self):
        slots, (a, b, c) = StateSlots(2), make_requests(4, 4, 4)
        for request, page in ((a, 10), (b, 11)):
            slots.start(request, None, is_late=False)
            slots.release(request, page)
        slots.start(c, 10, is_late=False)  # takes the slot of 11
        assert slots.take_copies().early == [StateCopy(0, 1)]
        slots.settle()
        assert not slots.is_kept(11, also_fresh=True)
        slots.check_integrity([c])

    def test_the_only_slot_is_handed_over(self):
        slots, (a, b) = StateSlots(1), make_requests(4, 4)
        slots.start(a, None, is_late=False)
        slots.release(a, 10)
        slots.start(b, 10, is_late=False)
        assert (b.state_slot, slots.num_available, slots.num_kept) == (0, 0, 0)
        assert slots.take_copies() == ([], [])
        slots.check_integrity([b])

    def test_a_state_that_one_request_replaced_goes_first(self):
        slots, (a, b, c) = StateSlots(4), make_requests(4, 4, 4)
        for request, page in ((a, 10), (b, 11)):
            slots.start(request, None, is_late=False)
            slots.release(request, page)
        slots.start(a, 11, is_late=False)  # the next turn
        slots.settle()
        slots.release(a, 12)
        slots.start(b, None, is_late=False)
        slots.start(c, None, is_late=False)
        assert [slots.is_kept(page, also_fresh=True) for page in (10, 11, 12)] == [
            True,
            False,
            True,
        ]
        slots.check_integrity([b, c])

    def test_states_on_trial_are_few_while_slots_are_short(self):
        slots, (a, b) = StateSlots(5), make_requests(4, 4)
        slots.start(a, None, is_late=False)
        slots.start(b, None, is_late=False)
        for page in (10, 11, 12):  # slots are free
            slots.keep(a, page, on_trial=True)
            slots.settle()
        slots.keep(a, 13, on_trial=True)
        assert slots.is_kept(13, also_fresh=True)
        assert not slots.is_kept(10, also_fresh=True)
        slots.settle()
        slots.release(a, 14)
        slots.start(a, 13, is_late=False)  # takes the slot of 11; 13 is proven
        slots.settle()
        slots.keep(a, 15, on_trial=True)  # takes that of 12, not of 14
        assert [slots.is_kept(page, also_fresh=True) for page in range(10, 16)] == [
            False, False, False, True, True, True,
        ]  # fmt: skip
        slots.check_integrity([a, b])

    def test_a_fresh_state_is_read_where_it_is_computed(self):
        slots, (a, b) = StateSlots(3), make_requests(4, 4)
        slots.start(a, None, is_late=False)
        slots.keep(a, 10, on_trial=False)
        assert slots.is_kept(10, also_fresh=True)
        assert not slots.is_kept(10, also_fresh=False)
        slots.start(b, 10, is_late=True)
        assert slots.take_copies().late == [StateCopy(0, 1), StateCopy(0, 2)]
        assert slots.num_available == 0
        slots.settle()
        assert slots.is_kept(10, also_fresh=False)
        assert slots.num_available == 1

    def test_what_is_copied_stays(self):
        slots, (a, b) = StateSlots(2), make_requests(4, 4)
        slots.start(a, None, is_late=False)
        slots.release(a, 10)
        slots.start(b, 10, is_late=False)
        assert slots.num_available == 0
        with pytest.raises(EngineError, match="being copied"):
            slots.forget([10])
        slots.settle()
        slots.forget([10, 12])
        assert slots.num_available == 1

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
