"""Gemma 4, text: E2B, E4B, 12B, 31B and 26B-A4B (Gemma 4 model card, 2026).

Gemma 3 with norm weights stored whole, values that are normalised too, unscaled products of queries
and keys, and a factor for the output of each layer. Layers with full attention have other heads
than sliding ones. The last layers may read the keys of earlier ones, layers with full attention may
take their keys as values, and each layer may take further embeddings of the token, or have experts
beside its MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgljax_engine.errors import UnsupportedModelError
from sgljax_engine.model_config import AttentionConfig, KVShape, ModelConfig, MoEConfig, RopeConfig
from sgljax_engine.models import gemma, hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.hf_rope import parse_rope

_SLIDING_PATTERN = 6
_TEXT_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": gemma.GELU,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size": 262_144,
}
"""Settings that a `text_config` may leave out; transformers' Gemma4TextConfig."""
_UNIFIED_DEFAULTS = {
    **_TEXT_DEFAULTS,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
}
"""The same of Gemma4UnifiedTextConfig, the 12B."""
_DEFAULT_ROPES = {
    hf.SLIDING: RopeConfig(theta=10_000.0),
    hf.FULL: RopeConfig(theta=1_000_000.0, rotary_fraction=0.25),
}


def _config_from_hf(config: hf.HfConfig, defaults: hf.HfConfig = _TEXT_DEFAULTS) -> ModelConfig:
    config = hf.with_defaults(config, defaults)
    # Only tokens of images attend to later tokens with "vision".
    bidirectional = config.get("use_bidirectional_attention")
    if bidirectional == "vision":
        config = {**config, "use_bidirectional_attention": None}
    hf.check_settings(config, hidden_activation=gemma.GELU, partial_rotary_factor=1.0)
    inputs = config.get("hidden_size_per_layer_input", 256) or 0
    table = config.get("vocab_size_per_layer_input")
    if inputs and table is not None and table != config.get("vocab_size"):
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={table!r} is not supported, only that of vocab_size "
            f"({config.get('vocab_size')})"
        )
    wide = config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers")
    size = hf.require(config, "intermediate_size")
    return hf.dense_config(
        config,
        rope=_rope(config, hf.FULL),
        tied_by_default=True,
        attention=_attention(config),
        final_logit_softcap=config.get("final_logit_softcapping"),
        per_layer_input_size=inputs,
        shared_kv_intermediate_size=2 * size if wide else None,
        moe=_moe(config) if config.get("enable_moe_block") else None,
        attention_bias=hf.flag(config, "attention_bias"),
    )


def _moe(config: hf.HfConfig) -> MoEConfig:
    return MoEConfig(
        num_experts=hf.require(config, "num_experts"),
        num_experts_per_token=hf.require(config, "top_k_experts"),
        intermediate_size=hf.require(config, "moe_intermediate_size"),
        norm_topk_prob=True,
        is_beside_mlp=True,
    )


def _config_from_multimodal(config: hf.HfConfig) -> ModelConfig:
    return _config_from_hf(hf.text_config(config, "Gemma4ForCausalLM"))


def _config_from_unified(config: hf.HfConfig) -> ModelConfig:
    return _config_from_hf(hf.text_config(config, "Gemma4ForCausalLM"), _UNIFIED_DEFAULTS)


def _rope(config: hf.HfConfig, kind: str) -> RopeConfig:
    nested = config.get("rope_parameters")
    if config.get("rope_scaling") is not None:
        raise UnsupportedModelError(
            f"rope_scaling={config['rope_scaling']!r} is not supported, only rope_parameters"
        )
    return _DEFAULT_ROPES[kind] if nested is None else parse_rope(hf.require(nested, kind), config)


def _attention(config: hf.HfConfig) -> AttentionConfig:
    sliding = hf.sliding_layers(config, _SLIDING_PATTERN)
    # As transformers does it: the last layer is a full one whatever its type is called.
    sliding = (*sliding[:-1], False)
    keys_are_values = bool(config.get("attention_k_eq_v"))
    num_heads = hf.require(config, "num_key_value_heads")
    full_heads = config.get("num_global_key_value_heads") if keys_are_values else None
    full_heads = num_heads if full_heads is None else full_heads
    full_dim = config.get("global_head_dim", 512)
    return AttentionConfig(
        scale=1.0,
        sliding_window=hf.require(config, "sliding_window") if any(sliding) else None,
        sliding_layers=sliding,
        sliding_rope=_rope(config, hf.SLIDING),
        full_kv=KVShape(full_heads, full_dim),
        full_values_are_keys=keys_are_values,
        kv_layers=shared_kv_layers(sliding, config.get("num_kv_shared_layers") or 0),
    )


def shared_kv_layers(sliding: Sequence[bool], num_shared: int) -> tuple[int, ...]:
    """`AttentionConfig.kv_layers` of a model whose last layers read keys of earlier ones.

    Each reads those of the last layer of its own kind that has some; if none has, it is refused.
    """
    if not num_shared:
        return ()
    num_owners = len(sliding) - num_shared
    last = {sliding[layer]: layer for layer in range(max(num_owners, 0))}
    missing = [
        layer for layer in range(max(num_owners, 0), len(sliding)) if sliding[layer] not in last
    ]
    if missing:
        raise UnsupportedModelError(
            f"num_kv_shared_layers={num_shared} leaves layer {missing[0]} without a layer of its "
            "kind to read keys from"
        )
    return tuple(
        layer if layer < num_owners else last[slides] for layer, slides in enumerate(sliding)
    )


MODEL = decoder(
    gemma.TRAITS._replace(
        has_offset_norms=False,
        has_post_norms=True,
        has_qk_norm=True,
        has_value_norm=True,
        has_layer_scale=True,
    ),
    _config_from_hf,
)
MULTIMODAL = MODEL._replace(config_from_hf=_config_from_multimodal)
UNIFIED = MODEL._replace(config_from_hf=_config_from_unified)
