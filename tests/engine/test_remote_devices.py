"""Devices of another process, as Pathways has them: nothing is taken for local."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest

from sgljax_engine import InvalidConfigError, SamplingParams
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.placement.submeshes import place
from sgljax_engine.preview import preview_engine
from sgljax_engine.runner.kv.host_arrays import HostArray, host_memory, to_device, to_host
from sgljax_engine.runner.kv.memory_plan import free_bytes
from tests import inside
from tests.engine.interrupts import (
    LONG,
    assert_idle,
    make_engine,
    results,
    small_copies,
    start_all,
    tokens_of,
    update_in_flight,
)
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.remote_devices import remote_devices, remote_mesh, watched

QUICK_COMPILE = "no user compiles for devices of another process that a CPU stands for"

PROMPTS = random_prompts(4, 5, 30, seed=2)
PORTABLE = {"attention_backend": "xla", "linear_backend": "xla"}


@pytest.fixture(scope="module")
def expected():
    """Tokens of the first and of other weights, from an engine on a CPU of this process."""
    with make_engine(**PORTABLE) as engine:
        first = tokens_of(engine.generate_requests(PROMPTS, LONG))
        engine.update_weights(spread_weights(seed=1))
        return first, tokens_of(engine.generate_requests(PROMPTS, LONG))


def placed(mesh: jax.sharding.Mesh, seed: int) -> dict[str, jax.Array]:
    """A trainer's arrays on the mesh, sharded where they divide."""
    axis = "fsdp" if mesh.shape["fsdp"] > 1 else "tp"
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axis)
    return {
        name: jax.device_put(
            w, jax.sharding.NamedSharding(mesh, specs[w.shape[0] % mesh.shape[axis] == 0])
        )
        for name, w in spread_weights(seed=seed).items()
    }


def assert_beside(kept: Any, mesh: jax.sharding.Mesh) -> None:
    """Copies are in the memory of the hosts of the mesh's devices."""
    for host in jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, HostArray)):
        assert host.beside.sharding.memory_kind == "pinned_host"
        assert host.beside.devices() == set(mesh.devices.flat)


class TestIsOwnCpu:
    def test_this_process_s_cpus_are(self):
        assert all(map(is_own_cpu, jax.local_devices(backend="cpu")))

    def test_those_of_another_client_are_not(self):
        assert remote_devices()[0].platform == "cpu"
        assert not any(map(is_own_cpu, remote_devices()))

    def test_accelerators_are_not(self):
        assert not is_own_cpu(types.SimpleNamespace(platform="tpu"))

    def test_nothing_is_own_without_a_cpu_backend(self, monkeypatch):
        """As with JAX_PLATFORMS=proxy."""
        device = jax.devices()[0]

        def no_backend(**kwargs):
            raise RuntimeError("Unknown backend cpu")

        monkeypatch.setattr(jax, "local_devices", no_backend)
        assert not is_own_cpu(device)


@pytest.mark.slow
def test_serves_updates_sleeps_and_pauses(expected):
    """With requests in flight, which never notice; no large array comes to this process."""
    first, other = expected
    mesh = remote_mesh(1, 2)
    with (
        watched(),
        small_copies(),
        make_engine(weights=placed(mesh, 0), mesh=mesh) as engine,
    ):
        runner = inside.runner(engine)
        assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == first
        assert engine.get_internal_state().memory.free_bytes is None

        calls = start_all(engine, PROMPTS)
        engine.pause_generation(mode="retract")
        engine.continue_generation()
        assert tokens_of(results(calls)) == first

        calls = start_all(engine, PROMPTS)
        freed = engine.sleep(1, preserve_state=True)
        assert not runner.weights
        kept = inside.core(engine).sleep_manager._copies
        assert kept.weights is not None
        assert kept.pages is not None
        chunks = [contents for _, contents in kept.pages.chunks]
        assert_beside((dict(kept.weights), chunks), mesh)
        del kept, chunks
        assert engine.wake_up() == freed
        assert tokens_of(results(calls)) == first

        calls = start_all(engine, PROMPTS)
        version = update_in_flight(engine, placed(mesh, 1), mode="in_place", verify=True)
        for out in results(calls):
            assert set(out.token_weight_versions) == {version - 1, version}
        engine.update_weights(placed(mesh, 0), donate=True, verify=True)
        assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == first
        engine.update_weights(placed(mesh, 1))
        assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == other
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "engine_mesh"),
    [
        ({"shape": (2, 1), "first": 2}, (1, 2)),  # as in configs/qwen3_8b_pathways.yaml
        pytest.param({"shape": (2, 1), "first": 1}, (1, 1), marks=pytest.mark.soak),
        # shares a device with it
        pytest.param({"shape": (3, 1), "first": 1}, (1, 2), marks=pytest.mark.soak),
        pytest.param({"shape": (1, 1), "first": 3}, (1, 2), marks=pytest.mark.soak),
    ],
)
def test_weights_of_a_trainer_on_other_devices(expected, trainer, engine_mesh):
    """They go from device to device, though cut up otherwise there."""
    source, mesh = remote_mesh(*trainer["shape"], first=trainer["first"]), remote_mesh(*engine_mesh)
    with watched(), make_engine(weights=placed(source, 0), mesh=mesh) as engine:
        for donate in (False, True):
            engine.update_weights(placed(source, 1), donate=donate, verify=True)
            assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == expected[1]
            engine.update_weights(placed(source, 0))
        assert tokens_of(engine.generate_requests(PROMPTS, LONG)) == expected[0]


