"""The experts that each token went through are those of one plain pass over all tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    EngineConfig,
    InvalidConfigError,
    MoEConfig,
    RequestOutput,
    SamplingParams,
    logical_rules,
    preview_engine,
)
from sgljax_engine.config import RuntimeConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext, Pass
from sgljax_engine.placement.submeshes import place
from sgljax_engine.types import FinishReason, RequestStatus
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.plan import WeightPlanner
from tests.devices import run_python
from tests.engine import small_tokenizers
from tests.engine.models import TINY, TINY_MOE, logical_weights, random_prompts, spread_weights
from tests.engine.stepping import SteppedEngine
from tests.geometry import RETRACTING, SMALL, WIDE

NUM_LAYERS, NUM_CHOSEN, MAX_LEN = TINY_MOE.num_layers, 3, 128
OPTIONS: dict[str, Any] = {**SMALL, "enable_return_routed_experts": True}
GREEDY = SamplingParams(temperature=0, max_new_tokens=11, ignore_eos=True)

Routed = Callable[[Sequence[int]], np.ndarray]


def make(**options: Any) -> Engine:
    return Engine(model_config=TINY_MOE, weights=spread_weights(TINY_MOE), **OPTIONS | options)


@pytest.fixture(scope="module")
def routed() -> Routed:
    """The experts of all given tokens, from one pass without a cache."""
    definition = get_model(TINY_MOE.architecture)
    placement = place(TINY_MOE, None, "float32", runtime=RuntimeConfig(linear_backend="xla")).whole
    planner = WeightPlanner(placement.weight_targets(definition.param_specs(TINY_MOE)))
    weights = apply(*planner.plan(logical_weights(TINY_MOE), logical_rules(TINY_MOE)))
    context = ModelContext(TINY_MOE, returns_routed=True)

    def attend(new, cache, options):
        k, v = (jnp.repeat(x, new.q.shape[1] // x.shape[1], axis=1) for x in (new.k, new.v))
        scores = jnp.einsum("qhd,khd->hqk", new.q, k) * options.scale
        is_seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
        return jnp.einsum("hqk,khd->qhd", weights, v), cache

    @jax.jit
    def run(ids):
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        caches: tuple[Any, ...] = (None,) * NUM_LAYERS
        return definition.forward(weights, context, Pass(ids, positions, attend, caches)).routed

    def find(tokens):
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(run(padded))[: len(tokens)].reshape(-1, NUM_LAYERS, NUM_CHOSEN)

    return find


def prompts() -> list[list[int]]:
    """Some of them equal, and some with a common beginning."""
    (common,) = random_prompts(1, 37, 37, seed=5)
    return [
        *random_prompts(3, 1, 60, seed=1),
        *(common + more for more in random_prompts(2, 1, 9, seed=6)),
        *[common] * 2,
    ]


def check(outputs: Sequence[RequestOutput], routed: Routed) -> None:
    assert outputs
    for output in outputs:
        found = output.routed_experts
        assert found is not None
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, routed([*output.prompt_ids, *output.output_ids][:-1]))


class TestOutputs:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            pytest.param(RETRACTING, marks=pytest.mark.slow),
            pytest.param({"disable_radix_cache": True}, marks=pytest.mark.soak),
            pytest.param(WIDE, marks=pytest.mark.soak),
        ],
        ids=["small", "chunked", "no cache", "wide"],
    )
    def test_they_are_those_of_a_plain_pass(self, options, routed):
        num_tokens = 40 if options is RETRACTING else 11
        params = dataclasses.replace(GREEDY, max_new_tokens=num_tokens)
        with make(**options) as engine:
            for _ in range(2):  # the second time with cached prefixes
                outputs = engine.generate_requests(prompts(), params)
                check(outputs, routed)
            if options is RETRACTING:
                assert engine.get_internal_state().counters.num_retractions > 0

    def test_samples_of_a_prompt(self, routed):
        params = SamplingParams(temperature=1.0, max_new_tokens=9, n=4, seed=3)
        with make() as engine:
            outputs = engine.generate_requests(prompts()[:2], params)
            assert len({tuple(output.output_ids) for output in outputs}) > 2
            check(outputs, routed)
            (alone,) = engine.generate_requests([prompts()[0]], GREEDY)
            found = engine.generate(input_ids=prompts()[0], sampling_params=GREEDY)
        assert isinstance(found, dict)
        assert alone.routed_experts is not None
        np.testing.assert_array_equal(found["meta_info"]["routed_experts"], alone.routed_experts)

    def test_streams_and_stop_strings(self, routed):
        tokenizer = small_tokenizers.CharTokenizer()
        with make(tokenizer=tokenizer, stream_interval=2) as engine:
            (whole,) = engine.generate_requests([prompts()[0]], GREEDY)
            stop = tokenizer.decode(whole.output_ids[4:6])
            params = dataclasses.replace(GREEDY, stop=[stop])
            (output,) = engine.generate_requests([prompts()[0]], params)
            check([output], routed)
            assert len(output.output_ids) == 6
            pieces = list(
                engine.generate(input_ids=prompts()[0], sampling_params=GREEDY, stream=True)
            )
        *first, last = (piece["meta_info"].get("routed_experts") for piece in pieces)
        assert first
        assert all(piece is None for piece in first)
        assert whole.routed_experts is not None
        np.testing.assert_array_equal(last, whole.routed_experts)

    def test_off_by_default(self):
        with make(enable_return_routed_experts=False) as engine:
            (output,) = engine.generate_requests([[1, 2, 3]], GREEDY)
            assert output.routed_experts is None
            assert "routed_experts" not in output.to_dict()["meta_info"]


class TestInterruptions:
    def test_pages_that_go_to_the_host_and_back(self, routed):
        engine = SteppedEngine(TINY_MOE, **OPTIONS)
        futures = engine.add(prompts(), GREEDY)
        core = engine.core
        for _ in range(3):
            engine.step()
            kept = core.sleep_manager.keep(weights=False, pages=True)
            assert kept.pages is not None
            core.runner.kv_memory.release()
            core.runner.kv_memory.allocate()  # zeros
            core.runner.kv_memory.load_pages(kept.pages, core.pool.used_pages)
        engine.finish()
        check([future.result(0) for future in futures], routed)

    def test_retracted_requests_with_stop_strings_read_theirs_again(self, routed):
        engine = SteppedEngine(TINY_MOE, **OPTIONS)
        futures = engine.add(prompts()[:3], dataclasses.replace(GREEDY, max_new_tokens=20))
        for request in engine.core.scheduler.requests():
            request.params = dataclasses.replace(request.params, stop=("never",))
        engine.step(2)
        assert all(request.routed is not None for request in engine.core.scheduler.running)
        engine.core.retract_all()
        assert all(request.routed is None for request in engine.core.scheduler.requests())
        engine.finish()
        check([future.result(0) for future in futures], routed)

    def test_ended_requests(self, routed):
        """Those with keys for all tokens have their experts, and others do not."""
        engine = SteppedEngine(TINY_MOE, **OPTIONS, max_dispatch_s=math.inf)
        futures = engine.add(prompts(), GREEDY)
        engine.step(2)
        core = engine.core
        requests = core.scheduler.requests()
        running = [each for each in requests if each.status is RequestStatus.RUNNING]
        num_whole = sum(bool(request.output_ids) for request in running)
        assert 0 < num_whole < len(running) < len(requests), "one is amid its prompt, others wait"
        core.end(requests, FinishReason("abort"))
        core.outputs.flush()
        outputs = [future.result(0) for future in futures]
        done = [output for output in outputs if output.routed_experts is not None]
        check(done, routed)
        assert len(done) == num_whole

    def test_a_failed_read_fails_the_step(self, monkeypatch):
        engine = SteppedEngine(TINY_MOE, **OPTIONS)
        (future,) = engine.add([[1, 2, 3]], GREEDY)

        def fail(pages):
            raise RuntimeError("planted fault")

        monkeypatch.setattr(engine.core.runner.routed_reader, "_read_pages", fail)
        engine.finish()
        assert "planted fault" in str(future.exception(0))
        engine.core.check_integrity()


class TestOptions:
    def test_refused_without_experts(self):
        message = "enable_return_routed_experts must be False for a model without experts"
        with pytest.raises(InvalidConfigError, match=message):
            Engine(model_config=TINY, weights=spread_weights(TINY), **OPTIONS)
        with pytest.raises(InvalidConfigError, match=message):
            preview_engine(TINY, config=EngineConfig.from_options(OPTIONS))

    def test_the_memory_plan_counts_them(self):
        found = []
        for is_on in (True, False):
            options = OPTIONS | {"enable_return_routed_experts": is_on}
            plan = preview_engine(TINY_MOE, config=EngineConfig.from_options(options)).memory
            assert plan is not None
            with make(**options) as engine:
                assert engine.get_internal_state().memory.kv_bytes == plan.kv_bytes
                assert engine.release_kv_cache() == plan.kv_bytes
            found.append(plan.kv_bytes)
        assert found[0] - found[1] == 2048 * 128  # NUM_LAYERS * NUM_CHOSEN, in whole vectors

    @pytest.mark.parametrize(
        ("num_experts", "dtype"), [(256, "uint8"), (257, "uint16"), (65_537, "uint32")]
    )
    def test_dtype(self, num_experts, dtype):
        moe = MoEConfig(
            num_experts=num_experts,
            num_experts_per_token=1,
            intermediate_size=1,
            norm_topk_prob=True,
        )
        assert moe.id_dtype == dtype


ON_DEVICES = """
import dataclasses
import jax, numpy as np
from jax.sharding import Mesh
from sgljax_engine import Engine
from tests.engine.models import TINY_MOE, spread_weights
from tests.engine.test_routed_experts import GREEDY, OPTIONS, prompts

MODEL = dataclasses.replace(TINY_MOE, num_layers=1)  # compiled in half the time

def make(mesh):
    return Engine(model_config=MODEL, weights=spread_weights(MODEL), mesh=mesh, **OPTIONS)

with make(Mesh(np.asarray(jax.devices()[:1]), ("tp",))) as engine:
    wanted = engine.generate_requests(prompts(), GREEDY)
mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("fsdp", "tp"))
with make(mesh) as engine:
    for output, want in zip(engine.generate_requests(prompts(), GREEDY), wanted, strict=True):
        assert output.output_ids == want.output_ids
        np.testing.assert_array_equal(output.routed_experts, want.routed_experts)
    memory = engine.get_internal_state().memory
    assert engine.release_kv_cache() == memory.kv_bytes
"""


@pytest.mark.soak
def test_several_devices():
    run_python("-c", ON_DEVICES, num_devices=4)
