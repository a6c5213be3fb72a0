"""Cases of `test_mixed_heads`, which run in processes that have eight devices."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgljax_engine import Engine, InvalidConfigError, ModelConfig, RequestOutput, SamplingParams
from sgljax_engine.attention import tpu
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.layers.target import kv_axes
from sgljax_engine.layers.tpu import TpuHeads
from sgljax_engine.model_config import KVShape
from sgljax_engine.placement.submeshes import place
from sgljax_engine.preview import preview_engine
from tests import inside
from tests.engine.group_cases import KernelCase, one_device
from tests.engine.models import MIXED_HEADS, SHARED_KEYS, random_prompts, spread_weights
from tests.geometry import SMALL

PROMPTS = random_prompts(9, 1, 40)
GREEDY = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)


def mesh_of(tp_size: int) -> Mesh:
    """The first devices along "tp"."""
    return Mesh(np.asarray(jax.devices()[:tp_size]).reshape(1, tp_size), ("fsdp", "tp"))


def eight_devices() -> None:
    """Three parts of the tensor axis: a kv head of two devices, and one of four."""
    check_equal_to_one_device(MIXED_HEADS, 8)


def shared_keys() -> None:
    """One kv head of four devices, which the last layers read too."""
    check_equal_to_one_device(SHARED_KEYS, 4)


def check_equal_to_one_device(model: ModelConfig, tp_size: int) -> None:
    """Tokens, log-probs and scores are one device's, and the memory report is right."""
    weights = spread_weights(model)
    with Engine(model_config=model, weights=weights, **SMALL) as engine:
        expected = engine.generate_requests(PROMPTS, GREEDY)
        scored = engine.score(PROMPTS[:3])
    assert len({token for out in expected for token in out.output_ids}) > 20
    mesh = mesh_of(tp_size)
    with Engine(model_config=model, weights=weights, mesh=mesh, **SMALL) as engine:
        check_same(engine.generate_requests(PROMPTS, GREEDY), expected)
        for a, b in zip(engine.score(PROMPTS[:3]), scored, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        check_memory(engine, model, mesh)


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens, and log-probs up to rounding."""
    for a, b in zip(found, expected, strict=True):
        assert a.output_ids == b.output_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=3e-5)


def check_memory(engine: Engine, model: ModelConfig, mesh: Mesh) -> None:
    """Each device holds its kv heads of every cached layer, and the report counts all of them."""
    runner, tp_size = inside.runner(engine), mesh.size
    report = engine.get_internal_state().memory
    layers = runner.kv_memory.kv.layers
    assert len(layers) == len(model.cached_kv)
    for layer, shape in zip(layers, model.cached_kv, strict=True):
        shards = [shard.data.shape for shard in layer.k.addressable_shards]
        assert len(shards) == tp_size
        assert {shard[1] for shard in shards} == {max(shape.num_heads // tp_size, 1)}
    held = sum(shard.data.nbytes for x in jax.tree.leaves(layers) for shard in x.addressable_shards)
    assert held == report.kv_bytes
    assert preview_engine(model, mesh=mesh).weights_bytes == report.weights_bytes


def refusals() -> None:
    """What does not divide is refused with its name."""
    bad: list[tuple[dict[str, Any], str]] = [
        (
            {"num_heads": 24, "num_kv_heads": 3, "intermediate_size": 72},
            r"num_kv_heads must be a multiple of the size of the tensor axis \(8\) or divide it, "
            "got 3",
        ),
        (
            {"shared_kv_intermediate_size": 100},
            r"shared_kv_intermediate_size must be a multiple of the size of the tensor axis \(8\), "
            "got 100",
        ),
        ({"num_heads": 4}, r"num_heads must be a multiple of the size of the tensor axis \(8\)"),
    ]
    for changes, message in bad:
        with pytest.raises(InvalidConfigError, match=message):
            place(dataclasses.replace(MIXED_HEADS, **changes), mesh_of(8), "float32")
    # Each count divides 6, but no cut of 6 devices serves both; 2 devices get whole heads.
    uneven = dataclasses.replace(
        MIXED_HEADS,
        num_heads=12,
        num_kv_heads=3,
        vocab_size=120,
        intermediate_size=60,
    )
    with pytest.raises(
        InvalidConfigError,
        match="num_kv_heads of layers must divide each other over a tensor axis of 6, got 2 and 3",
    ):
        place(uneven, mesh_of(6), "float32")
    six = dataclasses.replace(uneven, num_kv_heads=6, vocab_size=128, intermediate_size=64)
    assert place(six, mesh_of(2), "float32").whole.num_tensor_shards == 2


def kernel_cases() -> list[KernelCase]:
    """Kv heads over two of three axes, over one of them, and over none."""
    sliding, full = 0, 1
    cases = [
        KernelCase.of_layer(wide_heads(4, 2), sliding, 8),
        KernelCase.of_layer(wide_heads(4, 2), full, 8),
        KernelCase.of_layer(wide_heads(2, 1), full, 8),
    ]
    sizes = [case.placement.target.mesh.shape for case in cases]
    assert [tuple(each.values()) for each in sizes] == [(2, 2, 2), (2, 2, 2), (2, 4)]
    axes = [kv_axes(size, case.kv.num_heads) for case, size in zip(cases, sizes, strict=True)]
    assert axes == [("tp", "tp_copies"), ("tp",), ()]
    return cases


def wide_heads(num_sliding: int, num_full: int) -> ModelConfig:
    """MIXED_HEADS with so many kv heads, of a size that both kernels take."""
    attention = dataclasses.replace(MIXED_HEADS.attention, full_kv=KVShape(num_full, 128))
    return dataclasses.replace(
        MIXED_HEADS, num_kv_heads=num_sliding, head_dim=128, attention=attention
    )


def tpu_kernel() -> None:
    """The output and the pages of one device."""
    for case in kernel_cases():
        sharded = tpu.tpu_attention(case.target("tpu"), (case.kv.head_dim,), interpret=True)
        want, one = case.write_and_attend(TpuAttention(interpret=True), one_device(case.pages))
        got, several = case.write_and_attend(sharded, case.sharded_pages())
        assert not got.sharding.is_fully_replicated
        for mine, ours in zip(one, several, strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(ours))
        case.check(want, got)


def rotation_on_tpus() -> None:
    """Queries, and keys that several devices have, as on one device."""
    (placement,) = place(wide_heads(2, 1), mesh_of(4), "float32").engines
    rng, mesh = np.random.default_rng(0), placement.target.mesh
    norm = jnp.asarray(rng.normal(size=128), np.float32), 1e-6, 0.0
    sin, cos = rng.normal(size=(2, 24, 1, 64)).astype(np.float32)
    for num_heads in (8, 2):
        x = rng.normal(size=(24, num_heads, 128)).astype(np.float32)
        heads = PartitionSpec(None, kv_axes(mesh.shape, num_heads))
        sharded = jax.device_put(x, NamedSharding(placement.mesh, heads))
        want, got = (
            jax.jit(lambda x, heads=heads: heads.rotate(x, norm, sin, cos))(given)
            for heads, given in (
                (TpuHeads(interpret=True), x),
                (TpuHeads(mesh, interpret=True), sharded),
            )
        )
        assert got.sharding.shard_shape(got.shape)[1] == max(num_heads // 4, 1)
        np.testing.assert_allclose(np.asarray(want), np.asarray(got), atol=1e-6)


def gpu_kernel() -> None:
    """The output of one device."""
    for case in kernel_cases():
        case.check_gpu_kernel()


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for case in sys.argv[1:]:
        globals()[case]()
