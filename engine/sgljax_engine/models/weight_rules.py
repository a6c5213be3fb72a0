"""Rules for weights under Hugging Face's names.

Names do not tell the orientation of a projection: Hugging Face stores [out, in], the engine and
most JAX models [in, out], and a square one fits both. So each orientation has its own rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from sgljax_engine.model_config import LatentConfig, ModelConfig
from sgljax_engine.models.latent import K_UP, KV_UP, V_UP, HeadsHook
from sgljax_engine.models.registry import MODELS, get_model
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.weights import mxfp4
from sgljax_engine.weights.hf_tables import TEXT_PREFIXES, tie_tables
from sgljax_engine.weights.rules import (
    Hook,
    Rule,
    WeightRule,
    WeightSource,
    check_rules,
    flatten_named,
)

_STORED = {
    "MixtralForCausalLM": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.weight", ".w1.weight"),
        (".down_proj.weight", ".w2.weight"),
        (".up_proj.weight", ".w3.weight"),
    ),
}
"""Parts of names as in the memory of transformers 5, and as in files."""

_BESIDE_TEXT = (
    "vision_tower",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "visual",
)
"""Modules of a multimodal checkpoint beside its language model."""


def hf_rules(model_config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for weights as Hugging Face stores them; the default where no rules are given.

    Projections are [out, in], embeddings and an untied `lm_head` [vocabulary, hidden], norms and
    biases vectors. Experts are tensors of their own, as on the hub, or stacked and fused as in the
    memory of transformers 5: `experts.gate_up_proj` and `experts.down_proj`. The rules ignore extra
    tensors of a checkpoint: the frequencies of old rotary embeddings, a copy of tied embeddings as
    `lm_head.weight`, and keys of layers that read those of another layer. For the language model of
    a multimodal checkpoint they take its weights, and ignore all others.

    Args:
        model_config: Config of the model.

    Raises:
        UnsupportedModelError: for an architecture that is not implemented.
    """
    specs = get_model(model_config.architecture).param_specs(model_config)
    rules = [
        Rule(name, name, (1, 0) if spec.kind is ParamKind.LINEAR else None)
        for name, spec in specs.items()
        if spec.kind not in (ParamKind.EXPERTS, ParamKind.HEADS)
    ]
    stacks = [name for name, spec in specs.items() if spec.kind is ParamKind.EXPERTS]
    # One rule for all layers: there are thousands of experts to match.
    for name in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", stack) for stack in stacks):
        has_bias = model_config.moe is not None and model_config.moe.has_bias
        rules += _interleaved_rules(name) if has_bias else _expert_rules(name)
    rules += [
        rule._replace(source=name)
        for rule in rules
        if (name := stored_name(model_config, rule.source)) != rule.source
    ]
    if model_config.attention.latent is not None:
        rules += _latent_rules(model_config.attention.latent)
    rules.append(Rule("model.layers.*.self_attn.rotary_emb.inv_freq", None))
    for layer in range(model_config.num_layers):
        if model_config.kv_layer(layer) != layer:
            rules.extend(
                Rule(f"model.layers.{layer}.self_attn.{name}.weight", None)
                for name in ("k_proj", "v_proj", "k_norm", "v_norm")
            )
    if model_config.linear_attention is not None:  # layers that draft tokens
        rules.append(Rule("mtp.**", None))
    if model_config.attention.latent is not None:  # likewise, called as if they came next
        rules.insert(0, Rule(f"model.layers.{model_config.num_layers}.**", None))
    if model_config.tie_word_embeddings:  # a copy: `hf_source` lets no other one pass
        rules.append(Rule("lm_head.weight", None))
    is_multimodal = _multimodal(model_config.architecture) in MODELS
    prefixes = TEXT_PREFIXES[1:] if is_multimodal else TEXT_PREFIXES[1:2]
    renamed = [
        rule._replace(source=prefix + rule.source.removeprefix("model."))
        for prefix in prefixes
        for rule in rules
        if rule.source.startswith("model.")
    ]
    return (*rules, *renamed, *(_multimodal_rules(rules) if is_multimodal else ()))


