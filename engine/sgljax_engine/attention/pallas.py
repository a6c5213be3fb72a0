"""The attention backend "pallas": a Pallas kernel for NVIDIA GPUs. Imported only on request."""

from __future__ import annotations

import dataclasses

import jax

from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.kernels.gpu.paged_attention import HEAD_DIMS, Scores, paged_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasAttention:
    """The `PagedAttention` backend "pallas", for prefill and decode. Static and hashable.

    Attributes:
        interpret: Run the kernel as plain JAX operations on any device. Slow; for tests.
    """

    interpret: bool = False

    def __call__(
        self, q_NQDh: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
    ) -> jax.Array:
        """See `PagedAttention`; `head_dim` is one of `HEAD_DIMS`. 0 where `kv_lens` is 0."""
        return paged_attention(
            q_NQDh, layer.k, layer.v, *tables, Scores(*options), interpret=self.interpret
        )


def gpu_backend(platform: str, *, head_dim: int, num_tensor_shards: int) -> PallasAttention:
    """The compiled backend.

    Args:
        platform: JAX's name for the kind of device.
        head_dim: The model's head_dim.
        num_tensor_shards: Number of devices that share the kv heads.

    Raises:
        InvalidConfigError: when the kernel cannot run the model on this platform.
    """
    name = "attention_backend 'pallas'"
    if platform != "gpu":
        raise InvalidConfigError(
            f"{name} needs a GPU; the engine's devices are of kind {platform!r}"
        )
    if head_dim not in HEAD_DIMS:
        raise InvalidConfigError(f"{name} needs a head_dim of {HEAD_DIMS}, got {head_dim}")
    if num_tensor_shards > 1:
        raise InvalidConfigError(
            f"{name} runs on one device; the mesh spreads heads over {num_tensor_shards}"
        )
    return PallasAttention()
