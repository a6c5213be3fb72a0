"""Pages of sliding layers leave with their window: the same tokens from less memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    AttentionConfig,
    Engine,
    EngineConfig,
    EngineError,
    RequestOutput,
    RopeConfig,
    SamplingParams,
    preview_engine,
)
from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.window import NONE, NUM_NULL, WindowPages, WindowSizes
from tests import inside
from tests.devices import run_python
from tests.engine.models import SHARED_KEYS, TINY, random_prompts, spread_weights
from tests.engine.stepping import SteppedEngine
from tests.geometry import RETRACTING, SMALL, other
from tests.real_configs import real_config

WINDOW, PAGE = 7, 4
MODEL = dataclasses.replace(
    TINY,
    architecture="Gemma3ForCausalLM",
    num_layers=3,
    tie_word_embeddings=True,
    attention=AttentionConfig(
        sliding_window=WINDOW,
        sliding_layers=(True, True, False),
        sliding_rope=RopeConfig(theta=1e4),
    ),
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=16 * WINDOW, ignore_eos=True)


def make(**options: Any) -> Engine:
    return Engine(model_config=MODEL, weights=spread_weights(MODEL), **{**SMALL, **options})


def pool_of(engine: Engine) -> Any:
    return inside.core(engine).pool


def prompts() -> list[list[int]]:
    """Short and long ones, some with a common beginning."""
    (common,) = random_prompts(1, 90, 90, seed=5)
    return [
        *random_prompts(4, 1, 120, seed=1),
        *(common + more for more in random_prompts(2, 1, 9, seed=6)),
        *[common] * 3,
    ]


def check_pool(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.get_internal_state().held_window_tokens == 0


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with make(disable_hybrid_swa_memory=True) as engine:
        assert pool_of(engine).windows is None
        return engine.generate_requests(prompts(), GREEDY)


class TestEngine:
    @pytest.mark.parametrize(
        ("options", "is_scarce"),
        [
            ({}, False),
            pytest.param(
                other("pages run out though all have windows", RETRACTING, num_kv_tokens=520),
                True,
                marks=pytest.mark.slow,
            ),
        ],
        ids=["small", "retracted"],
    )
    def test_same_tokens_at_sixteen_times_the_window(self, options, is_scarce, expected):
        with make(**options) as engine:
            windows = pool_of(engine).windows
            assert windows.sizes.num_pages * PAGE < 512
            for _ in range(2):  # the second time with a prefix cache of what is left
                outputs = engine.generate_requests(prompts(), GREEDY)
                check_pool(engine)
                for output, want in zip(outputs, expected, strict=True):
                    assert output.output_ids == want.output_ids
                    np.testing.assert_allclose(output.logprobs, want.logprobs, atol=1e-5)
            assert (engine.get_internal_state().counters.num_retractions > 0) == is_scarce

    def test_what_the_pools_hold(self):
        """One request alone, up to 16 times its window, step by step."""
        engine = SteppedEngine(MODEL, **SMALL)
        (future,) = engine.add([[1, 2, 3]], GREEDY)
        most = 0
        while engine.step():
            state = engine.core.state()
            engine.core.check_integrity()
            most = max(most, state.held_window_tokens)
            used = state.total_kv_tokens - state.available_kv_tokens
            length = max((r.kv_len for r in engine.core.scheduler.running), default=0)
            assert state.held_window_tokens <= used
            if length > 6 * WINDOW:
                assert used >= length > 2 * state.held_window_tokens
        assert len(future.result(0).output_ids) == 16 * WINDOW
        # The window, the tokens of a dispatch, and a page at each end.
        assert WINDOW <= most <= WINDOW + SMALL["decode_steps"] + 2 * PAGE
        memory = engine.core.state().memory
        assert memory.saved_window_bytes > memory.kv_bytes / 2

    @pytest.mark.parametrize("backend", ["auto", pytest.param("xla", marks=pytest.mark.soak)])
    def test_what_is_in_free_pages_does_not_matter(self, backend, expected):
        """NaN everywhere but in the null page, such as another request's keys could be."""
        with make(attention_backend=backend) as engine:
            kv_memory = inside.runner(engine).kv_memory
            kv_memory.allocate()

            def spoil(pages: jax.Array, in_window: bool) -> jax.Array:
                first = NUM_NULL if in_window else 0
                return pages.at[first:].set(jnp.nan)

            in_windows = kv_memory._static.in_windows
            layers = zip(kv_memory.kv.layers, in_windows, strict=True)
            spoilt = tuple(
                jax.tree.map(lambda pages, in_window=in_window: spoil(pages, in_window), layer)
                for layer, in_window in layers
            )
            kv_memory.kv = kv_memory.kv._replace(layers=spoilt)
            outputs = engine.generate_requests(prompts(), GREEDY)
            for output, want in zip(outputs, expected, strict=True):
                assert output.output_ids == want.output_ids

    def test_sleep_keeps_windows(self, expected):
        """With running requests, whose pages go to the host and come back."""
        engine = SteppedEngine(MODEL, **SMALL)
        futures = engine.add(prompts(), GREEDY)
        for _ in range(3):
            engine.step(20)
            core = engine.core
            assert core.pool.windows is not None
            before = core.pool.windows.by_page.copy()
            kept = core.sleep_manager.keep(weights=False, pages=True)
            assert kept.pages is not None
            core.runner.kv_memory.release()
            core.runner.kv_memory.allocate()  # zeros
            core.runner.kv_memory.load_pages(kept.pages, core.pool.used_pages, before)
            core.check_integrity()
        engine.step(10_000)
        found = [future.result(0).output_ids for future in futures]
        assert found == [output.output_ids for output in expected]


