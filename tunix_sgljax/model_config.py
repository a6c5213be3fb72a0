"""Derives the engine's ModelConfig from a Tunix model.

It follows what Tunix's code computes, not what its configs say: the rollout must sample from the
model that is trained.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from sgljax_engine import (
    AttentionConfig,
    KVShape,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    UnsupportedModelError,
    model_config_from_hf,
)
from tunix_sgljax.maxtext import model_config as maxtext
from tunix_sgljax.maxtext.fields import CONFIG_MODULES as MAXTEXT_MODULES
from tunix_sgljax.maxtext.fields import is_maxtext_config

logger = logging.getLogger(__name__)

_GEMMA_NORM_EPS = 1e-6
"""The constant in Tunix's Gemma RMSNorm."""

_COMPUTED = ("rope", "rms_norm_eps", "attention", "final_logit_softcap", "moe")
"""Fields that cannot be derived from the shapes of weights."""

_WORDS = {
    "rope": "rotary embedding",
    "theta": "base",
    "llama3": "Llama 3's scaling",
    "rms_norm_eps": "norm epsilon",
    "final_logit_softcap": "cap of logits",
    "moe": "routing of experts",
}
"""Names of a config's fields in messages."""


def to_model_config(config: Any, *, context_length: int) -> ModelConfig:
    """The engine's description of a model that Tunix trains.

    The config is Tunix's, MaxText's, the contents of an HF config.json, or an engine ModelConfig
    (returned unchanged). Tunix's and MaxText's have no context length.
    """
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, Mapping):
        return model_config_from_hf(config)
    convert = _converter(config)
    if convert is None:
        raise UnsupportedModelError(
            f"a model with config {type(config).__module__}.{type(config).__qualname__} is not "
            f"supported; supported: {', '.join(_CONVERTERS)}"
        )
    return convert(config, context_length)


def as_trained(model: ModelConfig, actor_config: Any) -> ModelConfig:
    """`model` with Tunix's own values for the actor where its config.json differs.

    A model of MaxText's is described by MaxText's config alone, to which its weights are mapped.
    """
    convert = _converter(actor_config)
    if convert is None:
        return model
    trained = convert(actor_config, model.context_length)
    if is_maxtext_config(actor_config):
        return dataclasses.replace(trained, eos_token_ids=model.eos_token_ids)
    for name in _COMPUTED:
        given, wanted = getattr(model, name), getattr(trained, name)
        if given != wanted:
            logger.warning(
                "Tunix %s computes this model with %s than its checkpoint has (%s): it starts "
                "worse than the checkpoint. The rollout computes what Tunix does",
                importlib.metadata.version("google-tunix"),
                *_difference(name, given, wanted),
            )
            model = dataclasses.replace(model, **{name: wanted})
    return model


def _difference(name: str, given: Any, wanted: Any) -> tuple[str, str]:
    """What Tunix computes with, and what the checkpoint has, in words: where they differ alone."""
    fields = [""]
    if type(given) is type(wanted) and dataclasses.is_dataclass(given):
        names = [field.name for field in dataclasses.fields(given)]
        fields = [each for each in names if getattr(given, each) != getattr(wanted, each)]

    def parts(value: Any) -> str:
        values = [(each, getattr(value, each) if each else value) for each in fields]
        return ", ".join(f"{_WORDS.get(each, each)} {_in_words(x)}".strip() for each, x in values)

    return f"another {_WORDS.get(name, name)} ({parts(wanted)})", parts(given)


def _in_words(value: Any) -> str:
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return " ".join(f"{each.name} {_in_words(getattr(value, each.name))}" for each in fields)
    if not isinstance(value, float):
        return str(value)
    if 1e-4 <= value < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def config_of(actor: Any) -> Any:
    """The config of an actor: its `config`, or that of MaxText's model inside its adapter; or None.

    MaxText sets its adapter's `config` to None.
    """
    config = getattr(actor, "config", None)
    return getattr(getattr(actor, "base", None), "config", None) if config is None else config


def compute_dtype(actor_config: Any) -> str | None:
    """Name of the dtype in which Tunix computes a model; None for the dtype of its weights.

    Tunix's Qwen2 and Qwen3 cast weights at use to `dtype` of their config, which may differ from
    the stored dtype. So does MaxText. Tunix's other models compute in the dtype of their weights.
    """
    if is_maxtext_config(actor_config):
        return maxtext.compute_dtype(actor_config)
    if _converter(actor_config) is None:
        return None
    dtype = getattr(actor_config, "dtype", None)
    return None if dtype is None else jnp.dtype(dtype).name


