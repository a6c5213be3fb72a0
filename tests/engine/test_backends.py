"""Which implementations an engine picks, and that they agree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sgljax_engine import Engine, InvalidConfigError, SamplingParams, logical_rules
from sgljax_engine.config import RuntimeConfig
from sgljax_engine.layers.basic import Layout
from sgljax_engine.models.registry import get_model
from sgljax_engine.runner import backends
from sgljax_engine.runner.backends import Backends, pick_backends
from sgljax_engine.runner.placement import Placement, place
from sgljax_engine.weights import sync
from tests.engine.models import TINY, logical_weights, random_prompts, spread_weights
from tests.engine.native_cases import needs_machine_code


def placement(**changes: Any) -> Placement:
    return place(TINY, None, "float32")._replace(**changes)


@pytest.fixture
def no_machine_code(monkeypatch):
    for module in (backends, sync):
        monkeypatch.setattr(module, "unavailable", lambda: "out of luck")


def runs_natively(engine: Engine) -> bool:
    static = engine._loop._core.runner._static
    assert static.context.has_native_linear == (static.decode_attention is not None)
    return static.context.has_native_linear


@needs_machine_code
class TestPick:
    def test_machine_code_is_the_default(self):
        assert pick_backends(RuntimeConfig(), placement(), 16) == Backends("native", "native")

    @pytest.mark.parametrize(
        ("changes", "head_dim", "reason"),
        [
            ({"dtype": jnp.dtype("bfloat16")}, 64, "for float32, the engine's dtype is bfloat16"),
            ({"layout": Layout.TOKENS_FIRST}, 64, "features first, activations are tokens_first"),
            ({}, 12, r"a head_dim that is a multiple of (8|16), got 12"),
        ],
    )
    def test_why_not(self, changes, head_dim, reason):
        found = pick_backends(RuntimeConfig(), placement(**changes), head_dim)
        assert found.attention == "auto"
        assert found.linear == ("xla" if changes else "native")
        with pytest.raises(InvalidConfigError, match=rf"attention_backend 'native' .*{reason}"):
            pick_backends(RuntimeConfig(attention_backend="native"), placement(**changes), head_dim)
        if changes:
            with pytest.raises(InvalidConfigError, match=rf"linear_backend 'native' .*{reason}"):
                pick_backends(RuntimeConfig(linear_backend="native"), placement(**changes), 64)

    def test_several_devices(self):
        # What is read is the mesh's shape alone, so one device may stand there twice.
        on_two = placement(mesh=Mesh(np.array(jax.devices()[:1] * 2), ("tp",)))
        found = pick_backends(RuntimeConfig(), on_two, 16)
        assert found == Backends("auto", "xla", "it is for one device, the engine has 2")

    @pytest.mark.parametrize("attention", ["xla", "xla_tiles", "xla_rows"])
    def test_each_may_be_chosen(self, attention):
        found = pick_backends(RuntimeConfig(attention_backend=attention), placement(), 16)
        assert found == Backends(attention, "native")
        found = pick_backends(RuntimeConfig(linear_backend="xla"), placement(), 16)
        assert found == Backends("native", "xla")

    def test_deterministic_sampling_too(self):
        runtime = RuntimeConfig(enable_deterministic_sampling=True)
        assert pick_backends(runtime, placement(), 16) == Backends("native", "native")


def test_no_machine_code_at_all(no_machine_code):
    assert pick_backends(RuntimeConfig(), placement(), 16) == Backends("auto", "xla", "out of luck")
    with pytest.raises(InvalidConfigError, match="cannot be had here: out of luck"):
        pick_backends(RuntimeConfig(linear_backend="native"), placement(), 16)


def generate(**options: Any):
    """Answers of requests that are batched, chunked, retracted and share prefixes."""
    prompts = random_prompts(16, 3, 90)
    prompts += [[*prompt, 5, 6] for prompt in prompts[:8]]
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    with Engine(
        model_config=TINY,
        weights=spread_weights(),
        max_running_requests=12,
        page_size=4,
        num_kv_tokens=480,
        chunked_prefill_size=64,
        init_new_token_ratio=0.0,
        min_new_token_ratio=0.0,
        **options,
    ) as engine:
        outputs = engine.generate_requests(prompts, params)
        engine.check_integrity()
        state = engine.get_internal_state()
        scored = engine.score([[*p, *o.output_ids] for p, o in zip(prompts, outputs, strict=True)])
        assert state.counters.num_retractions > 0
        return outputs, scored, runs_natively(engine), state.memory.kv_rows_bytes


@needs_machine_code
def test_both_ways_give_the_same_answers(no_machine_code, monkeypatch):
    portable = generate()
    assert not portable[2]
    monkeypatch.undo()
    native = generate()
    assert native[2:] == (True, 0)
    for one, other in zip(native[0], portable[0], strict=True):
        assert one.output_ids == other.output_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    for one, other in zip(native[1], portable[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@needs_machine_code
def test_weights_are_the_same_bits(no_machine_code, monkeypatch):
    targets = placement().weight_targets(get_model(TINY.architecture).param_specs(TINY))
    sync._build_program.cache_clear()
    weights = logical_weights()
    portable = sync.WeightMaker(targets).make(weights, logical_rules(TINY))
    monkeypatch.undo()
    sync._build_program.cache_clear()
    native = sync.WeightMaker(targets).make(weights, logical_rules(TINY))
    assert native.keys() == portable.keys()
    for name, weight in native.items():
        np.testing.assert_array_equal(weight, portable[name])
