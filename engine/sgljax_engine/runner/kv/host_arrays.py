"""Copies of device arrays in host memory, for the time an engine gives up device memory.

They stay with the devices where those have memory of their hosts: pinned, since it moves fastest,
else unpinned. With one controller of many hosts (Pathways) nothing then goes through it.
Devices without, and CPUs of this process, whose memory is the host's anyway, use numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from sgljax_engine.layers.devices import is_own_cpu

HostMemory = Literal["pinned_host", "unpinned_host", "numpy"]
"""JAX's kinds of memory beside a device, and numpy arrays in this process."""

_T = TypeVar("_T")
_ALIGNMENT = 64
"""JAX on CPUs uses numpy arrays aligned to this without another copy."""


class HostArray(NamedTuple):
    """One array on the host: in host memory of its devices, or its distinct shards by slices."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    beside: jax.Array | None
    parts: Mapping[tuple[Any, ...], np.ndarray]

    @property
    def nbytes(self) -> int:
        if self.beside is not None:
            return self.beside.nbytes
        return sum(part.nbytes for part in self.parts.values())


def host_memory(device: Any) -> HostMemory:
    """The kind of host memory for arrays of a `jax.Device` and others like it."""
    if is_own_cpu(device):
        return "numpy"
    try:
        kinds = {memory.kind for memory in device.addressable_memories()}
        kinds.discard(device.default_memory().kind)
    except RuntimeError:  # a GPU that nobody has: `jax.experimental.topologies`
        return "numpy"
    if "pinned_host" in kinds:
        return "pinned_host"
    return "unpinned_host" if "unpinned_host" in kinds else "numpy"


def to_host(tree: Any, memory: HostMemory) -> Any:
    """Copies a pytree of arrays that this process can address; each leaf becomes a `HostArray`.

    Waits for all of it.
    """
    if memory != "numpy":
        arrays, structure = jax.tree.flatten(tree)
        shardings = [array.sharding.with_memory_kind(memory) for array in arrays]
        copies = jax.block_until_ready(jax.device_put(arrays, shardings))
        return structure.unflatten(
            HostArray(a.shape, a.sharding, x, {}) for a, x in zip(arrays, copies, strict=True)
        )
    for array in jax.tree.leaves(tree):
        for shard in _distinct_shards(array):
            shard.data.copy_to_host_async()
    return jax.tree.map(_to_numpy, tree)


def to_device(tree: Any) -> Any:
    """Restores the arrays of a pytree of `HostArray`s. Waits for all of it.

    On CPUs they may use the memory of the copies, which no one writes to.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, HostArray))
    arrays = [_to_device(leaf) for leaf in leaves]
    return structure.unflatten(jax.block_until_ready(arrays))


def num_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, HostArray))
    return sum(leaf.nbytes for leaf in leaves)


def _to_device(host: HostArray) -> jax.Array:
    if host.beside is not None:
        return jax.device_put(host.beside, host.sharding)
    return jax.make_array_from_callback(
        host.shape, host.sharding, lambda index: host.parts[_key(index or (), host.shape)]
    )


def _to_numpy(array: jax.Array) -> HostArray:
    parts: dict[tuple[Any, ...], np.ndarray] = {}
    for shard in _distinct_shards(array):
        assert shard.index is not None
        parts[_key(shard.index, array.shape)] = _part(shard.data)
    return HostArray(array.shape, array.sharding, None, parts)


def _distinct_shards(array: jax.Array) -> list[Any]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _part(data: jax.Array) -> np.ndarray:
    part = np.asarray(data)
    (device,) = data.devices()
    # On a CPU of this process this may be no copy, and would keep the array alive.
    return _aligned_copy(part) if is_own_cpu(device) else part


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A shard's slices in canonical form."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy
