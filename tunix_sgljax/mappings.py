"""Tunix's weight mappings as engine rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunix.generate.mappings import MappingConfig

from sgljax_engine import (
    ModelConfig,
    Rule,
    UnsupportedModelError,
    WeightRule,
    WeightSyncError,
    flatten_named,
)
from tunix_sgljax.lora import LoraActor, is_lora_name
from tunix_sgljax.maxtext import rules as maxtext_rules
from tunix_sgljax.maxtext.fields import is_maxtext_config
from tunix_sgljax.model_config import config_of

_LAYER, _HF_LAYER = "layers.*.", "model.layers.*."


def _norm(ours: str, theirs: str) -> Rule:
    return Rule(f"{_LAYER}{theirs}", f"{_HF_LAYER}{ours}.weight")


_EMBEDDING = Rule("embedder.input_embedding", "model.embed_tokens.weight")
_HEAD = Rule("lm_head.w", "lm_head.weight", (1, 0))
_MLP = tuple(
    Rule(f"{_LAYER}mlp.{name}.kernel", f"{_HF_LAYER}mlp.{name}.weight")
    for name in ("gate_proj", "up_proj", "down_proj")
)
_QK_NORMS = (_norm("self_attn.q_norm", "attn.q_norm.w"), _norm("self_attn.k_norm", "attn.k_norm.w"))
_BIASES = tuple(
    Rule(f"{_LAYER}attn.{name}_bias", f"{_HF_LAYER}self_attn.{name}_proj.bias") for name in "qkv"
)
_EXPERTS = (
    Rule(f"{_LAYER}mlp.router.kernel", f"{_HF_LAYER}mlp.gate.weight"),
    *(
        Rule(f"{_LAYER}mlp.{name}", f"{_HF_LAYER}mlp.experts.{name}.weight")
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
)
_LLAMA = (
    _EMBEDDING,
    _HEAD,
    *_MLP,
    *(
        Rule(f"{_LAYER}attn.{name}.w", f"{_HF_LAYER}self_attn.{name}.weight")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    _norm("input_layernorm", "input_layernorm.w"),
    _norm("post_attention_layernorm", "post_attention_layernorm.w"),
    Rule("final_norm.w", "model.norm.weight"),
)


def _heads(source: str, name: str, part: int | None = None) -> Rule:
    """Rule of a Gemma projection, [heads, model, head]; a fused one is taken in parts."""
    target = f"{_HF_LAYER}self_attn.{name}_proj.weight"
    return Rule(f"{_LAYER}attn.{source}.w", target, (1, 0, 2), part=part)


_GEMMA_SHARED = (
    _EMBEDDING,
    *_MLP,
    _heads("q_einsum", "q"),
    *(_heads("kv_einsum", name, part) for part, name in enumerate("kv")),
    *(_heads("qkv_einsum", name, part) for part, name in enumerate("qkv")),
    Rule(f"{_LAYER}attn.attn_vec_einsum.w", f"{_HF_LAYER}self_attn.o_proj.weight"),
    _norm("input_layernorm", "pre_attention_norm.scale"),
    Rule("final_norm.scale", "model.norm.weight"),
)
_GEMMA2 = (
    *_GEMMA_SHARED,
    _norm("post_attention_layernorm", "post_attn_norm.scale"),
    _norm("pre_feedforward_layernorm", "pre_ffw_norm.scale"),
    _norm("post_feedforward_layernorm", "post_ffw_norm.scale"),
)

_LAYER_INPUTS = "embedder.per_layer_model_projection.w"
_GEMMA4 = (
    *_GEMMA_SHARED,
    _heads("k_einsum", "k"),
    _norm("post_attention_layernorm", "post_attention_norm.scale"),
    _norm("pre_feedforward_layernorm", "pre_ffw_norm.scale"),
    _norm("post_feedforward_layernorm", "post_ffw_norm.scale"),
    _norm("self_attn.q_norm", "attn._query_norm.scale"),
    _norm("self_attn.k_norm", "attn._key_norm.scale"),
    _norm("post_per_layer_input_norm", "post_per_layer_input_norm.scale"),
    *(
        Rule(f"{_LAYER}{name}.w", f"{_HF_LAYER}{name}.weight")
        for name in ("per_layer_input_gate", "per_layer_projection")
    ),
    Rule(f"{_LAYER}skip_scale", f"{_HF_LAYER}layer_scalar"),
    _norm("post_feedforward_layernorm_1", "dense_post_ffw_norm.scale"),
    _norm("pre_feedforward_layernorm_2", "moe_pre_ffw_norm.scale"),
    _norm("post_feedforward_layernorm_2", "moe_post_ffw_norm.scale"),
    Rule(f"{_LAYER}moe.router_logits", f"{_HF_LAYER}router.proj.weight"),
    Rule(f"{_LAYER}moe.router_scale", f"{_HF_LAYER}router.scale"),
    Rule(f"{_LAYER}moe.per_expert_scale", f"{_HF_LAYER}router.per_expert_scale"),
    *(
        Rule(
            f"{_LAYER}moe.gating_einsum",
            f"{_HF_LAYER}experts.{name}_proj.weight",
            (0, 2, 1),
            part=part,
            part_axis=1,
        )
        for part, name in enumerate(("gate", "up"))
    ),
    Rule(f"{_LAYER}moe.linear", f"{_HF_LAYER}experts.down_proj.weight"),
    Rule("embedder.per_layer_input_embedding", "model.embed_tokens_per_layer.weight"),
    Rule(_LAYER_INPUTS, "model.per_layer_model_projection.weight"),
    Rule("embedder.per_layer_projection_norm.scale", "model.per_layer_projection_norm.weight"),
)
_OWN_KEYS = ("kv_einsum.w", "k_einsum.w", "_key_norm.scale")
"""Parameters of Tunix's attention that a layer has and never reads if it reads another's keys."""

_BUILT_IN: dict[str, tuple[Rule, ...]] = {
    "Qwen2ForCausalLM": (*_LLAMA, *_BIASES),
    "Qwen3ForCausalLM": (*_LLAMA, *_QK_NORMS),
    "Qwen3MoeForCausalLM": (*_LLAMA, *_QK_NORMS, *_EXPERTS),
    "LlamaForCausalLM": _LLAMA,
    "GemmaForCausalLM": (
        *_GEMMA_SHARED,
        _norm("post_attention_layernorm", "pre_ffw_norm.scale"),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": (
        *_GEMMA2,
        _norm("post_attention_layernorm", "post_attention_norm.scale"),
        _norm("self_attn.q_norm", "attn._query_norm.scale"),
        _norm("self_attn.k_norm", "attn._key_norm.scale"),
    ),
    "Gemma4ForCausalLM": _GEMMA4,
}
"""Rules by architecture, for models with Tunix's names and no `sglang_jax` mapping, as Gemma."""

_MISSING_IN_TUNIX = {"Qwen3MoeForCausalLM": _EXPERTS}
"""Rules by architecture that the models' own mappings lack in Tunix 0.1.7."""


_LORA_IN_AXES = {
    "o_proj.w": (0, 1),
    "attn_vec_einsum.w": (0, 1),
    "q_einsum.w": (1,),
    "k_einsum.w": (1,),
    "kv_einsum.w": (2,),
    "qkv_einsum.w": (2,),
}
"""Axes that a layer contracts with its input, which a LoRA A has; the first for other weights."""


def built_in_targets(name: str, architecture: str) -> list[tuple[str, Rule]]:
    """The Hugging Face tensors that a weight of Tunix's own models maps to, each with its rule.

    One tensor for each part of a fused weight; none for an unknown name.
    """
    return [
        (_fill(rule.target, rule.source, name), rule)
        for rule in to_rules(None, (), architecture)
        if rule.target is not None and _matching(rule.source, [name])
    ]


def lora_in_axes(name: str) -> tuple[int, ...]:
    """The axes of a weight of Tunix's own models that its LoRA A has."""
    return _LORA_IN_AXES.get(".".join(name.split(".")[-2:]), (0,))


def lora_factor(name: str, num_in: int) -> float:
    """The factor by which a layer of Tunix's own models multiplies a weight, not its LoRA pair."""
    return num_in**-0.5 if name == _LAYER_INPUTS else 1.0


def find_mapping(mapping_obj: Any, model: Any) -> MappingConfig | None:
    """The user's mapping, else the model's own for `sglang_jax`, else None."""
    if mapping_obj is not None:
        return MappingConfig.build(mapping_obj=mapping_obj, model=model, backend="sglang_jax")
    if is_maxtext_config(config_of(model)):
        return None
    try:
        mapping = MappingConfig.build(model=model, backend="sglang_jax")
    except RuntimeError:  # how Tunix reports that a model has no such mapping
        return None
    return mapping if mapping.to_hf_mappings else None


