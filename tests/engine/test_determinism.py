"""Deterministic mode: the bits of tokens and log-probs, however requests are run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import sgljax_cpu
from sgljax_engine import Engine, EngineConfig, InvalidConfigError
from sgljax_engine.builder.backends import engine_backends
from sgljax_engine.placement.submeshes import place
from sgljax_engine.preview import preview_engine
from tests.engine.determinism_cases import (
    ALONE,
    MODEL,
    Bits,
    Interrupter,
    Way,
    differing,
    make_engine,
    requests,
    run,
)
from tests.engine.exactness_checks import check_bits
from tests.engine.models import (
    GPT_OSS,
    LATENTS,
    MIXED_HEADS,
    NEW_FAMILIES,
    SHARED_KEYS,
    TINY,
    spread_weights,
)
from tests.engine.native_cases import needs_machine_code
from tests.geometry import WIDE, other, within

NUM_WAYS = 18
"""Six of each geometry."""

REQUESTS = requests(200, MODEL.vocab_size)
UNCHANGED = [each for each in REQUESTS if not each.params.changes_logits]
PLAIN = UNCHANGED[:40]
"""They need fewer programs."""


GEOMETRIES = (
    other(
        "many steps, and pages for most",
        WIDE,
        num_kv_tokens=4096,
        max_running_requests=16,
        batch_buckets=(16,),
    ),
    other(
        "pages of one token, little more than the longest request",
        page_size=1,
        num_kv_tokens=300,
        max_running_requests=5,
        batch_buckets=(5,),
    ),
    other(
        "sizes that divide one another nowhere, and pages for all",
        page_size=48,
        num_kv_tokens=9600,
        max_running_requests=70,
        batch_buckets=(70,),
        chunked_prefill_size=272,
        token_buckets=(272,),
        decode_steps=3,
    ),
)
"""The ways to run share a few, since compiling takes long."""


def draw_way(index: int) -> Way:
    """A random way to run the requests."""
    rng = np.random.default_rng(index)
    geometry = GEOMETRIES[index % len(GEOMETRIES)]
    options = within(
        geometry,
        max_running_requests=int(rng.integers(2, geometry["batch_buckets"][-1] + 1)),
        chunked_prefill_size=int(rng.integers(1, geometry["token_buckets"][-1] + 1)),
    )
    options["disable_radix_cache"] = bool(rng.random() < 0.3)
    return Way(
        options,
        order=rng.permutation(len(REQUESTS)).tolist(),
        splits=int(rng.integers(1, 5)),
        interrupt=Interrupter(index, spread_weights(MODEL)) if index % 4 else None,
    )


WAYS = [draw_way(index) for index in range(NUM_WAYS)]


@functools.cache
def alone(count: int) -> list[Bits]:
    """The bits of the first requests, each by itself, one token a dispatch."""
    with make_engine(ALONE) as engine:
        return run(engine, REQUESTS[:count], Way({}))


@needs_machine_code
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=pytest.mark.soak if index else pytest.mark.slow)
        for index in range(NUM_WAYS)
    ],
)
def test_no_bit_differs(index):
    """Requests have their bits however they are batched, chunked, cached and interrupted."""
    count = len(REQUESTS) if index else 80
    way = WAYS[index]
    assert way.order is not None
    way = way._replace(order=[each for each in way.order if each < count])
    with make_engine(way.options) as engine:
        check_bits(run(engine, REQUESTS[:count], way), alone(count))
        if isinstance(way.interrupt, Interrupter):
            assert len(way.interrupt.counts) >= 3, "of the ways to interrupt"


@pytest.mark.soak
@needs_machine_code
def test_every_width_from_1_to_64():
    """All 64 run before the first ends, and then one after the other does."""
    asked = [
        each._replace(
            prompt=each.prompt[:20],
            params=dataclasses.replace(each.params, max_new_tokens=index + 8, ignore_eos=True),
            top_logprobs=0,
        )
        for index, each in enumerate(UNCHANGED)
    ][:64]
    with make_engine(ALONE) as engine:
        expected = run(engine, asked, Way({}))
    options = other(
        "a program for each number of rows",
        WIDE,
        batch_buckets=tuple(range(1, 65)),
        decode_steps=1,
    )
    with make_engine(options) as engine:
        check_bits(run(engine, asked, Way({})), expected)
        assert engine.get_internal_state().num_compiles >= 64


@pytest.mark.soak
@needs_machine_code
def test_the_requests_differ():
    """Else they would agree for the wrong reason."""
    found = alone(len(REQUESTS))
    assert len({bits.tokens for bits in found}) > 100
    assert sum(len(bits.tokens) for bits in found) > 3000


@needs_machine_code
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MODEL, id="plain"),
        pytest.param(MIXED_HEADS, id="mixed heads", marks=pytest.mark.soak),
        pytest.param(SHARED_KEYS, id="shared keys", marks=pytest.mark.soak),
        pytest.param(GPT_OSS, id="sinks", marks=pytest.mark.soak),
        *(pytest.param(x, id=name, marks=pytest.mark.soak) for name, x in NEW_FAMILIES.items()),
        pytest.param(LATENTS, id="latents", marks=pytest.mark.soak),
    ],
)
def test_a_few_requests(model):
    """Interrupted and retracted; layers with heads of two sizes, shared keys."""
    interrupt = Interrupter(1, spread_weights(model))
    way = WAYS[1]._replace(order=range(len(PLAIN))[::-1], interrupt=interrupt)
    with make_engine(ALONE, model) as engine:
        expected = run(engine, PLAIN, Way({}))
    with make_engine(way.options, model) as engine:
        check_bits(run(engine, PLAIN, way), expected)
        assert engine.get_internal_state().counters.num_retractions
    assert len({bits.tokens for bits in expected}) > len(PLAIN) // 2
    assert len(interrupt.counts) >= 3, "of the ways to interrupt"


@pytest.mark.soak
def test_the_comparison_finds_what_is_not_deterministic(monkeypatch):
    """XLA's products, whose order of additions depends on the batch."""
    monkeypatch.setattr(sgljax_cpu, "unavailable", lambda: "this is a test of what else there is")
    found = []
    for options in (ALONE, WAYS[0].options):
        with make_engine(options) as engine:
            found.append(run(engine, PLAIN, Way({})))
    assert len(differing(*found)) > 10


