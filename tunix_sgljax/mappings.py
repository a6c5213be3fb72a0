"""Tunix's weight mappings as engine rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tunix.generate.mappings import MappingConfig

from sgljax_engine import Rule, WeightSyncError

_QWEN3_RULES = (
    Rule("embedder.input_embedding", "model.embed_tokens.weight"),
    Rule("layers.*.input_layernorm.w", "model.layers.*.input_layernorm.weight"),
    Rule("layers.*.attn.q_proj.w", "model.layers.*.self_attn.q_proj.weight"),
    Rule("layers.*.attn.k_proj.w", "model.layers.*.self_attn.k_proj.weight"),
    Rule("layers.*.attn.v_proj.w", "model.layers.*.self_attn.v_proj.weight"),
    Rule("layers.*.attn.o_proj.w", "model.layers.*.self_attn.o_proj.weight"),
    Rule("layers.*.attn.q_norm.w", "model.layers.*.self_attn.q_norm.weight"),
    Rule("layers.*.attn.k_norm.w", "model.layers.*.self_attn.k_norm.weight"),
    Rule("layers.*.post_attention_layernorm.w", "model.layers.*.post_attention_layernorm.weight"),
    Rule("layers.*.mlp.gate_proj.kernel", "model.layers.*.mlp.gate_proj.weight"),
    Rule("layers.*.mlp.up_proj.kernel", "model.layers.*.mlp.up_proj.weight"),
    Rule("layers.*.mlp.down_proj.kernel", "model.layers.*.mlp.down_proj.weight"),
    Rule("final_norm.w", "model.norm.weight"),
    Rule("lm_head.w", "lm_head.weight", (1, 0)),
)
"""For a model that ships no `sglang_jax` mapping and has the parameter names of Tunix's Qwen3."""


def find_mapping(mapping_obj: Any, model: Any) -> MappingConfig | None:
    """The user's mapping, else the one that the model ships for `sglang_jax`, else None.

    Args:
        mapping_obj: `RolloutConfig.rollout_mapping_config`: a MappingConfig, dict or object.
        model: The Tunix model.
    """
    if mapping_obj is not None:
        return MappingConfig.build(mapping_obj=mapping_obj, model=model, backend="sglang_jax")
    try:
        mapping = MappingConfig.build(model=model, backend="sglang_jax")
    except RuntimeError:  # Tunix's word for "this model has no such mapping"
        return None
    return mapping if mapping.to_hf_mappings else None


def to_rules(mapping: MappingConfig | None, source_names: Iterable[str]) -> tuple[Rule, ...]:
    """Engine rules for a mapping, with transposes and hooks resolved for each source name.

    Raises:
        WeightSyncError: for scanned (stacked) layers, which are not supported.
    """
    if mapping is None:
        return _QWEN3_RULES
    patterns = dict(mapping.to_hf_mappings or {})
    transposes = dict(mapping.to_hf_transpose_keys or {})
    hooks = dict(mapping.to_hf_hook_fns or {})
    rules: dict[str, Rule] = {}
    for pattern, entry in patterns.items():
        target, sharding = (entry, None) if isinstance(entry, str) else entry
        if sharding and "layer" in sharding:
            raise WeightSyncError(f"{pattern!r} maps scanned layers, which is not supported")
        # A wildcard rule may need transposes or hooks that single layers carry in Tunix's tables.
        for name in _matching(pattern, source_names) or [pattern]:
            concrete = _fill(target, pattern, name)
            rules[name] = Rule(name, concrete, _transpose(name, transposes), _lookup(name, hooks))
    return tuple(rules.values())


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if regex.fullmatch(name)]


def _fill(target: str, pattern: str, name: str) -> str:
    values = [n for p, n in zip(pattern.split("."), name.split("."), strict=True) if p == "*"]
    for value in values:
        target = target.replace("*", value, 1)
    return target


def _transpose(name: str, table: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Tunix's look-up order: the last component, the full name, then wildcards."""
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
