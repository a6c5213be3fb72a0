"""Experts in parts over eight host devices: `python -m tests.engine.expert_parallel_cases CASE...`.

They run in processes of their own, since JAX fixes the number of devices at start; see
test_expert_parallel.py.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgljax_engine import Engine, EngineConfig, InvalidConfigError, SamplingParams, preview_engine
from sgljax_engine.config import ParallelConfig
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.submeshes import place
from tests import inside
from tests.engine.interrupts import LONG, results, start_all, update_in_flight
from tests.engine.models import (
    GPT_OSS,
    TINY,
    TINY_MOE,
    output_adapter,
    random_prompts,
    spread_weights,
)
from tests.geometry import SMALL

SINKS = dataclasses.replace(GPT_OSS, num_heads=8)
GATE = "model.layers.0.mlp.experts.gate_proj.weight"
PROMPTS = random_prompts(8, 1, 40)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {**SMALL, "enable_return_routed_experts": True}


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), ("fsdp", "tp"))


def with_experts(model: ModelConfig, **changes: int) -> ModelConfig:
    assert model.moe is not None
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, **changes))


# ------------------------------------------------------------------ the cut


def cut() -> None:
    """Each device has its part of the experts, over data and tensor axes of the mesh."""
    cuts: tuple[tuple[dict[str, Any], int, tuple[int, ...]], ...] = (
        ({"expert_parallel_size": 1}, 4, (4, 32, 24)),
        ({"expert_parallel_size": 2}, 4, (4, 32, 24)),
        ({"expert_parallel_size": 4}, 2, (2, 32, 24)),
        ({"expert_parallel_size": 8}, 1, (1, 32, 24)),
        ({"expert_parallel_size": 2, "tp_size": 8}, 1, (4, 32, 6)),
        ({"expert_parallel_size": 4, "tp_size": 8}, 1, (2, 32, 12)),
        ({"expert_parallel_size": 2, "data_parallel_size": 2}, 2, (4, 32, 12)),
    )
    for sizes, num_engines, shard in cuts:
        group = place(SINKS, mesh_of(4, 2), "float32", ParallelConfig(**sizes))
        assert len(group.engines) == num_engines, sizes
        specs = get_model(SINKS.architecture).param_specs(SINKS)
        for each in (group.whole, *group.engines):
            target = each.weight_targets(specs)[GATE]
            assert target.sharding.shard_shape(target.shape) == shard, sizes
    alone = place(SINKS, None, "float32", ParallelConfig(expert_parallel_size=4))
    assert list(alone.whole.mesh.devices.flat) == jax.devices()[:4]


def preview(model: ModelConfig, sizes: dict[str, int]) -> None:
    config = EngineConfig.from_options({**SMALL, **sizes})
    preview_engine(model, mesh=mesh_of(4, 2), config=config)


def refusals() -> None:
    eight = {"tp_size": 8, "expert_parallel_size": 8}
    for model, sizes, message in (
        (TINY, {"expert_parallel_size": 2}, r"must be 1 for a model without .*Qwen3For.*got 2"),
        (SINKS, {"expert_parallel_size": 0}, "expert_parallel_size must be .*got 0"),
        (SINKS, {"expert_parallel_size": 3}, r"expert_parallel_size 3 must share out the 8 dev"),
        (SINKS, {"tp_size": 2, "expert_parallel_size": 4}, r"must divide .*axis \(2\), got 4"),
        (with_experts(SINKS, num_experts=12), eight, r"num_experts .*_size \(8\), got 12"),
        (
            with_experts(SINKS, intermediate_size=22),
            {"tp_size": 8, "expert_parallel_size": 2},
            r"intermediate_size must be a multiple .*\(4: tp_size / expert_par.*got 22",
        ),
        (TINY_MOE, {"expert_parallel_size": 8}, r"num_heads .*tensor axis \(8\), got 4"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            preview(model, sizes)
    odd = dataclasses.replace(SINKS, num_heads=24, num_kv_heads=3, vocab_size=120)
    mesh = Mesh(np.asarray(jax.devices()[:6]).reshape(1, 6), ("fsdp", "tp"))
    with pytest.raises(InvalidConfigError, match=r"multiple of num_kv_heads \(3\).*got 2"):
        place(odd, mesh, "float32", ParallelConfig(expert_parallel_size=2))


# ------------------------------------------------------------------ engines


def check_same(one: Engine, engine: Engine, **options: Any) -> list[list[int]]:
    """Tokens, log-probs, experts and scores are those of one device."""
    want, got = (each.generate_requests(PROMPTS, GREEDY, **options) for each in (one, engine))
    for mine, ours in zip(want, got, strict=True):
        assert mine.output_ids == ours.output_ids
        np.testing.assert_allclose(mine.logprobs, ours.logprobs, atol=3e-5)
        np.testing.assert_array_equal(mine.routed_experts, ours.routed_experts)
    for mine, ours in zip(one.score(PROMPTS[:3]), engine.score(PROMPTS[:3]), strict=True):
        np.testing.assert_allclose(mine, ours, atol=1e-4)
    engine.check_integrity()
    return [each.output_ids for each in got]


def checksums(engine: Engine) -> dict[str, str]:
    """Those of the weights; empty slots of adapters are padded otherwise in panels."""
    found = engine.get_weights_checksum()
    return {name: each for name, each in found.items() if ".lora_" not in name}


def on_trainer(weights: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The weights as a trainer of four devices has them."""
    mesh = Mesh(np.asarray(jax.devices()[2:6]), ("fsdp",))
    return {
        name: jax.device_put(w, NamedSharding(mesh, P("fsdp" if w.shape[0] % 4 == 0 else None)))
        for name, w in weights.items()
    }


