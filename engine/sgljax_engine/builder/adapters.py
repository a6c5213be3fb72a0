"""The adapters that an engine starts with, and the room for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from sgljax_engine.config import LORA_TARGETS, LoraConfig
from sgljax_engine.errors import InvalidConfigError, InvalidRequestError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.spec import ParamKind, ParamSpec
from sgljax_engine.models.weight_rules import hf_rules
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.weights.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    AdapterSlots,
    empty_slots,
    plan_adapter,
)
from sgljax_engine.weights.peft_folder import read_peft_folder
from sgljax_engine.weights.rules import WeightRule, WeightSource, check_rules
from sgljax_engine.weights.specs import TargetSpec

_WITH_SLOTS = (ParamKind.LINEAR, ParamKind.HEAD)


def check_adapters(adapters: Mapping[str, Any], lora: LoraConfig) -> None:
    if len(adapters) > lora.max_loras:
        raise InvalidConfigError(
            f"adapters holds {len(adapters)}, but max_loras is {lora.max_loras}"
        )
    for name in adapters:
        if not isinstance(name, str) or not name:
            raise InvalidConfigError(f"adapters must have names, got {name!r}")


def adapter_source(
    model: ModelConfig, source: Any, rules: Sequence[WeightRule] | None
) -> WeightSource:
    """An adapter's pairs with their rules: a pytree with rules, or a PEFT folder without."""
    is_folder = isinstance(source, (str, os.PathLike))
    if is_folder != (rules is None):
        raise InvalidRequestError(
            "rules go with an adapter's arrays, and are needed for them; a PEFT folder has none"
        )
    if rules is not None:
        return WeightSource(source, check_rules(rules))
    found = read_peft_folder(source)
    return WeightSource(found.arrays, (*hf_rules(model), *found.rules))


def first_sources(model: ModelConfig, adapters: Mapping[str, Any]) -> dict[str, WeightSource]:
    """The adapters that an engine starts with: a PEFT folder each, or a pytree and its rules."""
    pairs = {
        name: (given, None) if isinstance(given, (str, os.PathLike)) else given
        for name, given in adapters.items()
    }
    return {name: adapter_source(model, source, rules) for name, (source, rules) in pairs.items()}


def adapter_slots(
    lora: LoraConfig, specs: Mapping[str, ParamSpec], placement: Placement
) -> AdapterSlots | None:
    if not lora.max_loras:
        return None
    kinds = LORA_TARGETS[:-1] if lora.lora_targets is None else lora.lora_targets
    size = lora.max_loras * lora.max_lora_rank
    wanted: dict[str, ParamSpec] = {}
    names = []
    for name, spec in specs.items():
        projection = name.removesuffix(".weight")
        if projection.rsplit(".", 1)[-1] not in kinds or spec.kind not in _WITH_SLOTS:
            continue
        # The output projection is [vocab, model], all others [in, out].
        is_head = spec.kind is ParamKind.HEAD
        num_in, num_out = spec.shape[::-1] if is_head else spec.shape
        in_axis, out_axis = spec.axes[::-1] if is_head else spec.axes
        names.append(projection)
        for suffix, shape, axes in (
            (A_SUFFIX, (num_in, size), (in_axis, None)),
            (B_SUFFIX, (size, num_out), (None, out_axis)),
        ):
            wanted[projection + suffix] = ParamSpec(shape, ParamKind.LINEAR, axes, "")
    if not names:
        raise InvalidConfigError(f"lora_targets {kinds} are no projections of this model")
    targets = placement.weight_targets(wanted)
    return AdapterSlots(
        lora.max_loras,
        lora.max_lora_rank,
        tuple((name, targets[name + A_SUFFIX], targets[name + B_SUFFIX]) for name in names),
    )


def first_adapters(
    adapters: Mapping[str, WeightSource], slots: AdapterSlots, targets: Mapping[str, TargetSpec]
) -> dict[str, jax.Array]:
    made = empty_slots(slots)
    for slot, source in enumerate(adapters.values()):
        plan, arrays = plan_adapter(source.arrays, source.rules, slots, targets)
        made = plan.build(arrays, made, slot)
    return made
