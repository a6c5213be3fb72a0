"""int8 and half-width weights against engines with the same numbers in float32."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu import chain
from sgljax_engine import (
    Engine,
    EngineConfig,
    InvalidConfigError,
    SamplingParams,
    WeightSyncError,
    preview_engine,
)
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.shardings import is_quantized
from sgljax_engine.weights.forms import Quantized
from tests import inside
from tests.engine.models import GPT_OSS, SMOLLM3, TINY, TINY_MOE, random_prompts, spread_weights
from tests.geometry import SMALL

INT8: dict[str, Any] = {"quantization": "int8"}
BACKENDS = {
    "native": {},
    "xla": {"linear_backend": "xla"},
    "all_xla": {"linear_backend": "xla", "attention_backend": "xla"},
}
MODELS = {
    "untied": TINY,
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "olmo": dataclasses.replace(TINY, architecture="Olmo2ForCausalLM"),
    "smollm": SMOLLM3,
}
PROMPTS = random_prompts(6, 5, 40)


def rounded(model, weights):
    """The weights as int8 holds them, computed here by numpy."""
    specs = get_model(model.architecture).param_specs(model)
    found = {}
    for name, weight in weights.items():
        weight = np.asarray(weight, np.float32)
        if is_quantized(name, specs[name]):
            # By Hugging Face's names a row holds one output's weights, tables too.
            scale = np.abs(weight).max(-1, keepdims=True) / np.float32(127)
            weight = np.round(weight / scale) * scale
        found[name] = weight
    return found


def scores(model, weights, **options):
    with Engine(model_config=model, weights=weights, **SMALL, **options) as engine:
        params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
        outputs = [out.output_ids for out in engine.generate_requests(PROMPTS, [params] * 6)]
        return np.concatenate(engine.score(PROMPTS)), outputs


@functools.cache
def _floats(name):
    """Scores and tokens of the rounded weights, and scores of the plain ones, in float32."""
    model = MODELS[name]
    weights = spread_weights(model)
    plain, _ = scores(model, weights)
    return *scores(model, rounded(model, weights)), plain


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("untied", "native"),
        pytest.param("tied", "native", marks=pytest.mark.soak),
        pytest.param("tied", "xla", marks=pytest.mark.soak),
        pytest.param("untied", "all_xla", marks=pytest.mark.soak),
        pytest.param("olmo", "native", marks=pytest.mark.soak),
        pytest.param("smollm", "native", marks=pytest.mark.soak),
    ],
)
def test_is_the_rounded_model(name, backend):
    if backend == "native" and chain.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {chain.unavailable()}")
    model = MODELS[name]
    found, tokens = scores(model, spread_weights(model), **INT8, **BACKENDS[backend])
    wanted, expected, plain = _floats(name)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert tokens == expected
    assert np.abs(plain - wanted).max() > 1e-3, "rounding shows"


@pytest.mark.slow
def test_updates_make_new_factors():
    weights = spread_weights()
    larger = {name: 3.0 * np.asarray(weight) for name, weight in weights.items()}
    with Engine(model_config=TINY, weights=weights, **SMALL, **INT8) as engine:
        assert engine.find_differing_weights(weights) == []
        before = engine.get_weights_checksum()
        engine.update_weights(larger, verify=True)
        differing = engine.find_differing_weights(weights)
        # The same whole numbers with other factors, up to rounding of the quotients.
        assert "model.layers.0.mlp.up_proj.weight_scale" in differing
        found = np.concatenate(engine.score(PROMPTS))
        engine.sleep(level=1)
        engine.wake_up()
        np.testing.assert_array_equal(np.concatenate(engine.score(PROMPTS)), found)
        engine.update_weights(weights)
        assert engine.get_weights_checksum() == before
        bad = weights | {"model.layers.0.mlp.up_proj.weight": np.full((64, 32), np.nan, np.float32)}
        with pytest.raises(WeightSyncError, match=r"up_proj\.weight"):
            engine.update_weights(bad)
        assert engine.get_weights_checksum() == before
    wanted, _ = scores(TINY, larger, **INT8)
    np.testing.assert_array_equal(found, wanted)


def test_whole_numbers_and_factors():
    weight = jnp.asarray([[0.0, 2.54, -1.0], [0.0, -0.01, 0.5]])
    values, scale = (Quantized((2, 3), 1, is_scale).quantize(weight) for is_scale in (False, True))
    np.testing.assert_allclose(scale, [1.0, 0.02, 1 / 127], rtol=1e-6)
    np.testing.assert_array_equal(values, [[0, 127, -127], [0, 0, 64]])
    assert values.dtype == jnp.int8


def test_a_quarter_of_the_memory():
    config = EngineConfig.from_options({})
    small = EngineConfig.from_options({"quantization": "int8"})
    full, quantized = (preview_engine(TINY, config=each) for each in (config, small))
    assert quantized.weights_bytes < 0.6 * full.weights_bytes  # norms and a table stay


@pytest.mark.parametrize("value", ["int4", 8, True])
def test_values_that_are_none(value: Any):
    with pytest.raises(InvalidConfigError, match="quantization must be None or one of"):
        EngineConfig.from_options({"quantization": value})


@pytest.mark.parametrize("model", [TINY_MOE, GPT_OSS])
def test_experts_are_refused(model):
    message = "quantization must be None for a model with experts"
    with pytest.raises(InvalidConfigError, match=message):
        Engine(model_config=model, weights=spread_weights(model), **INT8)


@pytest.mark.skipif(chain.unavailable() is not None, reason="no JIT-compiled CPU kernels here")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_half_width_weights_and_keys(dtype):
    """Stored in the dtype, computed with in float32."""
    weights = {name: np.asarray(w, np.float32) for name, w in spread_weights().items()}
    kept = {
        name: w if "norm" in name else np.asarray(jnp.asarray(w).astype(dtype).astype("float32"))
        for name, w in weights.items()
    }
    found, _ = scores(TINY, weights, dtype=dtype)
    wanted, _ = scores(TINY, kept)
    np.testing.assert_allclose(found, wanted, atol=0.06)  # its keys and values are float32
    with Engine(model_config=TINY, weights=weights, dtype=dtype, **SMALL) as engine:
        state = inside.runner(engine)
        assert {x.dtype.name for x in jax.tree.leaves(state.kv_memory.state({}).kv)} <= {dtype}
        params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
        (out,) = engine.generate_requests(PROMPTS[:1], [params])
        scored = engine.score([[*PROMPTS[0], *out.output_ids]], 1.0, [len(PROMPTS[0])])[0]
        np.testing.assert_allclose(out.logprobs, scored, atol=0.1)  # rounded keys
