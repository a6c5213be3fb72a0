"""Where arrays are, and moves between shardings without a way through this process's memory.

`jax.device_put` copies from device to device only if each shard that is wanted lies on some device
as it is, or if the whole array lies on one. Else it fetches the array and cuts it up on the host.
With one controller of many hosts (Pathways), all weights would come to the controller and go back.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def move(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array in another place, or cut up otherwise; itself if it is there already.

    Between different devices, each of them holds the whole array for a while, unless the shards
    are the same.
    """
    if (
        not isinstance(x, jax.Array)
        or len(x.sharding.device_set) == 1
        or not isinstance(sharding, NamedSharding)
        or _has_shards_of(x, sharding)
    ):
        return jax.device_put(x, sharding)
    kind = sharding.memory_kind or _device_memory(sharding)
    if x.sharding.memory_kind != kind:
        x = jax.device_put(x, x.sharding.with_memory_kind(kind))
    order = device_order(x.sharding)
    if order == device_order(sharding):
        return _resharding(sharding)(x)
    if order is None or x.sharding.device_set == sharding.device_set:
        return jax.device_put(x, sharding)  # JAX reorders devices by a program of its own
    source = _resharding(NamedSharding(Mesh(order, ("all",)), PartitionSpec()))(x)
    whole = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return _resharding(sharding)(jax.device_put(source, whole))


def same_shards(
    sharding: jax.sharding.Sharding, devices: tuple[Any, ...] | None
) -> NamedSharding | None:
    """The sharding that cuts arrays up equally over other devices, as many of them; None if none.

    From there `jax.device_put` copies shards from device to device.
    """
    if not isinstance(sharding, NamedSharding) or devices is None:
        return None
    mesh = sharding.mesh
    sizes = tuple(mesh.shape.values())
    if len(devices) != math.prod(sizes):
        return None
    there = Mesh(np.array(devices).reshape(sizes), mesh.axis_names)
    return NamedSharding(there, sharding.spec)


def device_order(sharding: jax.sharding.Sharding) -> tuple[Any, ...] | None:
    """The devices in the order in which a program sees them; None if the order is unknown."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.devices is not None:
        return tuple(sharding.mesh.devices.flat)
    devices = tuple(sharding.device_set)
    return devices if len(devices) == 1 else None


def device_orders(arrays: Iterable[Any]) -> set[tuple[Any, ...] | None]:
    return set(map(device_order, {x.sharding for x in arrays if isinstance(x, jax.Array)}))


def in_device_memory(x: Any) -> Any:
    """The array; a copy on its devices if the trainer keeps it in host memory."""
    if not isinstance(x, jax.Array):
        return x
    kind = _device_memory(x.sharding)
    is_there = x.sharding.memory_kind == kind
    return x if is_there else jax.device_put(x, x.sharding.with_memory_kind(kind))


def near(sharding: jax.sharding.Sharding) -> contextlib.AbstractContextManager[Any]:
    """A context in which host arrays are processed on a device of the sharding."""
    return jax.default_device(_first_device(sharding))


def _first_device(sharding: jax.sharding.Sharding) -> Any:
    return min(sharding.device_set, key=lambda device: device.id)


@functools.lru_cache(maxsize=64)
def _device_memory(sharding: jax.sharding.Sharding) -> str:
    """The kind of memory in which its devices compute."""
    return _first_device(sharding).default_memory().kind


def _has_shards_of(x: jax.Array, sharding: jax.sharding.Sharding) -> bool:
    """Whether each shard that is wanted lies on some device."""
    found = x.sharding.devices_indices_map(x.shape).values()
    wanted = sharding.devices_indices_map(x.shape).values()
    return {_bounds(index, x.shape) for index in wanted} <= {
        _bounds(index, x.shape) for index in found
    }


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


@functools.lru_cache(maxsize=64)
def _resharding(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """The program that gives an array on the same devices this sharding."""
    return jax.jit(lambda x: x, out_shardings=sharding)
