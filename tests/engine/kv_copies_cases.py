"""Cases of `test_kv_copies`: they run in processes of their own that have eight devices."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgljax_engine import Engine, InvalidConfigError, ModelConfig, SamplingParams
from sgljax_engine.placement.submeshes import place
from sgljax_engine.preview import preview_engine
from sgljax_engine.runner.kv import saved_pages
from tests import inside
from tests.engine.interrupts import LONG, results, start_all, tokens_of, update_in_flight
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = random_prompts(9, 1, 40)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
COLLECTIVE = re.compile(r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute)[-a-z]*\(")


def tiny(num_kv_heads: int) -> ModelConfig:
    """One layer of TINY, which has 4 query heads."""
    return dataclasses.replace(TINY, num_layers=1, num_kv_heads=num_kv_heads)


def mesh_of(*shape: int, axes: tuple[str, ...] = ("fsdp", "tp")) -> Mesh:
    """A mesh of the first devices."""
    devices = np.asarray(jax.devices())[: int(np.prod(shape))]
    return Mesh(devices.reshape(shape), axes)


def shard_bytes(arrays: Any, device: Any) -> int:
    """Bytes that a device holds of a pytree of arrays."""
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
        if shard.device == device
    )


def collectives(engine: Engine) -> dict[str, Counter]:
    """What the engine's programs send between devices: shapes and kinds, by program."""
    programs: dict[Any, Any] = inside.runner(engine).programs._programs
    return {key[0]: Counter(COLLECTIVE.findall(p.as_text())) for key, p in programs.items()}


def outputs() -> None:
    """Two kv heads, each on two devices."""
    check_outputs(tiny(2))


def check_outputs(model: ModelConfig) -> None:
    """Tokens and scores are one device's, and no key moves between devices."""
    with Engine(model_config=tiny(4), mesh=mesh_of(1, 4), **SMALL) as engine:
        engine.generate_requests(PROMPTS, GREEDY)
        # Of a model with a kv head for each device, which has nothing to copy.
        expected = collectives(engine)
        assert set(expected) == {"prefill", "decode"}
    mesh, weights = mesh_of(1, 4), spread_weights(model)
    with Engine(model_config=model, weights=weights, **SMALL) as engine:
        tokens = tokens_of(engine.generate_requests(PROMPTS, GREEDY))
        scored = engine.score(PROMPTS[:3])
    with Engine(model_config=model, weights=weights, mesh=mesh, **SMALL) as engine:
        assert tokens_of(engine.generate_requests(PROMPTS, GREEDY)) == tokens
        assert collectives(engine) == expected
        for a, b in zip(engine.score(PROMPTS[:3]), scored, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
        check_memory(engine, model, mesh)


def check_memory(engine: Engine, model: ModelConfig, mesh: Mesh) -> None:
    """Each device holds one kv head, and the report counts all along "tp"."""
    runner, report = inside.runner(engine), engine.get_internal_state().memory
    held = [shard_bytes(runner.kv_memory.kv, device) for device in mesh.devices.flat]
    head_bytes = 2 * model.num_layers * model.head_dim * 4
    assert set(held) == {report.kv_tokens * head_bytes}
    assert report.kv_bytes == 4 * report.kv_tokens * head_bytes
    weights = [shard_bytes(runner.weights, device) for device in mesh.devices.flat]
    assert set(weights) == {report.weights_bytes // 4}
    preview = preview_engine(model, mesh=mesh)
    assert preview.weights_bytes == report.weights_bytes
    projection = runner.weights["model.layers.0.self_attn.k_proj.weight"]
    assert projection.addressable_shards[0].data.size == model.hidden_size * model.head_dim
    assert engine.release_kv_cache() == report.kv_bytes


def families() -> None:
    """One kv head on all devices; of eight heads, windows and norms of all heads as transformers."""
    check_outputs(tiny(1))
    check_golden("qwen3_mqa_untied", mesh_of(1, 4))
    check_golden("gemma3_window", mesh_of(1, 4))
    check_golden("olmo2_yarn", mesh_of(1, 4))


def check_golden(name: str, mesh: Mesh) -> None:
    """Greedy tokens are those of the golden files."""
    golden = np.load(GOLDEN / name / "golden.npz")
    rows = range(int(golden["num_prompts"]))
    prompts = [golden[f"prompt_{i}"].tolist() for i in rows]
    greedy = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    with Engine(GOLDEN / name, mesh=mesh, dtype="float32", **SMALL) as engine:
        tokens = tokens_of(engine.generate_requests(prompts, greedy))
    assert tokens == [golden[f"greedy_{i}"].tolist()[:24] for i in rows], name


def states() -> None:
    """Updates, sleep and checkpoints, also between engines of other meshes."""
    saved_pages._CHUNK_BYTES = 8192  # pages move a few at a time
    model = tiny(2)
    weights, others = spread_weights(model), spread_weights(model, seed=1)
    options: dict[str, Any] = {"model_config": model, **SMALL}
    mesh = mesh_of(1, 4)
    # The trainer's arrays, over more devices.
    trainer = mesh_of(8, 1)
    given = {
        name: jax.device_put(w, NamedSharding(trainer, P("fsdp" if w.shape[0] % 8 == 0 else None)))
        for name, w in weights.items()
    }
    with (
        Engine(weights=weights, **options) as single,
        Engine(weights=given, mesh=mesh, **options) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        whole = tokens_of(single.generate_requests(PROMPTS[:4], LONG))
        assert engine.get_weights_checksum() == single.get_weights_checksum()
        check_updates(engine, given, others, whole)
        assert engine.get_weights_checksum() == single.get_weights_checksum()
        check_sleep(engine, whole)
        check_checkpoint(engine, single, f"{folder}/a", whole)
        check_checkpoint(single, engine, f"{folder}/b", whole)


def check_updates(engine: Engine, given: Any, others: Any, whole: list[list[int]]) -> None:
    """From elsewhere and from the same devices; in flight, and in place of the old weights."""
    elsewhere = jax.device_put(others, jax.devices()[3])
    engine.update_weights(elsewhere, verify=True)
    assert len(engine.find_differing_weights(given)) == len(given)
    assert engine.find_differing_weights(others) == []
    calls = start_all(engine, PROMPTS[:2], LONG)
    version = update_in_flight(engine, given, mode="in_place", verify=True)
    for output in results(calls):
        assert set(output.token_weight_versions) == {version - 1, version}
    engine.update_weights(elsewhere, donate=True, verify=True)
    engine.update_weights(given, donate=True, verify=True)
    assert engine.find_differing_weights(others) != []
    assert tokens_of(engine.generate_requests(PROMPTS[:4], LONG)) == whole


def shardings(runner: Any) -> Any:
    """Shardings of all arrays of a runner."""
    return jax.tree.map(lambda x: x.sharding, (runner.weights, runner.kv_memory.kv))


def check_sleep(engine: Engine, whole: list[list[int]]) -> None:
    """With requests in flight, which must not notice, in either kind of host memory."""
    runner, report = inside.runner(engine), engine.get_internal_state().memory
    for memory in ("numpy", "pinned_host"):
        runner._host_memory = runner.kv_memory._host_memory = memory
        before = shardings(runner)
        calls = start_all(engine, PROMPTS[:4], LONG)
        freed = engine.sleep(2, preserve_state=True)
        assert freed == report.weights_bytes + report.kv_bytes
        # Copies on several devices are kept once.
        weights = inside.core(engine).sleep_manager._copies.weights
        assert weights is not None
        assert sum(w.nbytes for w in weights.values()) == 4 * sum(
            int(np.prod(w.shape)) for w in weights.values()
        )
        assert engine.wake_up() == freed
        assert shardings(runner) == before
        for output, ids in zip(results(calls), whole, strict=True):
            assert output.output_ids == ids
            assert output.num_retractions == 0


def check_checkpoint(source: Engine, target: Engine, folder: str, whole: list[list[int]]) -> None:
    """What one engine saves, the other goes on with."""
    source.flush_cache()
    target.flush_cache()
    calls = start_all(source, PROMPTS[:4], LONG)
    source.save_checkpoint(folder)
    assert tokens_of(results(calls)) == whole
    futures = target.restore_checkpoint(folder)
    assert sorted(f.result(600).output_ids for f in futures.values()) == sorted(whole)


def placement() -> None:
    """What divides is placed, what does not is refused with its name, and no mesh is a mesh."""
    single = place(TINY, None, "float32").whole
    empty = Mesh(np.empty((), object), ())
    assert place(TINY, empty, "float32").whole == single
    assert single.mesh.size == 1
    assert single.num_tensor_shards == single.kv_copies(TINY.cached_kv[0]) == 1
    only = place(TINY, Mesh(np.asarray(jax.devices()[5]), ()), "float32").whole
    assert only.mesh.devices.flat[0] == jax.devices()[5]
    for axes, shape in ((("tp", "fsdp"), (4, 2)), (("fsdp", "tp"), (2, 4)), (("tp",), (8,))):
        mesh = mesh_of(*shape, axes=axes)
        heads = dict(zip(axes, shape, strict=True))["tp"]
        model = dataclasses.replace(TINY, num_heads=8)
        made = place(model, mesh, "float32").whole
        assert made.num_tensor_shards == heads
        assert made.kv_copies(model.cached_kv[0]) == heads // model.num_kv_heads
        assert list(made.mesh.devices.flat) == list(mesh.devices.flat)
        group = place(dataclasses.replace(model, num_kv_heads=8), mesh, "float32")
        assert len(group.engines) == 8 // heads
        rows = np.moveaxis(mesh.devices, axes.index("tp"), -1).reshape(-1, heads)
        for engine, row in zip(group.engines, rows, strict=True):
            assert engine.mesh.devices.tolist() == row.tolist()
    bad = [
        (tiny(1), 8, r"num_heads must be a multiple of the size of the tensor axis \(8\), got 4"),
        (
            dataclasses.replace(
                TINY, num_heads=12, num_kv_heads=4, intermediate_size=66, vocab_size=132
            ),
            6,
            r"num_kv_heads must be a multiple of the size of the tensor axis \(6\) or divide it, "
            "got 4",
        ),
        (
            dataclasses.replace(tiny(1), intermediate_size=66),
            4,
            r"intermediate_size must be a multiple of the size of the tensor axis \(4\), got 66",
        ),
        (
            dataclasses.replace(tiny(1), vocab_size=130),
            4,
            r"vocab_size must be a multiple of the size of the tensor axis \(4\), got 130",
        ),
    ]
    for model, size, message in bad:
        with pytest.raises(InvalidConfigError, match=message):
            place(model, mesh_of(size, axes=("tp",)), "float32")


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for case in sys.argv[1:]:
        globals()[case]()
