"""Engines with keys and values of 8 bits, beside undisturbed ones of the same kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from sgljax_engine import (
    AttentionConfig,
    Engine,
    EngineConfig,
    InvalidConfigError,
    SamplingParams,
    preview_engine,
)
from sgljax_engine.attention.registry import engine_attention
from sgljax_engine.builder.backends import engine_backends
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.layers.target import Target
from sgljax_engine.placement.submeshes import place
from tests import inside
from tests.devices import run_python
from tests.engine import models
from tests.engine.native_cases import needs_machine_code
from tests.engine.test_chaos import INT8, KINDS, Chaos, Kind
from tests.geometry import CHUNKED, SMALL

OPTIONS: dict[str, Any] = dict([INT8])
XLA: dict[str, Any] = {"linear_backend": "xla", "attention_backend": "xla"}
WINDOWS = dataclasses.replace(
    models.TINY,
    architecture="Gemma2ForCausalLM",
    num_layers=3,
    tie_word_embeddings=True,
    attention=AttentionConfig(
        sliding_window=7, sliding_layers=(True, False, True), logit_softcap=20.0
    ),
)
CHAOS = {
    "plain": KINDS["8-bit keys"],
    "windows, soft caps and drafts": Kind(
        WINDOWS, (INT8, ("speculation", "always")), is_rounded=True
    ),
    "adapters": dataclasses.replace(
        KINDS["adapters"], options=(*KINDS["adapters"].options, INT8), is_rounded=True
    ),
    "hybrid": KINDS["8-bit keys, hybrid"],
}
PROMPTS = models.random_prompts(6, 3, 60)


def make(model: Any = models.TINY, geometry: Any = SMALL, **options: Any) -> Engine:
    weights = models.spread_weights(model)
    return Engine(model_config=model, weights=weights, **geometry, **OPTIONS, **options)


def answers(engine: Engine, prompts: Any = PROMPTS) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens and their log-probs."""
    params = SamplingParams(temperature=0, max_new_tokens=15, ignore_eos=True)
    outs = engine.generate_requests(prompts, [params] * len(prompts))
    return [out.output_ids for out in outs], [out.logprobs for out in outs]


@needs_machine_code
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        pytest.param("windows, soft caps and drafts", marks=pytest.mark.slow),
        pytest.param("adapters", marks=pytest.mark.slow),
        pytest.param("hybrid", marks=pytest.mark.slow),
    ],
)
def test_each_token_is_that_of_an_undisturbed_engine(name):
    """Among updates, pauses, retractions, sleeps with and without saved pages, and prefix hits."""
    chaos = Chaos(CHAOS[name], "native", seed=11, num_tokens=600)
    chaos.run()
    assert chaos.check("native") >= 600


@needs_machine_code
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (models.TINY, {}),
        pytest.param(models.TINY, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        (WINDOWS, {}),
        (models.HYBRID, {}),
    ],
    ids=["plain", "half", "windows", "hybrid"],
)
def test_the_same_bits_however_a_prompt_is_computed(model, options):
    """Fresh, in chunks, from the prefix cache with copied tails, and as a score."""
    with make(model, **options) as engine:
        tokens, logprobs = answers(engine)
        again = answers(engine)
        assert engine.get_internal_state().counters.num_cached_tokens > 0
        texts = [prompt + ids for prompt, ids in zip(PROMPTS, tokens, strict=True)]
        scores = engine.score(texts, 1.0, list(map(len, PROMPTS)))
        state = inside.runner(engine).kv_memory.kv
        assert {layer.k.dtype.name for layer in state.layers} == {"int8"}
    for found, wanted in zip([*again[1], *scores], [*logprobs] * 2, strict=True):
        np.testing.assert_array_equal(found, np.asarray(wanted, np.float32))
    assert again[0] == tokens
    with make(model, CHUNKED, **options) as engine:
        found_tokens, found = answers(engine)
    assert found_tokens == tokens
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(logprobs))


