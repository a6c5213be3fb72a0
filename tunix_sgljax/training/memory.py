"""Estimates a run's memory on a device, from shapes alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from sgljax_engine import InvalidConfigError
from tunix_sgljax.model_config import engine_dtype
from tunix_sgljax.rollout.options import engine_config_of
from tunix_sgljax.training.lora import abstract_actor
from tunix_sgljax.training.models import ModelSpec, abstract_critic
from tunix_sgljax.training.schema import TrainConfig

_FLOAT32 = 4


class MemoryEstimate(NamedTuple):
    """Bytes on one device of the trainer's mesh, without activations other than logits.

    With LoRA, `policy` is the frozen base, quantised or not, and the pairs; `gradients` and
    `optimizer` are the pairs'. A LoRA policy begins with the reference's arrays, but Tunix's first
    step gives it others. `logits` are those of a micro batch in the trainer, in float32, with
    gradients. `engine_weights` are on their own devices. `mem_fraction_static` may make `kv_cache`
    smaller.
    """

    policy: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    logits: int
    engine_weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        rows = {**self._asdict(), "total": self.total}
        return "\n".join(f"  {name:<15}{size / 1e9:9.3f} GB" for name, size in rows.items())


def estimate_memory(
    config: TrainConfig,
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    optimizers: tuple[optax.GradientTransformation, optax.GradientTransformation],
) -> MemoryEstimate:
    """Adds up the memory of a run without allocating any, for the trainer's mesh."""
    model = config.actor_model_config
    lora, dtype = model.lora_config, None if model.dtype is None else np.dtype(model.dtype)
    base = nnx.state(spec.abstract(), nnx.Param)
    trained, frozen, reference = _shards(base, mesh, dtype), {}, _shards(base, mesh, dtype)
    if lora is not None:
        actor = abstract_actor(spec, lora)
        trained, frozen = _shards(actor.pairs, mesh, dtype), _shards(actor.base, mesh, dtype)
        reference = frozen if lora.weight_qtype is None else trained | frozen
    of_critic = 0
    if config.training_mode == "ppo":
        critic = _shards(nnx.state(abstract_critic(spec), nnx.Param), mesh, dtype)
        of_critic = 2 * _num_bytes(critic) + _num_bytes(jax.eval_shape(optimizers[1].init, critic))
    num_tokens = config.micro_batch_size * config.num_generations * sum(config.max_tokens)
    num_logits = num_tokens * spec.config.vocab_size
    return MemoryEstimate(
        policy=_num_bytes([trained, frozen]),
        gradients=_num_bytes(trained),
        optimizer=_num_bytes(jax.eval_shape(optimizers[0].init, trained)),
        reference=_num_bytes(reference) if config.has_reference_model else 0,
        critic=of_critic,
        logits=2 * num_logits * _FLOAT32 // mesh.size,
        **_engine_bytes(config, spec.config, base, dtype),
    )


def _shards(state: nnx.State, mesh: jax.sharding.Mesh, dtype: np.dtype | None) -> dict[str, Any]:
    """The part of each parameter on one device; a given dtype replaces that of floats."""
    shardings = nnx.to_flat_state(nnx.get_named_sharding(state, mesh))
    shards = {}
    for (key, param), (_, sharding) in zip(nnx.to_flat_state(state), shardings, strict=True):
        name = ".".join(map(str, key))
        try:
            shape = sharding.get_value().shard_shape(param.shape)
        except ValueError:
            raise InvalidConfigError(
                f"a mesh of {dict(mesh.shape)} cannot split {name} of shape {param.shape}, which "
                f"Tunix shards by {sharding.get_value().spec}"
            ) from None
        is_float = jax.numpy.issubdtype(param.dtype, jax.numpy.floating)
        shards[name] = jax.ShapeDtypeStruct(shape, dtype if dtype and is_float else param.dtype)
    return shards


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _engine_bytes(
    config: TrainConfig, model: Any, params: nnx.State, dtype: np.dtype | None
) -> dict[str, int]:
    if config.rollout_engine == "vanilla":
        return {"engine_weights": 0, "kv_cache": 0}
    mesh = config.rollout_mesh
    num_shards = dict(zip(mesh.axis_names, mesh.shape, strict=True))["tp"]
    num_copies = max(num_shards // model.num_kv_heads, 1)  # of each kv head
    leaves = jax.tree.leaves(params)
    options = engine_config_of(config.sgljax_config)
    stored = np.dtype(dtype or leaves[0].dtype).name
    itemsize = jax.numpy.dtype(options.runtime.dtype or engine_dtype(model, stored)).itemsize
    length = options.max_model_len or sum(config.max_tokens)
    cache = options.cache
    num_tokens = cache.num_kv_tokens or options.scheduler.max_running_requests * (
        -(-length // cache.page_size) * cache.page_size
    )
    kv_features = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    num_weights = sum(math.prod(leaf.shape) for leaf in leaves)
    num_weights += (num_copies - 1) * kv_features * model.embed_dim
    return {
        "engine_weights": num_weights * itemsize // num_shards,
        "kv_cache": num_tokens * kv_features * itemsize * num_copies // num_shards,
    }
