"""Llama 2, 3, 3.1 and 3.2, text only, Mistral 7B, Mixtral and SmolLM3: GQA, RoPE, SwiGLU.

Sources: The Llama 3 Herd of Models (2024), Mistral 7B (2023), Mixtral of Experts (2024), SmolLM3
(2025). Models of Llama's architecture may have biases. Mistral's and Mixtral's layers may all
slide. Mixtral has experts in the place of each MLP. Of SmolLM3's layers every fourth has no rotary
embedding (RoPE to NoRoPE and Back Again, 2025).
"""

from __future__ import annotations

from sgljax_engine.checks import check_count, require
from sgljax_engine.model_config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits
from sgljax_engine.models.hf_rope import read_rope

_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_MIXTRAL_DEFAULTS = {
    **_MISTRAL_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_SMOLLM3_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
}
"""Settings that a config may leave out, of transformers' classes; a null window is none."""

_NO_ROPE_INTERVAL = 4
_ALL_ALIKE = AttentionConfig()


def _llama_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _LLAMA_DEFAULTS)
    return _with_biases(config, tied_by_default=False)


def _with_biases(
    config: hf.HfConfig, *, tied_by_default: bool, attention: AttentionConfig = _ALL_ALIKE
) -> ModelConfig:
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.check_full_attention(config)
    return hf.dense_config(
        config,
        rope=read_rope(config),
        tied_by_default=tied_by_default,
        attention=attention,
        attention_bias=hf.flag(config, "attention_bias"),
        mlp_bias=hf.flag(config, "mlp_bias"),
    )


def _mistral_config(config: hf.HfConfig) -> ModelConfig:
    return _windowed_config(hf.with_defaults(config, _MISTRAL_DEFAULTS), read_rope(config))


def _mixtral_config(config: hf.HfConfig) -> ModelConfig:
    rope = read_rope(config, theta=1_000_000.0)
    # `num_experts` is another name in transformers' class.
    other = {"num_local_experts": config["num_experts"]} if "num_experts" in config else {}
    config = hf.with_defaults(config, {**_MIXTRAL_DEFAULTS, **other})
    moe = MoEConfig(
        num_experts=hf.require(config, "num_local_experts"),
        num_experts_per_token=hf.require(config, "num_experts_per_tok"),
        intermediate_size=hf.require(config, "intermediate_size"),
        norm_topk_prob=True,
    )
    return _windowed_config(config, rope, moe)


def _windowed_config(
    config: hf.HfConfig, rope: RopeConfig, moe: MoEConfig | None = None
) -> ModelConfig:
    hf.check_settings(config, hidden_act=hf.SILU)
    hf.warn_without_effect(config, "attention_bias", "mlp_bias")
    window = config["sliding_window"]
    # transformers slides in all layers or in none, whatever `layer_types` says.
    hf.check_layer_types(config, hf.FULL if window is None else hf.SLIDING)
    attention = hf.sliding_everywhere(config, window)
    return hf.dense_config(config, rope=rope, tied_by_default=False, attention=attention, moe=moe)


def _smollm3_config(config: hf.HfConfig) -> ModelConfig:
    config = hf.with_defaults(config, _SMOLLM3_DEFAULTS)
    attention = AttentionConfig(rope_layers=_rope_layers(config))
    return _with_biases(config, tied_by_default=True, attention=attention)


def _rope_layers(config: hf.HfConfig) -> tuple[bool, ...]:
    """Whether each layer rotates: where `no_rope_layers`, despite its name, is 1."""
    num_layers, given = hf.require(config, "num_hidden_layers"), config.get("no_rope_layers")
    check_count("num_hidden_layers", num_layers)
    if given is None:
        interval = config.get("no_rope_layer_interval", _NO_ROPE_INTERVAL)
        check_count("no_rope_layer_interval", interval)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_list = isinstance(given, list) and all(each in (0, 1) for each in given)
    require(
        is_list and len(given) >= num_layers,
        "no_rope_layers",
        given,
        f"a list of 0 and 1 for each of num_hidden_layers ({num_layers})",
    )
    return tuple(map(bool, given[:num_layers]))


LLAMA = decoder(DecoderTraits(), _llama_config)
MISTRAL = decoder(DecoderTraits(), _mistral_config)
MIXTRAL = decoder(DecoderTraits(), _mixtral_config)
SMOLLM3 = decoder(DecoderTraits(), _smollm3_config)
