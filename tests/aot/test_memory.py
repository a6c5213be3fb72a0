"""The KV cache that a chip would have room for, without the chip."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from sgljax_engine import EngineConfig, InvalidConfigError, preview_engine
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.placement.shardings import Placement
from tests.aot.programs import QWEN3_8B, TWO_LAYERS
from tests.engine.remote_devices import remote_devices
from tools.aot import CHIPS

V5E = CHIPS["v5e"].usable_bytes
V6E = CHIPS["v6e"].usable_bytes
NORM_BYTES = 4 * (36 * (2 * 4096 + 2 * 128) + 4096)
TABLE = 151936 * 4096
PARAMETERS = 2 * TABLE + 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288)
TOKEN_BYTES = 2 * 36 * 8 * 128 * 2
"""Keys and values of 36 layers, 8 heads of 128 bfloat16 numbers."""


def mesh(*shape: int) -> jax.sharding.Mesh:
    count = int(np.prod(shape))
    return jax.sharding.Mesh(np.array(remote_devices(8)[:count]).reshape(shape), ("data", "tp"))


def config(**options) -> EngineConfig:
    defaults = {"dtype": "bfloat16", "max_running_requests": 512, "max_model_len": 8192}
    return EngineConfig.from_options(defaults | options)


def weights_bytes(tp_size: int) -> int:
    return 2 * PARAMETERS + tp_size * NORM_BYTES


def rounded(tokens: float) -> int:
    pages = int(tokens) // 16
    shift = max(pages.bit_length() - 5, 0)
    return (pages >> shift << shift) * 16


@pytest.mark.parametrize(
    ("device_bytes", "shape", "options"),
    [
        (V5E, (1, 8), {}),
        (V5E, (1, 8), {"mem_fraction_static": 0.5}),
        (V5E, (2, 4), {}),
        (V6E, (8, 1), {}),
        (V5E, (8, 1), {"tp_size": 4}),
    ],
    ids=["v5e_tp8", "v5e_tp8_half", "v5e_2_of_tp4", "v6e_8_of_tp1", "tp_size"],
)
def test_qwen3_8b_takes_what_the_weights_leave(device_bytes, shape, options):
    asked = config(**options)
    tp_size = options.get("tp_size", shape[1])
    found = preview_engine(QWEN3_8B, mesh=mesh(*shape), config=asked, device_bytes=device_bytes)
    assert (found.tp_size, found.num_engines, found.problem) == (tp_size, 8 // tp_size, None)
    assert found.weights_bytes == weights_bytes(tp_size)
    assert found.free_bytes == tp_size * device_bytes
    left = tp_size * device_bytes - found.weights_bytes
    assert found.memory is not None
    assert found.memory.rule == "mem_fraction_static"
    assert found.memory.free_bytes == left
    share = asked.cache.mem_fraction_static
    assert found.memory.kv_tokens == rounded(left // (16 * TOKEN_BYTES) * share * 16)
    assert found.memory.kv_bytes == found.memory.kv_tokens * TOKEN_BYTES


def test_shapes_are_built_for_the_memory_that_is_previewed():
    options = {"max_running_requests": 16, "max_model_len": 1024, "mem_fraction_static": 0.01}
    asked, where = config(**options), mesh(2, 4)
    preview = preview_engine(QWEN3_8B, mesh=where, config=asked, device_bytes=V5E)
    runner, memory = build_shapes(QWEN3_8B, asked, "bfloat16", where, V5E)
    assert memory == preview.memory
    assert memory.rule == "mem_fraction_static"
    assert runner.kv_memory.num_pages == memory.kv_tokens // memory.page_size


def test_what_does_not_fit_is_said():
    device_bytes, asked, where = 16 * 10**9, config(tp_size=1), mesh(8, 1)
    found = preview_engine(QWEN3_8B, mesh=where, config=asked, device_bytes=device_bytes)
    assert found.memory is None
    problem = f"the weights take {weights_bytes(1)} bytes; {device_bytes} are free"
    assert found.problem == problem
    with pytest.raises(InvalidConfigError, match=re.escape(problem)):
        build_shapes(QWEN3_8B, asked, "bfloat16", where, device_bytes)


def test_engines_get_as_many_devices_as_the_model_needs():
    """A device holds 16.4 GB of weights, but not a sequence of 8,192 tokens beside them."""
    found = preview_engine(QWEN3_8B, mesh=mesh(8, 1), config=config(), device_bytes=V5E)
    assert (found.tp_size, found.num_engines) == (2, 4)
    auto = config(tp_size="auto")
    found = preview_engine(QWEN3_8B, mesh=mesh(8, 1), config=auto, device_bytes=V6E)
    assert (found.tp_size, found.num_engines) == (1, 8)


THREE_HEADS = dataclasses.replace(
    TWO_LAYERS,
    vocab_size=300,
    hidden_size=96,
    intermediate_size=192,
    num_heads=3,
    num_kv_heads=3,
    head_dim=64,
)


@pytest.mark.parametrize(
    ("options", "tp_size"),
    [({}, 3), ({"attention_backend": "xla"}, 1)],
    ids=["packed", "xla"],
)
def test_auto_counts_what_pages_pad(monkeypatch, options, tp_size):
    """Three heads of 64 take two rows of 128 on a TPU, and three on three of them."""
    monkeypatch.setattr(Placement, "platform", "tpu")
    asked = config(tp_size="auto", max_model_len=1024, max_running_requests=1, **options)
    alone = preview_engine(THREE_HEADS, mesh=mesh(1, 1), config=asked, device_bytes=V5E)
    rows = 1.8  # of one token in each layer; more than heads fill, less than pages have
    kv_bytes = 1024 * rows * 2 * THREE_HEADS.num_layers * 128 * 2
    device_bytes = int(alone.weights_bytes + kv_bytes / asked.cache.mem_fraction_static)
    found = preview_engine(THREE_HEADS, mesh=mesh(3, 1), config=asked, device_bytes=device_bytes)
    assert (found.tp_size, found.problem) == (tp_size, None)
    assert found.memory is not None
    assert found.memory.kv_tokens == 1024


def test_deterministic_sampling_is_refused(monkeypatch):
    monkeypatch.setattr(Placement, "platform", "tpu")
    message = "enable_deterministic_sampling cannot be had here: .* for CPUs, .* kind 'tpu'"
    asked = config(max_model_len=1024, enable_deterministic_sampling=True)
    with pytest.raises(InvalidConfigError, match=message):
        preview_engine(TWO_LAYERS, mesh=mesh(1, 1), config=asked)


def test_auto_that_fits_nowhere_is_said():
    auto, where, device_bytes = config(tp_size="auto"), mesh(4, 1), 10**9
    found = preview_engine(QWEN3_8B, mesh=where, config=auto, device_bytes=device_bytes)
    assert (found.tp_size, found.num_engines, found.memory) == (4, 1, None)
    problem = "tp_size 'auto' finds no size that fits 4 devices: tp_size 1 needs "
    assert found.problem is not None
    assert found.problem.startswith(problem)
    with pytest.raises(InvalidConfigError, match=re.escape(found.problem)):
        build_shapes(QWEN3_8B, auto, "bfloat16", where, device_bytes)
    # Without the attention that was asked for, memory does not matter.
    tpu = config(tp_size="auto", attention_backend="tpu")
    with pytest.raises(InvalidConfigError, match="attention_backend 'tpu' cannot be had here"):
        preview_engine(QWEN3_8B, mesh=where, config=tpu, device_bytes=device_bytes)
