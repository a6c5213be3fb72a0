"""Shardings and physical form of an engine's arrays.

Tensor parallelism shards attention heads, MLP columns, experts and the vocabulary over the mesh
axis "tp"; XLA inserts the collectives. All other axes replicate: they are there only in the mesh of
a whole group of engines, each of which has a submesh without them; see `submeshes`.

Where "tp" is larger than the number of kv heads, it is split in two: kv heads are sharded over the
first part, one per device, and copied over the second; everything else is sharded over both. The
query heads of a device are then neighbours that share its kv head, so keys never move. If layers
have different numbers of kv heads, there is a split for each number, and one for
`expert_parallel_size`: experts are sharded over the axes before it, their width over the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgljax_engine.cache.kv_pages import PageLayout, kv_bytes_per_token, routed_width
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.layers.experts import expert_axes
from sgljax_engine.layers.int8 import SCALE_SUFFIX
from sgljax_engine.layers.target import Target, kv_axes
from sgljax_engine.model_config import KVShape, ModelConfig
from sgljax_engine.models.spec import EXPERTS_AXIS, KVHeads, ParamAxis, ParamKind, ParamSpec
from sgljax_engine.weights.forms import Form, Quantized
from sgljax_engine.weights.specs import TargetSpec

TENSOR_AXES = ("tp", "tp_copies", "tp_more_copies", "tp_most_copies")
"""The tensor axis, and the further parts of a split one."""

_FLOAT32 = (
    *(ParamKind.NORM, ParamKind.OFFSET_NORM),
    *(ParamKind.RECURRENT, ParamKind.ROUTER_BIAS),
)
"""Kinds of parameters that are always float32.

