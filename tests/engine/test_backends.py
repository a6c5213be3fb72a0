"""Which implementations an engine picks, and that they agree."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import sgljax_cpu
from sgljax_engine import InvalidConfigError, logical_rules
from sgljax_engine.attention.registry import engine_attention
from sgljax_engine.attention.xla import XlaAttention
from sgljax_engine.config import RuntimeConfig
from sgljax_engine.layers.kernels import XlaKernels, pick_kernels
from sgljax_engine.layers.tpu import TpuHeads
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.placement.submeshes import place
from sgljax_engine.preview import preview_engine
from sgljax_engine.weights import programs
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.plan import WeightPlanner
from tests.engine.models import TINY, logical_weights
from tests.engine.native_cases import needs_machine_code


def placement(linear: str = "auto", **changes: Any) -> Placement:
    return place(
        TINY, None, "float32", runtime=RuntimeConfig(linear_backend=linear)
    ).whole._replace(**changes)


@pytest.fixture
def no_machine_code(monkeypatch):
    monkeypatch.setattr(sgljax_cpu, "unavailable", lambda: "out of luck")


def pick(head_dim: int = 16, *, attention: str = "auto", linear: str = "auto", **changes: Any):
    """Names of the backends that are picked, and why the products are not native."""
    target = placement(linear, **changes).target
    products = pick_kernels(linear, target)
    picked = engine_attention(attention, target, (head_dim,), products.kernels)
    return picked.name, products.name, products.why_not_native


@needs_machine_code
class TestPick:
    def test_cpu_kernels_are_the_default(self):
        assert pick() == ("native", "native", None)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_width_storage(self, dtype):
        assert pick(dtype=jnp.dtype(dtype)) == ("native", "native", None)

    def test_why_not(self):
        reason = r"a head_dim that is a multiple of (8|16), got 12"
        assert pick(12) == ("xla", "native", None)
        with pytest.raises(InvalidConfigError, match=rf"attention_backend 'native' .*{reason}"):
            pick(12, attention="native")
        odd = dataclasses.replace(TINY, head_dim=12)
        assert re.search(reason, preview_engine(odd).why_not_native or "")

    def test_several_devices(self):
        # What is read is the mesh's shape alone, so one device may stand there twice.
        mesh = Mesh(np.array(jax.devices()[:1] * 2), ("tp",))
        reason = "it is for one device, the engine has 2"
        assert pick(mesh=mesh, packs_weights=False) == ("xla", "xla", reason)

    def test_kernels_of_gpus_are_refused(self):
        message = "linear_backend 'pallas' cannot be had here: it is for GPUs"
        with pytest.raises(InvalidConfigError, match=message):
            pick(linear="pallas")

    def test_each_may_be_chosen(self):
        assert pick(attention="xla") == ("xla", "native", None)
        assert pick(linear="xla") == ("native", "xla", None)


def test_no_cpu_kernels_at_all(no_machine_code, monkeypatch):
    def no_llvmlite():
        raise ImportError("planted: llvmlite is not installed")

    monkeypatch.setattr(sgljax_cpu, "host_vectors", no_llvmlite)
    assert pick() == ("xla", "xla", "out of luck")
    choices: list[dict[str, Any]] = [{"linear": "native"}, {"attention": "native"}]
    for options in choices:
        with pytest.raises(InvalidConfigError, match="cannot be had here: out of luck"):
            pick(**options)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_have_portable_code(platform):
    target = placement().target._replace(platform=platform, is_own_cpu=False, packs_weights=False)
    found = pick_kernels("auto", target)
    assert engine_attention("auto", target, (80,), found.kernels) == XlaAttention()
    assert found[::2] == ("xla", None)
    has_heads = platform == "tpu"
    assert found.kernels == XlaKernels(
        heads=TpuHeads() if has_heads else None, has_ragged_dot=has_heads
    )
    assert pick_kernels("xla", target).kernels == XlaKernels(has_ragged_dot=has_heads)


@pytest.mark.parametrize(
    ("compute_capability", "num_shards", "name"),
    [("9.0", 1, "pallas"), ("9.0", 2, "xla"), ("8.0", 1, "xla"), ("12.0", 1, "xla")],
)
def test_products_of_gpus(compute_capability, num_shards, name):
    """The kernels' tiles were measured on Hopper; they may not fit into other GPUs."""
    target = placement().target._replace(
        platform="gpu",
        is_own_cpu=False,
        num_tensor_shards=num_shards,
        compute_capability=compute_capability,
    )
    assert pick_kernels("auto", target).name == name


@needs_machine_code
def test_weights_are_the_same_bits(no_machine_code, monkeypatch):
    targets = placement().weight_targets(get_model(TINY.architecture).param_specs(TINY))
    programs.build_program.cache_clear()
    weights = logical_weights()
    portable = apply(*WeightPlanner(targets).plan(weights, logical_rules(TINY)))
    monkeypatch.undo()
    programs.build_program.cache_clear()
    native = apply(*WeightPlanner(targets).plan(weights, logical_rules(TINY)))
    assert native.keys() == portable.keys()
    for name, weight in native.items():
        np.testing.assert_array_equal(weight, portable[name])
