"""Where arrays live: devices, shardings and physical layout.

Tensor parallelism shards attention heads, MLP columns and the vocabulary over the mesh axis "tp"
(the name that Tunix's meshes use); all other axes replicate. XLA inserts the collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.layers.basic import Layout, default_layout
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.spec import ParamKind, ParamSpec
from sgljax_engine.weights.sync import TargetSpec

TENSOR_AXIS = "tp"


class Placement(NamedTuple):
    """Devices, dtype and layout of an engine.

    Attributes:
        mesh: The engine's mesh.
        dtype: Of weights, activations and KV cache.
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
        return NamedSharding(self.mesh, PartitionSpec(None, self._tensor_axis))

    @property
    def kv_rows_sharding(self) -> NamedSharding:
        """Of `cache.kv_rows.LayerRows`."""
        return NamedSharding(self.mesh, PartitionSpec(None, None, self._tensor_axis))

    @property
    def platform(self) -> str:
        """JAX's name for the kind of device."""
        return self.mesh.devices.flat[0].platform

    @property
    def num_tensor_shards(self) -> int:
        """Devices that one weight is spread over."""
        return dict(self.mesh.shape).get(TENSOR_AXIS, 1)

    @property
    def _tensor_axis(self) -> str | None:
        return TENSOR_AXIS if self.num_tensor_shards > 1 else None

    def weight_targets(self, specs: Mapping[str, ParamSpec]) -> dict[str, TargetSpec]:
        """The weight-sync targets of a model's parameters."""
        targets = {}
        for name, spec in specs.items():
            swap = spec.kind is ParamKind.LINEAR and self.layout is Layout.FEATURES_FIRST
            axes = [self._tensor_axis if axis is not None else None for axis in spec.axes]
            sharding = NamedSharding(self.mesh, PartitionSpec(*(axes[::-1] if swap else axes)))
            targets[name] = TargetSpec(spec.shape, self.dtype, swap, sharding, spec.alias)
        return targets


def place(model: ModelConfig, mesh: Mesh | None, dtype: str) -> Placement:
    """Chooses placement on a mesh, or on JAX's first device.

    Raises:
        InvalidConfigError: when heads, MLP or vocabulary do not divide over the "tp" axis.
    """
    if mesh is None:
        mesh = Mesh(np.asarray(jax.devices()[:1]), (TENSOR_AXIS,))
    # The same devices with automatic axes: programs leave the collectives to XLA.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    placement = Placement(mesh, jnp.dtype(dtype), default_layout(mesh.devices.flat[0].platform))
    shards = placement.num_tensor_shards
    for name in ("num_kv_heads", "num_heads", "intermediate_size", "vocab_size"):
        size = getattr(model, name)
        if size % shards:
            raise InvalidConfigError(
                f"{name} must be a multiple of the mesh's {TENSOR_AXIS!r} size ({shards}), "
                f"got {size}"
            )
    return placement