def engine_dtype(actor_config: Any, stored: str) -> str:
    """Default dtype of the engine's weights, activations and KV cache.

    The coarser of Tunix's compute dtype and its stored dtype: weights finer than the compute dtype
    are no closer to Tunix, and weights finer than the stored dtype waste memory.
    """
    computed = compute_dtype(actor_config)
    if computed is None or not jnp.issubdtype(stored, jnp.floating):
        return stored
    dtype = coarser_dtype(computed, stored)
    if dtype != computed:
        logger.info(
            "Tunix computes in %s with weights of %s; the rollout computes in %s, whose rounding "
            "is in its log-probs; dtype=%r is nearer to the trainer and takes more memory",
            computed,
            stored,
            dtype,
            computed,
        )
    return dtype


def coarser_dtype(*dtypes: str) -> str:
    return max(dtypes, key=lambda name: float(jnp.finfo(name).eps))


def _llama_like(
    architecture: str,
    config: Any,
    context_length: int,
    *,
    theta: float,
    tied: bool,
    moe: MoEConfig | None = None,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=RopeConfig(theta=theta),
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=tied,
        context_length=context_length,
        moe=moe,
    )


def _qwen2(config: Any, context_length: int) -> ModelConfig:
    theta, tied = float(config.rope_theta), config.use_tied_embedding
    return _llama_like("Qwen2ForCausalLM", config, context_length, theta=theta, tied=tied)


def _qwen3(config: Any, context_length: int) -> ModelConfig:
    theta, tied = _default_of_apply_rope(config, "rope_theta"), config.use_tied_embedding
    if config.num_experts is None:
        return _llama_like("Qwen3ForCausalLM", config, context_length, theta=theta, tied=tied)
    moe = MoEConfig(
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_tok,
        intermediate_size=config.hidden_dim,
        norm_topk_prob=True,
    )
    name = "Qwen3MoeForCausalLM"
    return _llama_like(name, config, context_length, theta=theta, tied=tied, moe=moe)


def _llama3(config: Any, context_length: int) -> ModelConfig:
    # Tunix 0.1.7's Llama 3 has neither rope_theta nor Llama 3.1's stretching.
    theta, tied = _default_of_apply_rope(config, "rope_theta"), config.weight_tying
    return _llama_like("LlamaForCausalLM", config, context_length, theta=theta, tied=tied)


def _gemma_like(
    architecture: str,
    config: Any,
    context_length: int,
    *,
    rope: RopeConfig,
    attention: AttentionConfig,
    final_logit_softcap: float | None = None,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.num_embed,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=rope,
        rms_norm_eps=_GEMMA_NORM_EPS,
        tie_word_embeddings=True,
        context_length=context_length,
        attention=attention,
        final_logit_softcap=final_logit_softcap,
    )


def _gemma(config: Any, context_length: int) -> ModelConfig:
    """Config of Gemma 1 or 2, which are one class in Tunix."""
    norms = (config.use_post_attn_norm, config.use_post_ffw_norm)
    if norms not in ((False, False), (True, True)):
        raise UnsupportedModelError(
            "use_post_attn_norm={} with use_post_ffw_norm={} is not supported: only both (Gemma 2) "
            "or neither (Gemma 1)".format(*norms)
        )
    sliding = _sliding_layers(config.attention_types, config.num_layers)
    return _gemma_like(
        "Gemma2ForCausalLM" if norms[0] else "GemmaForCausalLM",
        config,
        context_length,
        rope=RopeConfig(theta=_default_of_apply_rope(config, "max_wavelength")),
        attention=AttentionConfig(
            scale=config.head_dim**-0.5 if norms[0] else None,
            logit_softcap=config.attn_logits_soft_cap,
            sliding_window=config.sliding_window_size if any(sliding) else None,
            sliding_layers=sliding,
        ),
        final_logit_softcap=config.final_logit_softcap,
    )


def _gemma3(config: Any, context_length: int) -> ModelConfig:
    if config.vision_config is not None:
        raise UnsupportedModelError("vision_config is not supported: only text Gemma 3 models are")
    by_head_dim = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
    query_dim = config.head_dim if by_head_dim else config.embed_dim // config.num_heads
    pattern = sys.modules[_module(config)].GEMMA3_ATTENTION_PATTERN
    types = [pattern[i % len(pattern)] for i in range(config.num_layers)]
    return _gemma_like(
        "Gemma3ForCausalLM",
        config,
        context_length,
        rope=RopeConfig(
            theta=float(config.global_base_frequency), linear_factor=config.global_scale_factor
        ),
        attention=AttentionConfig(
            scale=query_dim**-0.5,
            sliding_window=config.sliding_window_size,
            sliding_layers=_sliding_layers(types, config.num_layers),
            sliding_rope=RopeConfig(
                theta=float(config.local_base_frequency), linear_factor=config.local_scale_factor
            ),
        ),
    )


