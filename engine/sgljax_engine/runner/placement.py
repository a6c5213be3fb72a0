"""Where arrays live: devices, shardings and physical layout.

Tensor parallelism shards attention heads, MLP columns and the vocabulary over the mesh axis "tp"
(the name that Tunix's meshes use); all other axes replicate. XLA inserts the collectives.

Where "tp" is larger than the number of kv heads, it is split in two: kv heads are spread over the
first part, one to a device, and copied over the second; everything else is spread over both. The
query heads of a device then are neighbours that share its kv head, so no key ever moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.basic import Layout, default_layout
from sgljax_engine.layers.target import Target
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.spec import KV_HEADS_AXIS, ParamKind, ParamSpec
from sgljax_engine.weights.sync import TargetSpec

TENSOR_AXIS = "tp"
COPIES_AXIS = "tp_copies"
"""The second part of `TENSOR_AXIS`, over which kv heads are copied; there if that is split."""

_NORMS = (ParamKind.NORM, ParamKind.OFFSET_NORM)
"""Kinds of parameters that are float32 in any case.

Norms are computed in float32 by trainers too, with weights that may be float32. Rounded to
bfloat16 they alone undo what computing in the trainer's dtype gains (docs/mismatch.md).
"""


class Placement(NamedTuple):
    """Devices, dtype and layout of an engine.

    Attributes:
        mesh: The engine's mesh, its "tp" axis split where kv heads are copied.
        dtype: Of weights but for those of norms, of activations and of the KV cache.
        layout: Of activations and projection weights.
    """

    mesh: Mesh
    dtype: jnp.dtype
    layout: Layout

    @property
    def replicated(self) -> NamedSharding:
        """On every device of the mesh in full."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def kv_sharding(self) -> NamedSharding:
        """Of [num_pages, num_kv_heads, page_size, head_dim] arrays."""
        return NamedSharding(self.mesh, PartitionSpec(None, self._kv_axis))

    @property
    def contiguous_kv_sharding(self) -> NamedSharding:
        """Of `cache.contiguous_kv.LayerContiguousKV`."""
        return NamedSharding(self.mesh, PartitionSpec(None, None, self._kv_axis))

    @property
    def platform(self) -> str:
        """JAX's name for the kind of device."""
        return self.mesh.devices.flat[0].platform

    @property
    def num_tensor_shards(self) -> int:
        """Devices that one weight is spread over."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in (TENSOR_AXIS, COPIES_AXIS))

    @property
    def target(self) -> Target:
        """What kernels are picked for."""
        return Target(
            self.platform, self.mesh.size, self.num_tensor_shards, self.dtype.name, self.layout
        )

    @property
    def num_kv_copies(self) -> int:
        """Devices, of those that a weight is spread over, that hold the same kv heads."""
        return self.mesh.shape.get(COPIES_AXIS, 1)

    @property
    def _kv_axis(self) -> str | None:
        return TENSOR_AXIS if self.num_tensor_shards > 1 else None

    @property
    def _tensor_axes(self) -> str | tuple[str, ...] | None:
        return (TENSOR_AXIS, COPIES_AXIS) if self.num_kv_copies > 1 else self._kv_axis

    def weight_targets(self, specs: Mapping[str, ParamSpec]) -> dict[str, TargetSpec]:
        """The weight-sync targets of a model's parameters."""
        targets = {}
        for name, spec in specs.items():
            swap = spec.kind is ParamKind.LINEAR and self.layout is Layout.FEATURES_FIRST
            axes = [self._mesh_axes(axis) for axis in spec.axes]
            sharding = NamedSharding(self.mesh, PartitionSpec(*(axes[::-1] if swap else axes)))
            dtype = jnp.dtype(jnp.float32) if spec.kind in _NORMS else self.dtype
            targets[name] = TargetSpec(spec.shape, dtype, swap, sharding, spec.alias)
        return targets

    def held_bytes(self, arrays: Iterable[Any]) -> int:
        """Bytes of arrays on the devices that a weight is spread over, with every copy there.

        Args:
            arrays: Of this mesh; `jax.ShapeDtypeStruct`s with a sharding will do.
        """
        return self.num_tensor_shards * sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays
        )

    def _mesh_axes(self, axis: str | None) -> str | tuple[str, ...] | None:
        """Over which axes of the mesh a logical axis is spread."""
        if axis is None:
            return None
        return self._kv_axis if axis == KV_HEADS_AXIS else self._tensor_axes


def place(model: ModelConfig, mesh: Mesh | None, dtype: str) -> Placement:
    """Chooses placement on a mesh, or on JAX's first device.

    Args:
        model: What is to be placed.
        mesh: The caller's. None, or a mesh of no devices, is JAX's first device.
        dtype: Of weights, activations and KV cache.

    Raises:
        InvalidConfigError: when heads, MLP or vocabulary do not divide over the "tp" axis, or the
            number of kv heads neither is a multiple of its size nor divides it.
    """
    if mesh is None or mesh.empty:
        mesh = Mesh(np.asarray(jax.devices()[:1]), (TENSOR_AXIS,))
    num_shards = mesh.shape.get(TENSOR_AXIS, 1)
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        size = getattr(model, name)
        if size % num_shards:
            raise InvalidConfigError(
                f"{name} must be a multiple of the mesh's {TENSOR_AXIS!r} size ({num_shards}), "
                f"got {size}"
            )
    num_kv_heads = model.num_kv_heads
    if num_kv_heads % num_shards and num_shards % num_kv_heads:
        raise InvalidConfigError(
            f"num_kv_heads must be a multiple of the mesh's {TENSOR_AXIS!r} size ({num_shards}) or "
            f"divide it, got {num_kv_heads}"
        )
    layout = default_layout(mesh.devices.flat[0].platform)
    return Placement(_engine_mesh(mesh, num_kv_heads), jnp.dtype(dtype), layout)


def _engine_mesh(mesh: Mesh, num_kv_heads: int) -> Mesh:
    """The same devices in the same order, with automatic axes and room for kv heads.

    Programs leave the collectives to XLA.
    """
    sizes: dict[str, int] = {}
    for axis, size in mesh.shape.items():
        sizes[axis] = size
        if axis == TENSOR_AXIS and size > num_kv_heads:
            sizes |= {TENSOR_AXIS: num_kv_heads, COPIES_AXIS: size // num_kv_heads}
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
