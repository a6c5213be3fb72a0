"""The target for which kernels are picked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax

import sgljax_cpu
from sgljax_engine.errors import InvalidConfigError


class Target(NamedTuple):
    """The devices and dtype of an engine.

    `num_tensor_shards` devices share one weight. `packs_weights`: weights are panels of the
    JIT-compiled CPU kernels. `mesh` has the axes over which weights are sharded.
    `compute_capability` is that of NVIDIA GPUs, as "9.0".
    """

    platform: str
    is_own_cpu: bool
    num_devices: int
    num_tensor_shards: int
    dtype: str
    packs_weights: bool
    mesh: jax.sharding.AbstractMesh
    compute_capability: str | None = None

    def cpu_kernels_problem(self) -> str | None:
        if self.platform != "cpu":
            return f"it is for CPUs, the engine's devices are of kind {self.platform!r}"
        if not self.is_own_cpu:
            return "it is for a CPU of this process, the engine's is reached through a proxy"
        if self.num_devices > 1:
            return f"it is for one device, the engine has {self.num_devices}"
        return sgljax_cpu.unavailable()


def kv_axes(axes: Mapping[str, int], num_kv_heads: int) -> tuple[str, ...]:
    """The tensor axes over which this many kv heads are sharded; over the others they are copied.

    Those over which `expert_parallel_size` shards experts are found likewise.
    `axes` are an engine's, in order, as `placement.submeshes` cuts them.
    """
    found: list[str] = []
    count = 1
    for name, size in axes.items():
        count *= size
        if count > num_kv_heads:
            break
        found.append(name)
    return tuple(found)


def require_backend(problem: str | None, name: str) -> None:
    """Raises InvalidConfigError if there is a problem with a backend that was asked for."""
    if problem is not None:
        raise InvalidConfigError(f"{name} cannot be had here: {problem}")
