"""The section `sgljax_config` of a YAML file: keywords of `SglJaxRollout`, and engine options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from sgljax_engine import EngineConfig, InvalidConfigError
from tunix_sgljax import sampling
from tunix_sgljax.lora import check_lora_mode, check_scaling
from tunix_sgljax.rollout.worker import SglJaxRollout

SECTION = "sgljax_config"
"""Keywords of `SglJaxRollout`, engine options among them."""

_OBJECTS = {
    "rollout_actor",
    "tokenizer",
    "mesh",
    "rollout_config",
    "model_config",
    "progress",
}
"""Keywords of `SglJaxRollout` that the pipeline passes, or that YAML cannot hold."""


def rollout_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `SglJaxRollout` that the section holds, checked before a model is loaded."""
    known = _keywords()
    ours = {name: value for name, value in section.items() if name in known}
    for name in section:
        if name not in known and name not in EngineConfig.option_names():
            near = difflib.get_close_matches(str(name), known, n=1)
            if near or name in _OBJECTS:
                hint = f"did you mean {near[0]!r}?" if near else "the pipeline decides it"
                raise InvalidConfigError(f"{SECTION} takes no {name!r}; {hint}")
    try:
        engine_config_of(section)
        sampling.check_extra_params(ours.get("sampling_params") or {})
        mode = sampling.check_logprobs_mode(ours.get("logprobs_mode", "trainer_logprobs"))
        sampling.check_match_batch_size(ours.get("match_batch_size"), mode)
        sampling.check_weight_update_mode(ours.get("weight_update_mode", "retract"))
        check_lora_mode(ours.get("lora", "auto"))
        check_scaling("lora_scaling", ours.get("lora_scaling"))
        for name in ("release_kv_between_steps", "strict_config"):
            sampling.check_flag(name, ours.get(name, False))
    except ValueError as error:
        raise InvalidConfigError(f"{SECTION}: {error}") from None
    return dict(section)


def engine_config_of(section: Mapping[str, Any]) -> EngineConfig:
    """The engine options of the section."""
    return EngineConfig.from_options(engine_options_of(section))


def engine_options_of(section: Mapping[str, Any]) -> dict[str, Any]:
    known = _keywords()
    return {name: value for name, value in section.items() if name not in known}


def _keywords() -> set[str]:
    parameters = inspect.signature(SglJaxRollout).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - _OBJECTS