def hf_source(
    model_config: ModelConfig, source: Any, rules: Sequence[WeightRule] | None
) -> WeightSource:
    """Weights with their rules; without rules as Hugging Face stores them, its tied tables too."""
    if rules is not None:
        return WeightSource(source, check_rules(rules))
    arrays = flatten_named(source)
    mxfp4.join_blocks(arrays)
    if model_config.tie_word_embeddings:
        arrays = tie_tables(arrays)
    return WeightSource(arrays, hf_rules(model_config))


def _multimodal(architecture: str) -> str:
    return architecture.replace("ForCausalLM", "ForConditionalGeneration")


def _multimodal_rules(rules: list[Rule]) -> list[Rule]:
    """Rules for the head of a multimodal checkpoint, and rules that ignore its other modules."""
    heads = [
        rule._replace(source=f"language_model.{rule.source}")
        for rule in rules
        if rule.source.startswith("lm_head.")
    ]
    beside = [
        Rule(f"{prefix}{module}.**", None) for prefix in ("", "model.") for module in _BESIDE_TEXT
    ]
    return [*heads, *beside]


def stored_name(model_config: ModelConfig, name: str) -> str:
    """The name that Hugging Face's files have for a name in the memory of transformers 5."""
    for part, stored in _STORED.get(model_config.architecture, ()):
        name = name.replace(part, stored)
    return name


def expert_name(stack: str, expert: int | str) -> str:
    """Hugging Face's name of one expert's tensor; "*" stands for any expert."""
    return stack.replace(".experts.", f".experts.{expert}.")


def _expert_rules(stack: str) -> list[Rule]:
    """Rules for both forms of a stack of experts, whose name has a `*` for the layer."""
    alone = Rule(expert_name(stack, "*"), stack, (1, 0), into="each")
    prefix, projection = stack.removesuffix(".weight").rsplit(".", 1)
    if projection == "down_proj":
        return [alone, Rule(f"{prefix}.down_proj", stack, (0, 2, 1))]
    part = ("gate_proj", "up_proj").index(projection)
    fused = f"{prefix}.gate_up_proj"
    return [alone, Rule(fused, stack, (0, 2, 1), part=part, part_axis=1, num_parts=2)]


def _latent_rules(latent: LatentConfig) -> list[Rule]:
    """Rules for the projection of latents to keys and values."""
    prefix = "model.layers.*.self_attn."
    keys, values = (HeadsHook(latent, is_values) for is_values in (False, True))
    source = f"{prefix}{KV_UP}.weight"
    return [
        Rule(source, f"{prefix}{K_UP}.weight", hook=keys, is_shared=True),
        Rule(source, f"{prefix}{V_UP}.weight", hook=values),
    ]


def _interleaved_rules(stack: str) -> list[Rule]:
    """Rules for a stack of gpt-oss' experts and its biases; as of `_expert_rules`.

    Gates alternate with the other projections in a fused tensor [experts, in, out], or [experts,
    out, in] in MXFP4.
    """
    alone = Rule(expert_name(stack, "*"), stack, (1, 0), into="each")
    prefix, projection = stack.removesuffix(".weight").rsplit(".", 1)
    fused, every = "down_proj", mxfp4.dequantize
    stored: Hook | None = None
    if projection != "down_proj":
        fused = "gate_up_proj"
        first = ("gate_proj", "up_proj").index(projection)
        stored, every = ((_even, mxfp4.dequantize_even), (_odd, mxfp4.dequantize_odd))[first]
    is_shared = projection == "gate_proj"
    bias = f"{prefix}.{projection}.bias"
    return [
        alone,
        Rule(f"{prefix}.{fused}", stack, hook=stored, is_shared=is_shared),
        Rule(f"{prefix}.{fused}_bias", bias, hook=stored, is_shared=is_shared),
        Rule(f"{prefix}.{fused}_blocks", stack, hook=every, is_shared=is_shared),
    ]


def _even(x: jax.Array) -> jax.Array:
    return x[..., 0::2]


def _odd(x: jax.Array) -> jax.Array:
    return x[..., 1::2]


def logical_rules(model_config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for Hugging Face's names with the engine's shapes: projections are [in, out].

    Args:
        model_config: Config of the model.

    Raises:
        UnsupportedModelError: for an architecture that is not implemented.
    """
    specs = get_model(model_config.architecture).param_specs(model_config)
    return tuple(Rule(name, name) for name in specs)