NOT_HERE = "^enable_deterministic_sampling cannot be had here: "
PRODUCTS = NOT_HERE + "XLA's products add in an order .* linear_backend '{}' is not used, since {}"
TPU: dict[str, Any] = {"platform": "tpu", "is_own_cpu": False, "packs_weights": False}
GPU: dict[str, Any] = {**TPU, "platform": "gpu", "compute_capability": "9.0"}
SERVED = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256, head_dim=128)
"""Sizes that the kernels of GPUs take."""


@pytest.mark.parametrize(
    ("model", "target", "options", "message"),
    [
        pytest.param(
            *(MODEL, {"num_devices": 2, "packs_weights": False}, {}),
            PRODUCTS.format("native", "it is for one device, the engine has 2"),
            id="several CPU devices",
        ),
        pytest.param(MODEL, TPU, {}, PRODUCTS.format("native", "it is for CPUs"), id="TPU"),
        pytest.param(
            *(MODEL, {**GPU, "compute_capability": "8.0"}, {}),
            PRODUCTS.format("pallas", "it is 'auto'"),
            id="another GPU",
        ),
        pytest.param(
            *(MODEL, {**GPU, "num_tensor_shards": 2}, {}),
            PRODUCTS.format("pallas", "it is for one device, .* over 2"),
            id="several GPUs",
        ),
        pytest.param(
            *(MODEL, {"packs_weights": False}, {"linear_backend": "xla"}),
            PRODUCTS.format("native", "it is 'xla'"),
            id="XLA's products",
            marks=needs_machine_code,
        ),
        pytest.param(
            *(dataclasses.replace(MODEL, head_dim=12), {}, {}),
            NOT_HERE + "attention_backend 'native' is not used, since .* head_dim .*, got 12",
            id="head_dim on a CPU",
            marks=needs_machine_code,
        ),
        pytest.param(
            *(dataclasses.replace(SERVED, head_dim=80), GPU, {}),
            NOT_HERE + "attention_backend 'pallas' is not used, since .* head_dim .*, got 80",
            id="head_dim on a GPU",
        ),
    ],
)
def test_refusals(model, target, options, message):
    """Models that one GPU does not take are in `test_gpu_invariant`."""
    config = EngineConfig.from_options({"enable_deterministic_sampling": True, **options})
    here = place(model, None, "float32", runtime=config.runtime).whole.target
    with pytest.raises(InvalidConfigError, match=message):
        engine_backends(config, model, here._replace(**target))


def test_refused_without_jit_compiled_kernels(monkeypatch):
    """An engine refuses it, and so does the preview of one."""
    monkeypatch.setattr(sgljax_cpu, "unavailable", lambda: "planted")
    options: dict[str, Any] = {"enable_deterministic_sampling": True}
    twice = Mesh(np.array(jax.devices()[:1] * 2), ("tp",))
    for mesh, why in ((None, "planted"), (twice, "it is for one device, the engine has 2")):
        with pytest.raises(InvalidConfigError, match=PRODUCTS.format("native", why)):
            preview_engine(MODEL, mesh=mesh, config=EngineConfig.from_options(options))
    with pytest.raises(InvalidConfigError, match=PRODUCTS.format("native", "planted")):
        Engine(model_config=MODEL, **options)