class WeightMapper:
    """Converts a trainer's parameters to the engine's input: arrays by name, and rules.

    Rules are built once per set of names, so that the engine reuses its compiled plan. Without a
    mapping, MaxText's table takes the place of the built-in rules for its models.
    """

    def __init__(
        self,
        mapping: MappingConfig | None,
        model: ModelConfig,
        lora: LoraActor | None = None,
        maxtext_config: Any = None,
    ) -> None:
        self._mapping = mapping
        self._model = model
        self._lora = lora
        self._maxtext_config = maxtext_config
        self._rules: dict[tuple[Any, ...], tuple[WeightRule, ...]] = {}

    def named_source(self, params: Any, *, with_base: bool = True) -> dict[str, Any]:
        """The parameters by dotted name, after the mapping's preprocessing.

        If there are only LoRA leaves, the actor's frozen base completes them unless told not to.
        """
        preprocess = self._mapping.preprocess_src_state if self._mapping is not None else None
        source = flatten_named(params)
        if preprocess is not None and not all(map(is_lora_name, source)):
            source = flatten_named(preprocess(params))
        if self._lora is not None:
            return self._lora.complete(source, with_base=with_base)
        lora = [name for name in source if is_lora_name(name)]
        if lora:
            raise WeightSyncError(
                f"the actor has no LoRA parameters, but {lora[0]!r} and {len(lora) - 1} more came"
            )
        return source

    def lora_targets(self) -> tuple[str, ...]:
        """Kinds of the engine's projections that the actor's pairs change, such as "q_proj"."""
        weights = [] if self._lora is None else self._lora.weights
        kinds: dict[str, None] = {}
        for rule in self._to_rules(weights):
            if rule.target is not None and _matching(rule.source, weights):
                # Tunix's mappings call tables "embedding", the engine calls them "weight".
                kinds[rule.target.rsplit(".", 2)[-2]] = None
        return tuple(kinds)

    def rules_for(
        self, source: Mapping[str, Any], *, with_lora: bool = True
    ) -> tuple[WeightRule, ...]:
        """Rules for parameters of these names; see `to_rules`."""
        key = (with_lora, *source)
        if key not in self._rules:
            plain = [name for name in source if not is_lora_name(name)]
            rules = self._to_rules(plain)
            pairs = self._lora.rules if self._lora is not None and with_lora else ()
            self._rules[key] = (*rules, *pairs)
        return self._rules[key]

    def _to_rules(self, names: Iterable[str]) -> tuple[Rule, ...]:
        model = self._model
        if self._mapping is None and self._maxtext_config is not None:
            return maxtext_rules.to_rules(self._maxtext_config)
        return to_rules(self._mapping, names, model.architecture, model.attention.kv_layers)


def to_rules(
    mapping: MappingConfig | None,
    source_names: Iterable[str],
    architecture: str,
    kv_layers: Sequence[int] = (),
) -> tuple[Rule, ...]:
    """Engine rules for a mapping, with transposes and hooks resolved for each source name.

    Without a mapping they are the built-in rules of the architecture, which ignore keys that no
    layer reads (`AttentionConfig.kv_layers`). Layers stacked in one array (scanned) have "layer" in
    the sharding of their mapping; its place there is their axis, and the target's last `*` is the
    layer. Transposes and hooks apply to one layer.
    """
    if mapping is None:
        if architecture not in _BUILT_IN:
            raise UnsupportedModelError(
                f"no weight mapping is built in for {architecture}, and the model ships none: "
                "set RolloutConfig.rollout_mapping_config"
            )
        unread = [
            Rule(f"layers.{layer}.attn.{name}", None)
            for layer, source in enumerate(kv_layers)
            if layer != source
            for name in _OWN_KEYS
        ]
        return (*unread, *_BUILT_IN[architecture])
    patterns = dict(mapping.to_hf_mappings or {})
    transposes = dict(mapping.to_hf_transpose_keys or {})
    hooks = dict(mapping.to_hf_hook_fns or {})
    rules: dict[str, Rule] = {}
    for pattern, entry in patterns.items():
        target, sharding = (entry, None) if isinstance(entry, str) else entry
        stacked = _stacked_axis(sharding)
        # A wildcard rule may need transposes or hooks that Tunix's tables have per layer.
        for name in _matching(pattern, source_names) or [pattern]:
            concrete = _fill(target, pattern, name)
            transpose, hook = _transpose(name, transposes), _lookup(name, hooks)
            if stacked is None:
                rules[name] = Rule(name, concrete, transpose, hook)
            else:
                rules[name] = Rule(name, concrete, transpose, hook, "each", stacked)
    # The first rule that matches a name counts: these are for names that the mapping leaves out.
    return (*rules.values(), *_MISSING_IN_TUNIX.get(architecture, ()))


def _stacked_axis(sharding: Any) -> int | None:
    """The axis of stacked layers, as Tunix marks it; None for a single layer."""
    if not sharding or "layer" not in sharding:
        return None
    return tuple(sharding).index("layer")


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    regex = _regex(pattern)
    return [name for name in names if regex.fullmatch(name)]


def _regex(pattern: str) -> re.Pattern[str]:
    """With a group for each `*`, which stands for a component or part of one."""
    return re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))


def _fill(target: str, pattern: str, name: str) -> str:
    found = _regex(pattern).fullmatch(name)
    for value in () if found is None else found.groups():
        target = target.replace("*", value, 1)
    return target


def _transpose(name: str, table: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Looks up in Tunix's order: the last component, the full name, then wildcards."""
    last = name.rsplit(".", 1)[-1]
    permutation = table.get(last, _lookup(name, table))
    return tuple(permutation) if permutation is not None else None


def _lookup(name: str, table: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    for pattern, value in table.items():
        if "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name):
            return value
    return None
