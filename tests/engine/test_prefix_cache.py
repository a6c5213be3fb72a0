"""Shared prompt pages in the real engine: what is computed once, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sgljax_engine import Engine, SamplingParams
from tests import inside
from tests.engine.exactness_checks import check_reuse_changes_nothing, check_update_leaves_no_prefix
from tests.engine.models import TINY, spread_weights
from tests.geometry import RETRACTING, SMALL

PAGE = SMALL["page_size"]
GROUP = SMALL["max_running_requests"]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
SAMPLES = SamplingParams(n=GROUP, temperature=1.0, seed=3, max_new_tokens=4)


def make_engine(**given: Any) -> Engine:
    options: dict[str, Any] = {"model_config": TINY, **SMALL, **given}
    weights = options.pop("weights", None) or spread_weights(options["model_config"])
    return Engine(weights=weights, **options)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, TINY.vocab_size, length).tolist()


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def reference():
    """The same engine without a prefix cache."""
    with make_engine(disable_radix_cache=True) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """With an empty cache; every page must be free afterwards."""
    shared.flush_cache()
    yield shared
    assert_all_free(shared)


def assert_all_free(engine):
    engine.check_integrity()
    engine.flush_cache()
    state = engine.get_internal_state()
    assert state.running_batch_size == state.waiting_queue_size == state.cached_kv_tokens == 0
    assert state.available_kv_tokens == state.total_kv_tokens
    engine.check_integrity()


class Counted:
    """What an engine's counters grew by."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.get_internal_state().counters

    def __getattr__(self, name: str) -> int:
        now = self._engine.get_internal_state().counters
        return getattr(now, f"num_{name}") - getattr(self._before, f"num_{name}")


def ids(outputs):
    return [output.output_ids for output in outputs]


def greedy(engine, prompt):
    return engine.generate_requests([prompt], GREEDY)[0]


class TestGroup:
    def test_prompt_of_a_group_is_prefilled_once(self, engine, reference):
        prompt, counted = make_prompt(60), Counted(engine)
        outs = engine.generate(input_ids=prompt, sampling_params=SAMPLES)
        assert counted.prefill_tokens == 59
        assert counted.cached_tokens == 7 * 59
        assert counted.page_copies == 8  # one each of the last, half-filled page
        assert [o["meta_info"]["cached_tokens"] for o in outs] == [0] + 7 * [59]
        assert all(o["meta_info"]["prompt_tokens"] == 60 for o in outs)
        plain = reference.generate(input_ids=prompt, sampling_params=SAMPLES)
        assert [o["output_ids"] for o in outs] == [o["output_ids"] for o in plain]
        assert len({tuple(o["output_ids"]) for o in outs}) > 1

    def test_without_the_cache_everything_is_computed(self, reference):
        counted = Counted(reference)
        outs = reference.generate_requests([make_prompt(60)], SAMPLES)
        assert counted.prefill_tokens == 8 * 59
        assert counted.cached_tokens == counted.page_copies == 0
        assert [o.num_cached_tokens for o in outs] == 8 * [0]
        assert reference.get_internal_state().cached_kv_tokens == 0
        assert reference.flush_cache().flushed_items == 0

    @pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, PAGE + 2, 2 * PAGE + 1])
    def test_any_length_is_prefilled_once(self, engine, reference, length):
        prompt, counted = make_prompt(length), Counted(engine)
        outs = engine.generate_requests([prompt], SAMPLES)
        assert counted.prefill_tokens == length - 1
        assert counted.cached_tokens == 7 * (length - 1)
        assert counted.page_copies == (8 if (length - 1) % PAGE else 0)
        assert ids(outs) == ids(reference.generate_requests([prompt], SAMPLES))

    def test_prompts_with_the_same_beginning_share_whole_pages(self, engine, reference):
        common = make_prompt(18)
        prompts = [common + make_prompt(12, seed) for seed in range(3)]
        counted = Counted(engine)
        outs = engine.generate_requests(prompts, GREEDY)
        assert [o.num_cached_tokens for o in outs] == [0, 16, 16]
        assert counted.prefill_tokens == 29 + 2 * 13
        assert counted.page_copies == 0
        assert ids(outs) == ids(reference.generate_requests(prompts, GREEDY))

    def test_pool_that_holds_one_request_more_than_the_prompt(self, reference):
        """Pages run out in the middle of the group, tails and all."""
        prompt = make_prompt(120)
        with make_engine(**RETRACTING) as engine:
            params = dataclasses.replace(SAMPLES, max_new_tokens=30)
            outs = engine.generate_requests([prompt], params)
            assert_all_free(engine)
        assert sum(out.num_retractions for out in outs) > 0
        assert ids(outs) == ids(reference.generate_requests([prompt], params))