def test_rounding_shows_and_is_small():
    with make(**XLA) as engine:
        scores = np.concatenate(engine.score(PROMPTS))
    weights = models.spread_weights()
    with Engine(model_config=models.TINY, weights=weights, **SMALL, **XLA) as engine:
        plain = np.concatenate(engine.score(PROMPTS))
        assert engine.get_internal_state().memory.kv_dtype == "float32"
    assert 1e-3 < np.abs(scores - plain).max() < 0.3


TENSOR_PARALLEL = """
import jax, numpy as np
from tests.engine.test_int8_kv import XLA, answers, make
from tests import inside
mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("tp",))
with make(mesh=mesh) as engine:
    found = answers(engine)
    layer = inside.runner(engine).kv_memory.kv.layers[0]
    assert layer.k_scale.sharding.shard_shape(layer.k_scale.shape)[1] == 1
    engine.sleep(1, preserve_state=True)
    engine.wake_up()
    assert answers(engine)[0] == found[0]
with make(**XLA) as engine:
    wanted = answers(engine)
assert found[0] == wanted[0]
np.testing.assert_allclose(np.concatenate(found[1]), np.concatenate(wanted[1]), atol=5e-3)
"""


@pytest.mark.slow
def test_tensor_parallel():
    run_python("-W", "ignore", "-c", TENSOR_PARALLEL, num_devices=2)


def test_a_quarter_of_the_memory_and_scales():
    plain, small = (
        preview_engine(models.TINY, config=EngineConfig.from_options({**SMALL, **options})).memory
        for options in ({}, OPTIONS)
    )
    assert plain is not None
    assert small is not None
    assert (plain.kv_dtype, small.kv_dtype) == ("float32", "int8")
    # Heads of 16 numbers: 16 bytes and a scale instead of 64.
    assert small.kv_bytes == plain.kv_bytes * 20 // 64
    with make() as engine:
        report = engine.get_internal_state().memory
        pages = jax.tree.leaves(inside.runner(engine).kv_memory.kv)
    assert report.kv_dtype == "int8"
    assert report.kv_bytes == sum(x.nbytes for x in pages) == small.kv_bytes


@pytest.mark.parametrize("value", ["fp8_e5m2", "fp8_e4m3", "bfloat16", "int4", None, 8])
def test_other_dtypes_are_refused(value: Any):
    with pytest.raises(InvalidConfigError, match=r"kv_cache_dtype must be one of .*, got"):
        EngineConfig.from_options({"kv_cache_dtype": value})


def test_latents_are_refused():
    message = "kv_cache_dtype must be 'auto' for a model with latents"
    with pytest.raises(InvalidConfigError, match=message):
        preview_engine(models.LATENTS, config=EngineConfig.from_options(OPTIONS))


def target_of(platform: str) -> Target:
    target = place(models.TINY, None, "bfloat16").engines[0].target
    return target._replace(platform=platform, is_own_cpu=False, compute_capability="9.0")


@pytest.mark.parametrize("name", ["auto", "tpu"])
def test_the_kernel_of_tpus_is_refused(name):
    target = target_of("tpu")
    with pytest.raises(InvalidConfigError, match=r"kv_cache_dtype 'int8' cannot be had .* TPUs"):
        engine_attention(name, target, (128,), XlaKernels(), kv_cache_dtype="int8")
    asked = engine_attention("xla", target, (128,), XlaKernels(), kv_cache_dtype="int8")
    assert asked.name == "xla"


def test_deterministic_sampling_on_a_gpu_is_refused():
    options = {**OPTIONS, "enable_deterministic_sampling": True, "dtype": "bfloat16"}
    with pytest.raises(InvalidConfigError, match="do not take kv_cache_dtype 'int8'"):
        engine_backends(EngineConfig.from_options(options), models.TINY, target_of("gpu"))
