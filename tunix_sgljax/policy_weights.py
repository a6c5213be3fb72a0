"""Passes the trainer's parameters to the engine, with LoRA pairs merged or beside the base."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

from sgljax_engine import (
    Engine,
    InvalidConfigError,
    LoraConfig,
    WeightRule,
    WeightSyncError,
    flatten_named,
    localize,
)
from tunix_sgljax.exactness.lora_effect import LoraEffect, lora_effect
from tunix_sgljax.lora import LoraActor, LoraMode, LoraReport, is_lora_name
from tunix_sgljax.mappings import WeightMapper
from tunix_sgljax.sampling import WeightUpdateMode

POLICY = "policy"
"""Name of the policy's adapter, with lora="adapter"."""


class FirstWeights(NamedTuple):
    """First weights of an engine; see the arguments of `Engine`."""

    weights: dict[str, Any]
    weight_rules: tuple[WeightRule, ...]
    adapters: dict[str, tuple[Any, tuple[WeightRule, ...]]]


class PolicyWeights:
    """Maps parameters and passes them to the engine. Calls come one at a time."""

    def __init__(self, mapper: WeightMapper, lora: LoraActor | None, mode: LoraMode) -> None:
        self._mapper = mapper
        self._lora = lora
        self._mode: LoraMode = mode
        self._adapter_rules: tuple[WeightRule, ...] = ()
        self.adapter = POLICY if lora is not None and mode == "adapter" else None

    @property
    def has_lora(self) -> bool:
        return self._lora is not None

    def lora_report(self) -> LoraReport | None:
        return None if self._lora is None else self._lora.report(self._mode)

    def lora_effect(self, params: Any, dtype: str) -> LoraEffect | None:
        if self._lora is None or not any(map(is_lora_name, flatten_named(params))):
            return None
        return lora_effect(*self.source(params), self._mode, dtype)

    def adapter_config(
        self, asked: LoraConfig, explicit: Collection[str], max_rank: int | None
    ) -> LoraConfig:
        """Adapter slots for the policy, and for others that the configuration asks for."""
        if self._lora is None or self.adapter is None:
            return asked
        rank = self._lora.max_rank
        if "max_lora_rank" not in explicit:
            asked = dataclasses.replace(asked, max_lora_rank=max(rank, max_rank or 0))
        if asked.max_lora_rank < rank:
            raise InvalidConfigError(
                f"max_lora_rank must be at least the actor's rank {rank}, got {asked.max_lora_rank}"
            )
        if asked.lora_targets is None:
            asked = dataclasses.replace(asked, lora_targets=self._mapper.lora_targets())
        return dataclasses.replace(asked, max_loras=max(asked.max_loras, 1))

    def source(self, params: Any) -> tuple[dict[str, Any], tuple[WeightRule, ...]]:
        """Parameters by name and the rules that map them, as for `Engine.update_weights`.

        A collective for parameters that span processes; see `localize`.
        """
        named = localize(self._mapper.named_source(params))
        return named, self._mapper.rules_for(named)

    def first(self, params: Any) -> FirstWeights:
        named, rules = self.source(params)
        self._accept()
        if self.adapter is None:
            return FirstWeights(named, rules, {})
        self._adapter_rules = rules
        base, base_rules = self._base_of(named)
        return FirstWeights(base, base_rules, {self.adapter: (_pairs_of(named), rules)})

    def update(self, engine: Engine, params: Any, mode: WeightUpdateMode) -> int:
        if self.adapter is None:
            version = engine.update_weights(*self.source(params), mode=mode)
        else:
            named = localize(self._mapper.named_source(params, with_base=False))
            if self._lora is not None and self._lora.brings_base:
                raise WeightSyncError(
                    "lora='adapter' keeps the actor's frozen base, but parameters with another "
                    "base came; lora='merged' takes them"
                )
            pairs = _pairs_of(named)
            version = engine.load_adapter(self.adapter, pairs, self._adapter_rules, mode=mode)
        self._accept()
        return version

    def accept(self, params: Any) -> None:
        """Records that these parameters serve, after another caller passed them to the engine."""
        self._mapper.named_source(params)
        self._accept()

    def _accept(self) -> None:
        if self._lora is not None:
            self._lora.accept()

    def _base_of(self, named: dict[str, Any]) -> tuple[dict[str, Any], tuple[WeightRule, ...]]:
        base = {name: x for name, x in named.items() if not is_lora_name(name)}
        return base, self._mapper.rules_for(base, with_lora=False)

    def differing(self, engine: Engine, params: Any) -> list[str]:
        """Names of engine weights, or projections with adapters, that differ from mapped ones."""
        named, rules = self.source(params)
        if self.adapter is None:
            return engine.find_differing_weights(named, rules)
        found = engine.find_differing_weights(*self._base_of(named))
        return found + engine.find_differing_adapter(self.adapter, _pairs_of(named), rules)


def _pairs_of(named: dict[str, Any]) -> dict[str, Any]:
    """The leaves of LoRA pairs, which alone are an adapter; the engine has the base."""
    return {name: x for name, x in named.items() if is_lora_name(name)}