@pytest.mark.soak
def test_from_arrays_of_the_controller():
    """Weights that were loaded into this process go up; nothing comes down."""
    with watched(), make_engine(mesh=remote_mesh(1, 1)) as engine:
        engine.update_weights(spread_weights(seed=1))
        engine.generate_requests(PROMPTS, SamplingParams(temperature=0, max_new_tokens=2))


@pytest.mark.parametrize("option", ["attention_backend", "linear_backend"])
def test_native_kernels_are_refused(option):
    with pytest.raises(InvalidConfigError, match=rf"{option} 'native' .*through a proxy"):
        make_engine(mesh=remote_mesh(1, 1), **{option: "native"})


def test_preview():
    with watched():
        preview = preview_engine(TINY, mesh=remote_mesh(1, 1))
    assert (preview.linear, preview.attention) == ("xla", "xla")
    assert preview.why_not_native is not None
    assert "through a proxy" in preview.why_not_native
    assert preview.free_bytes is None
    assert preview.memory is not None
    assert preview.memory.rule == "max_running_requests x max_model_len"


class Device:
    """A device without arrays."""

    platform = "tpu"

    def __init__(self, *kinds: str, stats: Any = None) -> None:
        self._kinds, self._stats = kinds, stats

    def addressable_memories(self) -> list[Any]:
        return [types.SimpleNamespace(kind=kind) for kind in self._kinds]

    def default_memory(self) -> Any:
        return types.SimpleNamespace(kind=self._kinds[0])

    def memory_stats(self) -> Any:
        if isinstance(self._stats, Exception):
            raise self._stats
        return self._stats


@pytest.mark.parametrize(
    ("kinds", "memory"),
    [
        (("device", "pinned_host", "unpinned_host"), "pinned_host"),
        (("device", "unpinned_host"), "unpinned_host"),
        (("unpinned_host", "pinned_host"), "pinned_host"),
        (("unpinned_host",), "numpy"),  # where it computes: there is nothing to give back
        (("device",), "numpy"),
    ],
)
def test_kind_of_host_memory(kinds, memory):
    assert host_memory(Device(*kinds)) == memory


@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host", "numpy"])
def test_copies_come_back(memory):
    """Without host memory of the devices, shards come to this process one by one."""
    mesh = remote_mesh(1, 2)
    arrays = {
        axis: jax.device_put(
            np.arange(24.0).reshape(2, 12),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)),
        )
        for axis in ("tp", "fsdp")
    }
    for axis, array in to_device(to_host(arrays, memory)).items():
        assert array.sharding == arrays[axis].sharding
        np.testing.assert_array_equal(array, arrays[axis])


@pytest.mark.parametrize(
    "stats",
    [
        None,
        {},
        {"bytes_in_use": 1},
        {"bytes_limit": 1},
        NotImplementedError("planted"),
        jax.errors.JaxRuntimeError("UNIMPLEMENTED: planted"),
    ],
)
def test_missing_memory_statistics(stats):
    assert free_bytes(_placement(TINY, Device("device", stats=stats))) is None


def test_memory_statistics():
    device = Device("device", stats={"bytes_limit": 50, "bytes_in_use": 8})
    assert free_bytes(_placement(TINY, device)) == 42


def _placement(model: ModelConfig, device: Device) -> Any:
    mesh: Any = types.SimpleNamespace(devices=np.array([device]), shape={})
    return place(model, None, "float32").whole._replace(mesh=mesh)