Trainers also compute norms in float32, with weights that may be float32. Rounding these to bfloat16
alone undoes the gain of computing in the trainer's dtype (docs/observability.md).
"""


_QUANTIZED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
"""Endings of the names of projections that are quantised, in dense models."""


_MeshAxes = str | tuple[str, ...] | None
"""An entry of a PartitionSpec."""


class Placement(NamedTuple):
    """Devices and dtype of an engine, or of a group of engines.

    The mesh has a split tensor axis where kv heads are copied. `dtype` is that of weights except
    norms, of activations and, with a `kv_cache_dtype` of "auto", of the KV cache.
    """

    mesh: Mesh
    dtype: jnp.dtype
    packs_weights: bool
    quantization: str | None = None
    expert_parallel_size: int = 1
    kv_cache_dtype: str = "auto"

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Dtype of keys and values in pages."""
        return self.dtype if self.kv_cache_dtype == "auto" else jnp.dtype(self.kv_cache_dtype)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def page_layouts(self, model: ModelConfig, heads_per_row: int) -> tuple[PageLayout, ...]:
        """Layout of a token's heads in a page, for each of the model's cached layers."""
        return tuple(
            PageLayout(
                *shape,
                heads_per_row,
                self.num_tensor_shards // self.kv_copies(shape),
                has_values=model.attention.has_values,
                is_int8=self.kv_dtype == jnp.int8,
            )
            for shape in model.cached_kv
        )

    def kv_sharding(self, kv: KVShape) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, self._kv_axes(kv.num_heads)))

    @property
    def state_shardings(self) -> tuple[NamedSharding, NamedSharding]:
        """Shardings of a `LayerState`: inputs of the convolution everywhere, heads sharded."""
        return self.replicated, NamedSharding(self.mesh, PartitionSpec(None, self._tensor_axes))

    def kv_copies(self, kv: KVShape) -> int:
        """Number of devices with the same kv heads of a layer, of those that share a weight."""
        return max(self.num_tensor_shards // kv.num_heads, 1)

    def kv_bytes_per_token(self, model: ModelConfig, heads_per_row: int, *, slides: bool) -> int:
        """Bytes of a token's keys and values on an engine's devices, every copy counted.

        `slides` counts the layers with a sliding window; False counts those without.
        """
        layouts = self.page_layouts(model, heads_per_row)
        return sum(
            self.kv_copies(model.kv_shape(layer)) * kv_bytes_per_token([layout], self.dtype)
            for layer, layout in zip(model.cached_layers, layouts, strict=True)
            if model.attention.slides(layer) == slides
        )

    def routed_bytes_per_token(self, model: ModelConfig) -> int:
        """Bytes of a token's experts in `KVPages`, which every device has; 0 without experts."""
        moe = model.moe
        if moe is None:
            return 0
        width = routed_width(model.num_layers * moe.num_experts_per_token)
        return self.num_tensor_shards * width * jnp.dtype(moe.id_dtype).itemsize

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def is_own_cpu(self) -> bool:
        return all(map(is_own_cpu, self.mesh.devices.flat))

    @property
    def num_tensor_shards(self) -> int:
        return math.prod(self._tensor_shape.values())

    @property
    def target(self) -> Target:
        return Target(
            self.platform,
            self.is_own_cpu,
            self.mesh.size,
            self.num_tensor_shards,
            self.dtype.name,
            self.packs_weights,
            self.mesh.abstract_mesh,
            getattr(self.mesh.devices.flat[0], "compute_capability", None),
        )

    @property
    def _tensor_shape(self) -> dict[str, int]:
        return {axis: self.mesh.shape[axis] for axis in TENSOR_AXES if axis in self.mesh.shape}

    @property
    def _tensor_axes(self) -> _MeshAxes:
        return _as_axes(self._tensor_shape) if self.num_tensor_shards > 1 else None

    def _kv_axes(self, num_heads: int) -> _MeshAxes:
        if self.num_tensor_shards == 1:
            return None
        return _as_axes(kv_axes(self._tensor_shape, num_heads))

    def weight_targets(self, specs: Mapping[str, ParamSpec]) -> dict[str, TargetSpec]:
        targets = {}
        for name, spec in specs.items():
            form = _packed_form(spec.kind) if self.packs_weights else Form.LOGICAL
            axes = self._spec_axes(spec)
            if form.is_packed:  # by one device
                axes = []
            sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
            dtype = jnp.dtype(jnp.float32) if spec.kind in _FLOAT32 else self.dtype
            targets[name] = TargetSpec(spec.shape, dtype, form, sharding, spec.alias)
            if self.quantization is not None and is_quantized(name, spec):
                targets |= self._quantized(name, targets[name], spec)
        return targets

    def _quantized(self, name: str, target: TargetSpec, spec: ParamSpec) -> dict[str, TargetSpec]:
        axis = 0 if spec.kind is ParamKind.HEAD else len(spec.shape) - 1
        values, scale = (Quantized(spec.shape, axis, is_scale) for is_scale in (False, True))
        shards = PartitionSpec(self._mesh_axes(spec.axes[axis]))
        return {
            name: target._replace(dtype=jnp.dtype(jnp.int8), quantized=values),
            name + SCALE_SUFFIX: TargetSpec(
                (spec.shape[axis],),
                jnp.dtype(jnp.float32),
                Form.LOGICAL,
                NamedSharding(self.mesh, shards),
                "",
                scale,
            ),
        }

    def _spec_axes(self, spec: ParamSpec) -> list[_MeshAxes]:
        """The mesh axes over which each axis of a parameter is sharded."""
        if EXPERTS_AXIS not in spec.axes or self.num_tensor_shards == 1:
            return [self._mesh_axes(axis) for axis in spec.axes]
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        whole, parts = expert_axes(
            self._tensor_shape, sizes[EXPERTS_AXIS], sizes["mlp"], self.expert_parallel_size
        )
        axes = {EXPERTS_AXIS: _as_axes(whole), "mlp": _as_axes(parts)}
        return [axes[axis] if isinstance(axis, str) else None for axis in spec.axes]

    def held_bytes(self, arrays: Iterable[Any]) -> int:
        """Bytes of arrays on the devices that share a weight, with every copy there."""
        return self.num_tensor_shards * sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays
        )

    def _mesh_axes(self, axis: ParamAxis) -> _MeshAxes:
        if axis is None:
            return None
        return self._kv_axes(axis.num_heads) if isinstance(axis, KVHeads) else self._tensor_axes


def is_quantized(name: str, spec: ParamSpec) -> bool:
    """Whether `quantization` applies to a parameter: projections and tables that are multiplied.

    Not to those that rates and decays of a recurrence are made from, which are small.
    """
    is_projection = spec.kind is ParamKind.LINEAR and name.endswith(_QUANTIZED)
    return is_projection or spec.kind is ParamKind.HEAD


def _packed_form(kind: ParamKind) -> Form:
    if kind is ParamKind.HEAD:
        return Form.TABLE_PANELS
    return Form.PANELS if kind.is_projection else Form.LOGICAL


def _as_axes(names: Iterable[str]) -> _MeshAxes:
    axes = tuple(names)
    return axes if len(axes) > 1 else next(iter(axes), None)
