"""From a Tunix model to the engine's ModelConfig."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from tunix.models.qwen3 import model as qwen3

from sgljax_engine import ModelConfig, UnsupportedModelError

logger = logging.getLogger(__name__)


def to_model_config(config: Any, *, context_length: int) -> ModelConfig:
    """The engine's description of a model that Tunix trains.

    Args:
        config: A Tunix Qwen3 ModelConfig, the contents of an HF config.json, or an engine
            ModelConfig (returned as it is).
        context_length: For Tunix's configs, which do not say.

    Raises:
        UnsupportedModelError: for other models.
    """
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, Mapping):
        return ModelConfig.from_hf(config)
    if not isinstance(config, qwen3.ModelConfig):
        raise UnsupportedModelError(
            f"a model with config {type(config).__module__}.{type(config).__qualname__} is not "
            "supported; supported: tunix.models.qwen3 (dense)"
        )
    if config.num_experts is not None:
        raise UnsupportedModelError(
            f"num_experts={config.num_experts} is not supported: only dense Qwen3 models are"
        )
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=_trained_rope_theta(),
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.use_tied_embedding,
        context_length=context_length,
    )


def as_trained(model: ModelConfig, actor_config: Any) -> ModelConfig:
    """`model` with the rotary base that Tunix computes the actor with.

    A config.json may name another base; the rollout has to sample from the model that is trained.
    """
    theta = _trained_rope_theta()
    if not isinstance(actor_config, qwen3.ModelConfig) or model.rope_theta == theta:
        return model
    logger.warning(
        "the model's config has rope_theta=%g, but Tunix trains it with %g: the rollout uses that",
        model.rope_theta,
        theta,
    )
    return dataclasses.replace(model, rope_theta=theta)


def _trained_rope_theta() -> float:
    # Tunix 0.1.7's Qwen3 calls apply_rope without config.rope_theta, so its default is what the
    # trainer computes with, and the rollout must sample from the model that is trained.
    return float(inspect.signature(qwen3.apply_rope).parameters["rope_theta"].default)