class TestSizes:
    def test_gemma_3_4b_at_32k(self):
        """29 of 34 layers slide over 1,024 tokens."""
        model = real_config("gemma-3-4b")
        found = {}
        for is_off in (True, False):
            config = EngineConfig.from_options(
                {  # no engine
                    "max_model_len": 32_768,
                    "max_running_requests": 16,
                    "num_kv_tokens": 16 * 32_768,
                    "dtype": "bfloat16",
                    "disable_hybrid_swa_memory": is_off,
                }
            )
            memory = preview_engine(model, config=config, device_bytes=10**12).memory
            assert memory is not None
            found[is_off] = memory
        before, after = found[True], found[False]
        assert before.kv_tokens == after.kv_tokens == 16 * 32_768
        assert (before.window_kv_tokens, before.saved_window_bytes) == (0, 0)
        assert after.saved_window_bytes == before.kv_bytes - after.kv_bytes
        per_layer = 2 * 4 * 256 * 2
        assert before.kv_bytes == 16 * 32_768 * 34 * per_layer
        sliding = (after.window_kv_tokens + after.page_size) * 29 * per_layer  # and the null page
        assert after.kv_bytes == 16 * 32_768 * 5 * per_layer + sliding
        assert after.kv_bytes < 0.25 * before.kv_bytes

    def test_a_limited_memory_holds_more_tokens(self):
        model = real_config("gemma-3-4b")
        tokens = []
        for is_off in (True, False):
            config = EngineConfig.from_options(
                {  # no engine
                    "max_model_len": 32_768,
                    "max_running_requests": 64,
                    "mem_fraction_static": 0.9,
                    "dtype": "bfloat16",
                    "disable_hybrid_swa_memory": is_off,
                }
            )
            memory = preview_engine(model, config=config, device_bytes=32 * 2**30).memory
            assert memory is not None
            assert memory.rule == "mem_fraction_static"
            assert memory.kv_bytes <= 0.9 * 32 * 2**30
            tokens.append(memory.kv_tokens)
        assert tokens[1] > 2 * tokens[0]

    def test_not_where_it_saves_nothing(self):
        with make(max_model_len=24) as engine:  # no engine that computes
            assert pool_of(engine).windows is None


class TestPages:
    def make(self, num_window_pages: int = 4, size: int = 6) -> tuple[PageAllocator, WindowPages]:
        windows = WindowPages(10, WindowSizes(num_window_pages, size, 3, 1), PAGE)
        return PageAllocator(10, windows.forget), windows

    def test_the_longest_idle_goes_first(self):
        _, windows = self.make()
        for page in range(4):
            windows.attach(page)
        windows.let_go([2, 0], keep=True)
        windows.attach(5)
        assert [windows.by_page[page] != NONE for page in (0, 1, 2, 3, 5)] == [
            True,
            True,
            False,
            True,
            True,
        ]
        assert (windows.num_held, windows.num_idle) == (3, 1)
        windows.check_integrity([[1, 3], [5]])

    def test_integrity_check_finds_planted_faults(self):
        _, windows = self.make()
        windows.attach(1)
        windows.check_integrity([[1]])
        with pytest.raises(EngineError, match="0 requests need the window page of 1"):
            windows.check_integrity([])
        windows.by_page[2] = windows.by_page[1]
        with pytest.raises(EngineError, match="by two"):
            windows.check_integrity([[1]])


@pytest.mark.soak
def test_a_model_whose_layers_all_slide():
    """Mistral 7B v0.1's kind: there are window pages alone."""
    model = dataclasses.replace(
        TINY,
        architecture="MistralForCausalLM",
        attention=AttentionConfig(sliding_window=WINDOW, sliding_layers=(True, True)),
    )
    found = []
    for is_off in (True, False):
        options: dict[str, Any] = {**SMALL, "disable_hybrid_swa_memory": is_off}
        with Engine(model_config=model, weights=spread_weights(model), **options) as engine:
            memory = engine.get_internal_state().memory
            assert memory.kv_tokens == 2048
            assert (memory.window_kv_tokens == 0) == is_off
            found.append([out.output_ids for out in engine.generate_requests(prompts(), GREEDY)])
            check_pool(engine)
    assert found[0] == found[1]
    assert memory.saved_window_bytes > 3 * memory.kv_bytes


@pytest.mark.soak
def test_layers_of_two_shapes_in_two_pools():
    """Gemma 4's: kv heads of full layers are fewer and wider; shared keys stay in their pool."""
    model = dataclasses.replace(SHARED_KEYS, num_kv_heads=2)
    found, weights = [], spread_weights(model)
    for is_off in (True, False):
        options: dict[str, Any] = {**SMALL, "disable_hybrid_swa_memory": is_off}
        with Engine(model_config=model, weights=weights, **options) as engine:
            kv = inside.runner(engine).kv_memory
            kv.allocate()
            shapes = [layer.k.shape for layer in kv.kv.layers]
            found.append([out.output_ids for out in engine.generate_requests(prompts(), GREEDY)])
    assert [shape[1:] for shape in shapes] == [(2, PAGE, 16), (1, PAGE, 32)]
    assert shapes[0][0] < shapes[1][0] == 2048 // PAGE
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.soak
def test_interrupt_machine():
    """Runs the machine that full layers have, on pages of windows."""
    run_python("-W", "ignore", "-m", "tests.engine.window_machine", 200, num_devices=1)
