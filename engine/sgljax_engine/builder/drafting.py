"""The parts of an engine that verify drafts."""

from __future__ import annotations

from collections.abc import Mapping

from sgljax_engine.builder.parts import EngineParts
from sgljax_engine.config import SpeculationConfig
from sgljax_engine.scheduler.speculator import Speculator
from sgljax_engine.speculation.costs import CostTable
from sgljax_engine.speculation.drafters import Drafter, HistoryDrafter, SiblingDrafter


def make_drafters(config: SpeculationConfig) -> dict[str, Drafter]:
    """Drafters that keep references, shared by all engines of a group."""
    drafters: dict[str, Drafter] = {}
    if config.speculation != "off":
        if "history" in config.speculative_drafters:
            drafters["history"] = HistoryDrafter(config.speculative_history_bytes)
        if "siblings" in config.speculative_drafters:
            drafters["siblings"] = SiblingDrafter()
    return drafters


def make_speculator(
    config: SpeculationConfig, drafters: Mapping[str, Drafter], parts: EngineParts
) -> Speculator | None:
    """The speculator of one engine; None without speculation or a batch small enough for it."""
    static = parts.static
    sizes = static.sizes_with_drafts(parts.shapes.batch_buckets)
    if not sizes:
        return None
    return Speculator(
        config,
        drafters,
        CostTable(measures=config.speculation == "auto"),
        sizes=sizes,
        num_drafts=static.num_drafts,
    )
