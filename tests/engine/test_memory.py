"""Memory: what the engine says that it took, and that it takes nothing more."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import jax
import pytest

from sgljax_engine import Engine, InvalidConfigError, SamplingParams
from sgljax_engine.runner.kv import memory_plan as memory
from tests import inside
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import CHUNKED, SMALL

# Two layers, keys and values, two heads of 16 float32 numbers.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


def make_engine(**options: Any) -> Engine:
    return Engine(model_config=TINY, weights=spread_weights(), **{**SMALL, **options})


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


class TestReport:
    @pytest.mark.parametrize(
        ("options", "free_tokens", "kv_tokens", "rule"),
        [
            ({"num_kv_tokens": 1023}, 4096, 1020, "num_kv_tokens"),  # no engine takes a step
            ({}, 100_000, 8 * 256, "max_running_requests x max_model_len"),
            ({"mem_fraction_static": 0.25}, 4096, 1024, "mem_fraction_static"),
        ],
    )
    def test_says_what_was_taken_and_why(
        self, monkeypatch, caplog, options, free_tokens, kv_tokens, rule
    ):
        free = free_tokens * BYTES_PER_TOKEN
        monkeypatch.setattr(memory, "free_bytes", lambda _: free)
        with caplog.at_level(logging.INFO, memory.__name__), make_engine(**options) as engine:
            report = engine.get_internal_state().memory
            weights = inside.runner(engine).weights.values()
            assert report.weights_bytes == sum(weight.nbytes for weight in weights)
            assert report.kv_bytes == sum(
                x.nbytes for x in jax.tree.leaves(inside.runner(engine).kv_memory.kv)
            )
        assert report.kv_tokens == kv_tokens
        assert report.kv_bytes == kv_tokens * BYTES_PER_TOKEN
        assert (report.page_size, report.rule, report.free_bytes) == (4, rule, free)
        lines = [r.getMessage() for r in caplog.records if r.name == memory.__name__]
        line = lines[-1]
        assert f"{report.kv_bytes} for {kv_tokens} tokens in pages of 4, as {rule} says" in line

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            # no engine
            ({"num_kv_tokens": 800}, "num_kv_tokens 800 takes .* at most 400 tokens fit the"),
            ({"mem_fraction_static": 0.001}, "mem_fraction_static 0.001 .* all of them hold 100"),
        ],
    )
    def test_says_what_would_fit(self, monkeypatch, options, message):
        monkeypatch.setattr(memory, "free_bytes", lambda _: 403 * BYTES_PER_TOKEN)
        with pytest.raises(InvalidConfigError, match=message):
            make_engine(**options)

    def test_free_memory_excludes_the_weights(self, monkeypatch):
        """It is read when they are there."""
        seen = []

        def read(_: Any) -> int:
            seen.append(live_bytes())
            return 10**9

        monkeypatch.setattr(memory, "free_bytes", read)
        before = live_bytes()
        with make_engine() as engine:
            weights_bytes = engine.get_internal_state().memory.weights_bytes
        assert [now - before for now in seen] == [weights_bytes]


class TestWeights:
    def test_are_held_once(self):
        """Also after updates; while one runs there are the old and the new."""
        before = live_bytes()
        with make_engine() as engine:
            report = engine.get_internal_state().memory
            taken = report.weights_bytes + report.kv_bytes
            assert live_bytes() - before == taken
            for _ in range(2):
                old = [weakref.ref(w) for w in inside.runner(engine).weights.values()]
                engine.update_weights(spread_weights())
                assert live_bytes() - before == taken
                assert all(ref() is None for ref in old)
        assert live_bytes() <= before


class TestPages:
    def test_no_step_reallocates_them(self):
        with make_engine(**CHUNKED) as engine:
            engine.warmup()
            runner = inside.runner(engine)

            def places() -> list[int]:
                return sorted(
                    x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner.kv_memory.kv)
                )

            at_start, num_live = places(), len(jax.live_arrays())
            for seed in range(3):
                prompts = random_prompts(12, 1, 90, seed=seed)
                engine.generate(None, {"max_new_tokens": 20, "n": 2}, prompts)
                engine.get_internal_state()
                assert places() == at_start
                gc.collect()
                assert len(jax.live_arrays()) <= num_live
            assert engine.get_internal_state().counters.num_dispatches > 50

    def test_memory_comes_back_at_the_next_dispatch(self):
        prompts, params = (
            random_prompts(6, 10, 40),
            SamplingParams(temperature=0, max_new_tokens=20),
        )
        with make_engine() as engine:
            before = engine.generate_requests(prompts, params)
            num_compiles = engine.get_internal_state().num_compiles
            memory = engine.get_internal_state().memory
            assert engine.release_kv_cache() == memory.kv_bytes > 0
            state = engine.get_internal_state()
            assert not state.is_kv_allocated
            assert state.cached_kv_tokens == 0
            assert engine.release_kv_cache() == 0
            assert engine.score([[1, 2, 3]])[0].shape == (2,)
            assert not engine.get_internal_state().is_kv_allocated
            after = engine.generate_requests(prompts, params)
            assert [out.output_ids for out in after] == [out.output_ids for out in before]
            state = engine.get_internal_state()
            assert state.is_kv_allocated
            assert state.num_compiles <= num_compiles + 1  # score's