def crowded(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All tokens go through the same experts, which one device has."""
    biases = {name: w.copy() for name, w in weights.items() if name.endswith("router.bias")}
    assert biases
    for bias in biases.values():
        bias[[0, 1, 5]] += 100
    return weights | biases


def serves() -> None:
    """Parts of two devices each, with updates, adapters and sleep."""
    options: dict[str, Any] = {**OPTIONS, "max_loras": 1, "max_lora_rank": 4}
    sizes: dict[str, Any] = {"mesh": mesh_of(4, 2), "tp_size": 8, "expert_parallel_size": 4}
    weights = spread_weights(SINKS)
    other, source = spread_weights(SINKS, 1), on_trainer(weights)
    with (
        Engine(model_config=SINKS, weights=weights, **options) as one,
        Engine(model_config=SINKS, weights=source, **options, **sizes) as engine,
    ):
        first = check_same(one, engine)
        assert checksums(engine) == checksums(one)
        for each in (one, engine):
            each.load_adapter("some", *output_adapter(3, SINKS))
        assert check_same(one, engine, lora="some") != first

        calls = start_all(engine, PROMPTS[:2], LONG)
        version = update_in_flight(engine, on_trainer(other), mode="in_place", verify=True)
        for call in calls:
            assert set(call.result(600).token_weight_versions) == {version - 1, version}
        one.update_weights(other)
        assert check_same(one, engine) != first
        for each in (one, engine):
            each.update_weights(crowded(weights), verify=True)
        check_same(one, engine)
        for each in (one, engine):
            each.update_weights(weights, donate=True)
        assert checksums(engine) == checksums(one)

        whole = [each.output_ids for each in engine.generate_requests(PROMPTS[:4], LONG)]
        calls = start_all(engine, PROMPTS[:4], LONG)
        engine.sleep(2, preserve_state=True)
        engine.wake_up()
        assert [each.output_ids for each in results(calls)] == whole
        assert check_same(one, engine) == first


def group() -> None:
    """Two engines of whole experts."""
    weights = spread_weights(TINY_MOE)
    mesh = mesh_of(8, 1)
    with (
        Engine(model_config=TINY_MOE, weights=weights, **OPTIONS) as one,
        Engine(
            model_config=TINY_MOE, weights=weights, mesh=mesh, expert_parallel_size=4, **OPTIONS
        ) as engine,
    ):
        assert [
            core.runner.weights[GATE].sharding.num_devices for core in inside.cores(engine)
        ] == [
            4,
            4,
        ]
        first = check_same(one, engine)
        other = on_trainer(spread_weights(TINY_MOE, 1))
        for each in (one, engine):
            each.update_weights(other)
        assert check_same(one, engine) != first
        assert checksums(engine) == checksums(one)


if __name__ == "__main__":
    logging.getLogger("sgljax_engine").setLevel(logging.ERROR)
    assert len(jax.devices()) == 8
    for case in sys.argv[1:]:
        globals()[case]()
