"""The cut of a mesh into submeshes, one for each engine of a group.

A mesh has one tensor axis, over which a copy of the weights is sharded, and data axes. An engine
gets the devices that differ only in their place on the tensor axis. `tp_size`,
`data_parallel_size` and `expert_parallel_size` share out the same devices otherwise, in the mesh's
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sgljax_engine.config import ParallelConfig, RuntimeConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.target import require_backend
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.placement.shardings import TENSOR_AXES, Placement
from sgljax_engine.weights.controllers import local_submesh

DATA_AXIS = "data"
"""Name of the data axis of a mesh that was shared out by sizes."""


class GroupPlacement(NamedTuple):
    """The devices of each engine of a group, without data axes, and all of them together.

    The data axes of `whole` replicate: weights are made on all devices together. One engine has
    `whole`.
    """

    whole: Placement
    engines: tuple[Placement, ...]

    def split(self, arrays: Mapping[str, jax.Array]) -> list[dict[str, jax.Array]]:
        """The arrays of each engine, of arrays on `whole` replicated over data axes. No copy."""
        if len(self.engines) == 1:
            return [dict(arrays)]
        parts: list[dict[str, jax.Array]] = [{} for _ in self.engines]
        for name, array in arrays.items():
            on_device = {shard.device: shard.data for shard in array.addressable_shards}
            assert isinstance(array.sharding, NamedSharding)
            for part, engine in zip(parts, self.engines, strict=True):
                sharding = NamedSharding(engine.mesh, array.sharding.spec)
                pieces = [on_device[device] for device in engine.mesh.devices.flat]
                part[name] = jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)
        return parts


def place(
    model: ModelConfig,
    mesh: Mesh | None,
    dtype: str,
    parallel: ParallelConfig | None = None,
    runtime: RuntimeConfig | None = None,
) -> GroupPlacement:
    """Chooses the devices of each engine.

    A mesh of None or no devices means this process's first `tp_size * data_parallel_size` devices;
    of a mesh that spans processes, the devices of this process. "auto" must have been replaced by a
    number. Raises InvalidConfigError when the sizes do not share out the devices, when the tensor
    axis spans processes, when heads, MLP, experts or vocabulary do not divide over it, or the
    number of kv heads neither is a multiple of its size nor divides it.
    """
    parallel, runtime = parallel or ParallelConfig(), runtime or RuntimeConfig()
    devices, tensor_dim = share_out(mesh, parallel)
    tp_size = devices.shape[tensor_dim]
    num_parts = parallel.expert_parallel_size
    check_divides(model, tp_size, num_parts)
    tensor = _split_tensor_axis(model, tp_size, num_parts)
    axes = [(f"{DATA_AXIS}{dim}", size) for dim, size in enumerate(devices.shape)]
    axes[tensor_dim : tensor_dim + 1] = tensor
    packs_weights = False

    def placement(part: np.ndarray, axes: list[tuple[str, int]]) -> Placement:
        names, sizes = zip(*axes, strict=True)
        return Placement(
            Mesh(part.reshape(sizes), names),
            jnp.dtype(dtype),
            packs_weights,
            runtime.quantization,
            num_parts,
            runtime.kv_cache_dtype,
        )

    rows = np.moveaxis(devices, tensor_dim, -1).reshape(-1, tp_size)
    problem = placement(rows[0], tensor).target.cpu_kernels_problem()
    if runtime.linear_backend == "native":
        require_backend(problem, "linear_backend 'native'")
    if runtime.linear_backend in ("auto", "native") and problem is None:
        packs_weights = True
    engines = tuple(placement(row, tensor) for row in rows)
    if len(engines) == 1:
        return GroupPlacement(engines[0], engines)
    return GroupPlacement(placement(devices, axes), engines)


def _split_tensor_axis(
    model: ModelConfig, tp_size: int, expert_parallel_size: int
) -> list[tuple[str, int]]:
    """Sizes of the tensor axes: kv heads of each number, and parts of experts, take the first."""
    sizes, done = [], 1
    for count in (*sorted({*model.kv_head_counts, expert_parallel_size}), tp_size):
        size = min(count, tp_size)
        if size > done:
            sizes.append(size // done)
            done = size
    return list(zip(TENSOR_AXES, sizes or [1], strict=False))


def check_divides(model: ModelConfig, tp_size: int, expert_parallel_size: int = 1) -> None:
    """Raises InvalidConfigError unless a model can be sharded over so many devices."""
    moe = model.moe
    net = model.linear_attention
    is_split = expert_parallel_size > 1
    if is_split:
        _check_expert_parallel(model, tp_size, expert_parallel_size)
    if net is not None and net.num_key_heads % tp_size:
        raise InvalidConfigError(
            f"linear_attention.num_key_heads must be a multiple of the size of the tensor axis "
            f"({tp_size}), got {net.num_key_heads}"
        )
    if moe is not None and moe.shared_size % tp_size:
        raise InvalidConfigError(
            f"moe.shared_size must be a multiple of the size of the tensor axis ({tp_size}), got "
            f"{moe.shared_size}"
        )
    has_mlps = moe is not None and (moe.is_beside_mlp or moe.num_dense_layers > 0)
    for name in (
        "num_heads",
        "vocab_size",
        *(("intermediate_size",) if moe is None or has_mlps else ()),
    ):
        size = getattr(model, name)
        if size % tp_size:
            raise InvalidConfigError(
                f"{name} must be a multiple of the size of the tensor axis ({tp_size}), got {size}"
            )
    if moe and not is_split and moe.intermediate_size % tp_size and moe.num_experts % tp_size:
        raise InvalidConfigError(
            f"moe.intermediate_size or moe.num_experts must be a multiple of the size of the "
            f"tensor axis ({tp_size}), got {moe.intermediate_size} and {moe.num_experts}"
        )
    if (
        model.shared_kv_intermediate_size is not None
        and model.shared_kv_intermediate_size % tp_size
    ):
        raise InvalidConfigError(
            f"shared_kv_intermediate_size must be a multiple of the size of the tensor axis "
            f"({tp_size}), got {model.shared_kv_intermediate_size}"
        )
    smaller = 1
    for num_kv_heads in model.kv_head_counts:
        if num_kv_heads % tp_size and tp_size % num_kv_heads:
            raise InvalidConfigError(
                f"num_kv_heads must be a multiple of the size of the tensor axis ({tp_size}) or "
                f"divide it, got {num_kv_heads}"
            )
        if min(num_kv_heads, tp_size) % smaller:
            raise InvalidConfigError(
                f"num_kv_heads of layers must divide each other over a tensor axis of {tp_size}, "
                f"got {' and '.join(map(str, model.kv_head_counts))}"
            )
        smaller = min(num_kv_heads, tp_size)


def _check_expert_parallel(model: ModelConfig, tp_size: int, size: int) -> None:
    moe = model.moe
    if moe is None:
        raise InvalidConfigError(
            f"expert_parallel_size must be 1 for a model without experts ({model.architecture}), "
            f"got {size}"
        )
    if tp_size % size:
        raise InvalidConfigError(
            f"expert_parallel_size must divide the size of the tensor axis ({tp_size}), got {size}"
        )
    if moe.num_experts % size:
        raise InvalidConfigError(
            f"moe.num_experts must be a multiple of expert_parallel_size ({size}), got "
            f"{moe.num_experts}"
        )
    if moe.intermediate_size % (tp_size // size):
        raise InvalidConfigError(
            f"moe.intermediate_size must be a multiple of the devices that share an expert "
            f"({tp_size // size}: tp_size / expert_parallel_size), got {moe.intermediate_size}"
        )
    for num_kv_heads in model.kv_head_counts:
        count = min(num_kv_heads, tp_size)
        if count % size and size % count:
            raise InvalidConfigError(
                f"expert_parallel_size must be a multiple of num_kv_heads ({num_kv_heads}) or "
                f"divide it, got {size}"
            )


def share_out(mesh: Mesh | None, parallel: ParallelConfig) -> tuple[np.ndarray, int]:
    """The devices in an array with a dimension for each axis, and the tensor dimension.

    Their flat order is the mesh's, so that one program takes arrays of both. Arguments and errors
    are those of `place`.
    """
    tp_size, num_engines = parallel.tp_size, parallel.data_parallel_size
    num_parts = parallel.expert_parallel_size
    assert tp_size != "auto"
    if mesh is None or mesh.empty:
        tp_size = tp_size or num_parts
        count = tp_size * (num_engines or 1)
        known = jax.local_devices()
        if count > len(known):
            raise InvalidConfigError(
                f"tp_size {tp_size} x data_parallel_size {num_engines or 1} needs {count} "
                f"devices; this process has {len(known)}"
            )
        return np.asarray(known[:count]).reshape(num_engines or 1, tp_size), 1
    tensor_dim = _tensor_dim(mesh, parallel.tensor_axes)
    mesh = local_submesh(
        mesh, tensor_axis=None if tensor_dim is None else mesh.axis_names[tensor_dim]
    )
    by_name = 1 if tensor_dim is None else mesh.devices.shape[tensor_dim]
    if tp_size is None and num_engines is None:
        tp_size = math.lcm(by_name, num_parts)
    if tp_size is None:
        assert num_engines is not None
        tp_size = mesh.size // num_engines
    if num_engines is None:
        num_engines = mesh.size // tp_size
    if tp_size * num_engines != mesh.size:
        asked = {
            "tp_size": parallel.tp_size,
            "data_parallel_size": parallel.data_parallel_size,
            "expert_parallel_size": None if num_parts == 1 else num_parts,
        }
        given = " and ".join(f"{name} {size}" for name, size in asked.items() if size is not None)
        raise InvalidConfigError(
            f"{given} must share out the {mesh.size} devices of the mesh {dict(mesh.shape)}"
        )
    if tensor_dim is not None and tp_size == by_name:
        return mesh.devices, tensor_dim
    return mesh.devices.reshape(num_engines, tp_size), 1


def _tensor_dim(mesh: Mesh, tensor_axes: tuple[str, ...]) -> int | None:
    """The dimension of the first tensor axis that a mesh has; None without."""
    for name in tensor_axes:
        if name in mesh.axis_names:
            return mesh.axis_names.index(name)
    return None


def describe(group: GroupPlacement, mesh: Mesh | None, parallel: ParallelConfig) -> str:
    """Says, for a log, how the devices are shared out, and what a mesh was taken for."""
    tp_size, count = group.engines[0].mesh.size, len(group.engines)
    cut = f"{count} engine(s) of {tp_size} device(s)"
    if mesh is None or mesh.empty:
        return cut
    shape = dict(mesh.shape)
    if _tensor_dim(mesh, parallel.tensor_axes) is None:
        names = list(parallel.tensor_axes)
        return f"the mesh {shape} has none of the tensor axes {names}: it is taken for {cut}"
    return f"the mesh {shape} is cut into {cut}"
