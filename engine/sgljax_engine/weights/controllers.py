"""Several controllers: this process's part of a mesh, and the weights on it.

Under `jax.distributed` each process runs engines on the devices that it can address, while the
trainer's arrays lie on the devices of all processes. A process can read only its own shards of
them. So all processes first gather the missing shards, in one program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgljax_engine.errors import InvalidConfigError, WeightSyncError


def local_submesh(
    mesh: Mesh, *, tensor_axis: str | None = "tp", process_index: int | None = None
) -> Mesh:
    """The part of a mesh on devices that this process can address. No collective.

    Each process makes the same mesh. The part is the mesh itself if all of its devices are this
    process's; otherwise it has the process's devices in the same order, with the same axes. Raises
    InvalidConfigError when `tensor_axis` spans processes, or this process's devices are not a block
    of the mesh.
    """
    # One controller of many hosts can address devices that name other processes.
    if process_index is None and NamedSharding(mesh, PartitionSpec()).is_fully_addressable:
        return mesh
    if tensor_axis in _spanning_axes(mesh):
        size, devices = mesh.shape[tensor_axis], mesh.devices.flat
        count = min(np.unique(_processes(mesh), return_counts=True)[1])
        raise InvalidConfigError(
            f"mesh axis {tensor_axis!r} (size {size}) must lie within one process, but its devices "
            f"belong to processes {sorted({device.process_index for device in devices})}: an "
            "engine shards weights only over devices that its process can address. Give "
            f"{tensor_axis!r} at most the {count} devices of one process, next to each other, and "
            "let another axis, such as 'fsdp', span the processes"
        )
    return _submesh(mesh, jax.process_index() if process_index is None else process_index)


def localize(tree: Any) -> Any:
    """Replaces arrays that span processes by arrays that this process can address.

    If the tree has such arrays, this is a collective: all processes must call it with the same tree
    at the same point of their programs, on the thread that dispatches the trainer's programs.
    Otherwise it returns the tree, at no cost.

    An array stays sharded over the mesh axes that lie within a process, and becomes replicated over
    those that span processes. If this changes anything, one program gathers all arrays; its results
    become local arrays without a copy. Beside the trainer's shard, each device then holds a whole
    copy of the weights (or its shard along axes within the process) until the result is released.
    In an update of weights that is when the engine has made its own.

    Args:
        tree: Any pytree. Only arrays that span processes are replaced.

    Returns:
        The same tree with local arrays, on `local_submesh` of each array's mesh.

    Raises:
        InvalidConfigError: as `local_submesh`, except that any axis may span processes.
        WeightSyncError: for an array without a mesh, or when the collective fails, for example
            because another process ended.
    """
    leaves, treedef = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if _spans_processes(leaf)]
    if not indices:
        return tree
    try:
        gathered = _gather([leaves[i] for i in indices])
    except jax.errors.JaxRuntimeError as error:
        raise WeightSyncError(f"gathering weights from all processes failed: {error}") from error
    for i, array in zip(indices, gathered, strict=True):
        leaves[i] = _local_view(array)
    return jax.tree.unflatten(treedef, leaves)


def _spans_processes(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _gather(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Gathers arrays, so that no other process alone holds a shard."""
    shardings = [_gathered_sharding(x.sharding) for x in arrays]
    indices = [
        i
        for i, (x, sharding) in enumerate(zip(arrays, shardings, strict=True))
        if not x.sharding.is_equivalent_to(sharding, x.ndim)
    ]
    gathered = list(arrays)
    if indices:
        gather = _gather_program(tuple(shardings[i] for i in indices))
        for i, array in zip(indices, gather(tuple(arrays[i] for i in indices)), strict=True):
            gathered[i] = array
    return gathered


@functools.lru_cache(maxsize=16)
def _gather_program(shardings: tuple[NamedSharding, ...]) -> Any:
    def identity(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return arrays

    return jax.jit(identity, out_shardings=shardings)


def _gathered_sharding(sharding: jax.sharding.Sharding) -> NamedSharding:
    """The same sharding without axes that span processes, in device memory."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise WeightSyncError(
            "arrays that span processes must have a jax.sharding.NamedSharding, whose mesh tells "
            f"how to gather them; got {sharding}"
        )
    spanning = _spanning_axes(sharding.mesh)
    parts: list[tuple[str, ...]] = []
    for part in sharding.spec:
        names = (part,) if isinstance(part, str) else tuple(part or ())
        parts.append(tuple(name for name in names if name not in spanning))
    return NamedSharding(sharding.mesh, PartitionSpec(*(names or None for names in parts)))


def _local_view(array: jax.Array) -> jax.Array:
    """An array of the shards in this process, which must include all different ones."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    local = NamedSharding(_submesh(sharding.mesh, jax.process_index()), sharding.spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, local, shards)


@functools.lru_cache(maxsize=16)
def _submesh(mesh: Mesh, process_index: int) -> Mesh:
    processes = _processes(mesh)
    is_local = processes == process_index
    if is_local.all():
        return mesh
    if not is_local.any():
        raise InvalidConfigError(
            f"the mesh must have a device of each process that uses it, but process "
            f"{process_index} has none: its devices belong to processes "
            f"{np.unique(processes).tolist()}. Make the rollout in those alone, or give it a mesh "
            "with devices of all processes"
        )
    block = np.ix_(*(np.unique(indices) for indices in np.nonzero(is_local)))
    if not is_local[block].all():
        raise InvalidConfigError(
            f"the devices of each process must be a block of the mesh {dict(mesh.shape)}, but "
            f"those of process {process_index} are not; the processes of its devices are "
            f"{processes.tolist()}. Order the devices by process before reshaping them"
        )
    return Mesh(mesh.devices[block], mesh.axis_names, axis_types=mesh.axis_types)


def _spanning_axes(mesh: Mesh) -> frozenset[str]:
    """Axes along which neighbouring devices belong to different processes, anywhere in the mesh."""
    processes = _processes(mesh)
    return frozenset(
        name
        for axis, name in enumerate(mesh.axis_names)
        if (processes != processes.take([0], axis)).any()
    )


def _processes(mesh: Mesh) -> np.ndarray:
    """Index of the process that addresses each device; int array of the mesh's shape."""
    indices = [device.process_index for device in mesh.devices.flat]
    return np.asarray(indices).reshape(mesh.devices.shape)