class TestTurns:
    def test_next_turn_reuses_prompt_and_output(self, engine, reference):
        prompt, length = make_prompt(50), 50
        for turn in range(4):
            out = greedy(engine, prompt)
            assert out.num_cached_tokens == (0 if turn == 0 else (length - 1) // PAGE * PAGE)
            assert out.output_ids == greedy(reference, prompt).output_ids
            prompt = prompt + out.output_ids
            length = len(prompt)  # the last token's key was never needed
            prompt = prompt + make_prompt(10, turn)

    def test_same_prompt_later_finds_its_whole_pages(self, engine, reference):
        prompt = make_prompt(3 * PAGE)
        check_reuse_changes_nothing(engine, reference, prompt)
        assert greedy(engine, prompt).num_cached_tokens == 2 * PAGE


class TestUpdate:
    def test_nothing_of_older_weights_is_matched(self):
        weights = spread_weights(seed=1)
        with make_engine() as engine, make_engine(weights=weights) as fresh:
            check_update_leaves_no_prefix(engine, fresh, weights, make_prompt(120))
            assert_all_free(engine)


class TestFlush:
    def test_frees_all_that_nobody_uses(self, engine):
        greedy(engine, make_prompt(100))  # and 7 of 8 new tokens
        state = engine.get_internal_state()
        assert state.cached_kv_tokens == 26 * PAGE
        assert state.available_kv_tokens == state.total_kv_tokens
        assert engine.flush_cache().flushed_items == 26 * PAGE
        assert engine.get_internal_state().cached_kv_tokens == 0
        assert greedy(engine, make_prompt(100)).num_cached_tokens == 0


class TestPressure:
    NUM_TALKS, NUM_TURNS, NUM_THREADS = 100, 5, 16

    def talk(self, engine: Engine, number: int) -> list[list[int]]:
        """A conversation of several turns; its text depends on what the engine answers."""
        rng = np.random.default_rng([7, number])
        prompt = make_prompt(60, number % 5)[: int(rng.integers(1, 61))]
        answers = []
        for _ in range(self.NUM_TURNS):
            params = SamplingParams(temperature=0, max_new_tokens=int(rng.integers(1, 13)))
            answer = engine.generate_requests([prompt], params)[0].output_ids
            answers.append(answer)
            more = rng.integers(0, TINY.vocab_size, int(rng.integers(1, 7))).tolist()
            prompt = [*prompt, *answer, *more]
        return answers

    def run(self, **options: Any) -> tuple[list[list[list[int]]], Any, int]:
        with make_engine(**RETRACTING, **options) as engine:
            evictions = count_evictions(engine)
            with ThreadPoolExecutor(self.NUM_THREADS) as pool:
                talks = list(pool.map(lambda i: self.talk(engine, i), range(self.NUM_TALKS)))
            counters = engine.get_internal_state().counters
            assert_all_free(engine)
        return talks, counters, len(evictions)

    @pytest.mark.soak
    def test_500_requests_answer_the_same_with_and_without_the_cache(self):
        plain, plain_counters, _ = self.run(disable_radix_cache=True)
        cached, counters, num_evictions = self.run()
        assert cached == plain
        assert counters.num_finished == plain_counters.num_finished == 500
        assert num_evictions > 500
        assert counters.num_retractions > 0
        assert plain_counters.num_retractions > 0
        assert counters.num_cached_tokens > 3000
        assert counters.num_prefill_tokens < plain_counters.num_prefill_tokens


def count_evictions(engine: Engine) -> list[int]:
    cache = inside.core(engine).pool._cache
    evict, pages, lock = cache._evict, [], threading.Lock()

    def counting() -> None:
        with lock:
            pages.append(1)
        evict()

    cache._evict = counting
    return pages