def _gemma4(config: Any, context_length: int) -> ModelConfig:
    module = sys.modules[_module(config)]
    pattern = config.attention_pattern or module.GEMMA4_ATTENTION_PATTERN
    types = tuple(pattern[i % len(pattern)] for i in range(config.num_layers))
    kv_layers = tuple(
        module.create_kv_cache_sharing_patterns(
            num_layers=config.num_layers,
            frac_shared_layers=config.frac_shared_layers,
            share_global=True,
            share_local=True,
            attention_types=types,
        )
    )
    are_shared = kv_layers != tuple(range(config.num_layers))
    model = _gemma_like(
        "Gemma4ForCausalLM",
        config,
        context_length,
        rope=RopeConfig(
            theta=float(config.global_base_frequency),
            linear_factor=config.global_scale_factor,
            rotary_fraction=config.global_rope_proportion,
        ),
        attention=AttentionConfig(
            scale=1.0,
            sliding_window=config.sliding_window_size,
            sliding_layers=_sliding_layers(types, config.num_layers),
            sliding_rope=RopeConfig(
                theta=float(config.local_base_frequency),
                linear_factor=config.local_scale_factor,
                rotary_fraction=config.local_rope_proportion,
            ),
            full_kv=KVShape(
                config.num_global_kv_heads or config.num_kv_heads,
                config.global_key_size or config.head_dim,
            ),
            full_values_are_keys=config.k_eq_v_global,
            kv_layers=kv_layers if are_shared else (),
        ),
        final_logit_softcap=config.final_logit_softcap,
    )
    return dataclasses.replace(
        model,
        per_layer_input_size=config.per_layer_input_dim,
        shared_kv_intermediate_size=config.override_kv_shared_ffw_hidden if are_shared else None,
        moe=_gemma4_experts(config) if config.enable_moe else None,
    )


def _gemma4_experts(config: Any) -> MoEConfig:
    return MoEConfig(
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_tok,
        intermediate_size=config.expert_dim,
        norm_topk_prob=True,
        is_beside_mlp=True,
        routes_experts_input=_routes_experts_input(),
    )


def _routes_experts_input() -> bool:
    """Whether Tunix's router sees what its experts see, as in 0.1.7, or what comes before the norm.

    Later it sees the latter, as Hugging Face's Gemma 4 has it.
    """
    experts = importlib.import_module("tunix.models.gemma4.moe").MoERagged
    return "router_input" not in inspect.signature(experts.__call__).parameters


def _sliding_layers(types: Any, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer slides; empty when none does."""
    sliding = tuple(kind.name == "LOCAL_SLIDING" for kind in types)[:num_layers]
    return sliding if any(sliding) else ()


def _default_of_apply_rope(config: Any, name: str) -> float:
    # Some of Tunix 0.1.7's models call apply_rope without their config's base, so the trainer uses
    # the default base.
    return _rope_default(_module(config), name)


def _rope_default(module: str, name: str) -> float:
    apply_rope = importlib.import_module(module).apply_rope
    return float(inspect.signature(apply_rope).parameters[name].default)


def trained_rope_theta(architecture: str) -> float | None:
    """The unscaled rotary base with which Tunix trains an architecture, whatever its config says.

    None if Tunix uses the config's base.
    """
    modules = {
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3",
        "LlamaForCausalLM": "llama3",
    }
    if architecture not in modules:
        return None
    return _rope_default(f"tunix.models.{modules[architecture]}.model", "rope_theta")


_CONVERTERS: dict[str, Callable[[Any, int], ModelConfig]] = {
    "tunix.models.qwen2.model": _qwen2,
    "tunix.models.qwen3.model": _qwen3,
    "tunix.models.llama3.model": _llama3,
    "tunix.models.gemma.model": _gemma,
    "tunix.models.gemma3.model": _gemma3,
    "tunix.models.gemma4.model": _gemma4,
    "tunix.models.gemma4.config": _gemma4,  # where Tunix has it after 0.1.7
    **dict.fromkeys(MAXTEXT_MODULES, maxtext.to_model_config),
}
"""Converters by the module of a config's class, so that no unused model is imported."""


def _module(config: Any) -> str:
    """The module of a config's class or of one of its bases; "" if none is known."""
    names = (cls.__module__ for cls in type(config).__mro__)
    return next((name for name in names if name in _CONVERTERS), "")


def _converter(config: Any) -> Callable[[Any, int], ModelConfig] | None:
    return _CONVERTERS.get(_module(config))
