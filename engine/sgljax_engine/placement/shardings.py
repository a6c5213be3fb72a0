"""Shardings and physical layout of an engine's arrays.

Tensor parallelism shards attention heads, MLP columns, experts and the vocabulary over the mesh
axis "tp"; XLA inserts the collectives. All other axes replicate: they are there only in the mesh of
a whole group of engines, each of which has a submesh without them; see `submeshes`.

Where "tp" is larger than the number of kv heads, it is split in two: kv heads are sharded over the
first part, one per device, and copied over the second; everything else is sharded over both. The
query heads of a device are then neighbours that share its kv head, so keys never move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgljax_engine.cache.kv_pages import PageLayout
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.layers.experts import shards_width
from sgljax_engine.layers.target import Target
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.spec import EXPERTS_AXIS, KV_HEADS_AXIS, ParamKind, ParamSpec
from sgljax_engine.weights.sync import TargetSpec

TENSOR_AXIS = "tp"
COPIES_AXIS = "tp_copies"
"""The second part of a split `TENSOR_AXIS`, over which kv heads are copied."""

_NORMS = (ParamKind.NORM, ParamKind.OFFSET_NORM)
"""Kinds of parameters that are always float32.

Trainers also compute norms in float32, with weights that may be float32. Rounding these to bfloat16
alone undoes the gain of computing in the trainer's dtype (docs/mismatch.md).
"""


class Placement(NamedTuple):
    """Devices, dtype and layout of an engine, or of a group of engines.

    Attributes:
        mesh: The devices of an engine, or of a group, with a split "tp" axis where kv heads are
            copied.
        dtype: Dtype of weights except norms, of activations and of the KV cache.
        layout: Layout of activations and projection weights.
    """

    mesh: Mesh
    dtype: jnp.dtype
    layout: Layout

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays replicated on every device of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def kv_sharding(self) -> NamedSharding:
        """Sharding of pages: heads, or rows of them, over the tensor axis."""
        return NamedSharding(self.mesh, PartitionSpec(None, self._kv_axis))

    def page_layout(self, model: ModelConfig, heads_per_row: int) -> PageLayout:
        """Where the heads of a token are in a page."""
        num_shards = self.num_tensor_shards // self.num_kv_copies
        return PageLayout(model.num_kv_heads, model.head_dim, heads_per_row, num_shards)

    @property
    def contiguous_kv_sharding(self) -> NamedSharding:
        """Sharding of `cache.contiguous_kv.LayerContiguousKV`."""
        return NamedSharding(self.mesh, PartitionSpec(None, None, self._kv_axis))

    @property
    def platform(self) -> str:
        """JAX's name for the kind of device."""
        return self.mesh.devices.flat[0].platform

    @property
    def is_own_cpu(self) -> bool:
        """Whether all devices are CPUs of this process, see `layers.devices`."""
        return all(map(is_own_cpu, self.mesh.devices.flat))

    @property
    def num_tensor_shards(self) -> int:
        """Number of devices that share one weight."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in (TENSOR_AXIS, COPIES_AXIS))

    @property
    def target(self) -> Target:
        """The target for which kernels are picked."""
        return Target(
            self.platform,
            self.is_own_cpu,
            self.mesh.size,
            self.num_tensor_shards,
            self.dtype.name,
            self.layout,
            self.mesh.abstract_mesh,
        )

    @property
    def num_kv_copies(self) -> int:
        """Number of devices with the same kv heads, of those that share a weight."""
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
            swap = spec.kind.is_projection and self.layout is Layout.FEATURES_FIRST
            axes = [self._mesh_axes(axis) for axis in self._sharded_axes(spec)]
            if swap:
                axes[-2:] = axes[:-3:-1]
            sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
            dtype = jnp.dtype(jnp.float32) if spec.kind in _NORMS else self.dtype
            targets[name] = TargetSpec(spec.shape, dtype, swap, sharding, spec.alias)
        return targets

    def _sharded_axes(self, spec: ParamSpec) -> tuple[str | None, ...]:
        """The logical axes that are sharded: of experts their width, or the experts."""
        if spec.kind is not ParamKind.EXPERTS:
            return spec.axes
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        by_width = shards_width(sizes[EXPERTS_AXIS], sizes["mlp"], self.num_tensor_shards)
        whole = EXPERTS_AXIS if by_width else "mlp"
        return tuple(None if axis == whole else axis for axis in spec.axes)

    def held_bytes(self, arrays: Iterable[Any]) -> int:
        """Bytes of arrays on the devices that share a weight, with every copy there.

        Args:
            arrays: Arrays on this mesh, or `jax.ShapeDtypeStruct`s with a sharding.
        """
        return self.num_tensor_shards * sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays
        )

    def _mesh_axes(self, axis: str | None) -> str | tuple[str, ...] | None:
        """The mesh axes over which a logical axis is sharded."""
        if axis is None:
            return None
        return self._kv_axis if axis == KV_HEADS_AXIS else self._tensor_axes
