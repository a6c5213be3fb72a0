"""LoRA in MaxText's RL trainer, which has none: its actor gets pairs before the cluster is made.

The keys are those of MaxText's supervised trainer, `lora.lora_rank` and so on, and its own function
makes the pairs. `train_rl` itself refuses such keys.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.core.spmd import logical_axis_rules
from omegaconf import OmegaConf

from sgljax_engine import InvalidConfigError

_SECTION = "lora."
_REFUSED = ("lora_restore_path", "lora_tile_size", "lora_weight_qtype")
"""Fields of the section that were not tried here."""


def split_lora(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Other words, and the fields of the section `lora`; None without `lora.enable_lora=True`."""
    ours = [word for word in overrides if word.startswith(_SECTION)]
    others = [word for word in overrides if not word.startswith(_SECTION)]
    dotlist = [word.removeprefix(_SECTION) for word in ours]
    fields: Any = OmegaConf.to_container(OmegaConf.from_dotlist(dotlist))
    for name in _REFUSED:
        if fields.get(name):
            raise InvalidConfigError(f"lora.{name} is not supported in RL, got {fields[name]!r}")
    if fields.get("enable_lora"):
        return others, fields
    if fields:
        raise InvalidConfigError(f"{ours[0]} has no effect without lora.enable_lora=True")
    return others, None


def with_pairs(create_models: Callable[..., Any], fields: dict[str, Any]) -> Callable[..., Any]:
    """MaxText's `create_models_and_meshes`, whose actor has LoRA pairs."""
    try:
        section = importlib.import_module("maxtext.configs.types").LoRA(**fields)
    except ValueError as error:
        raise InvalidConfigError(f"lora: {error}") from error
    if not section.lora_rank:
        raise InvalidConfigError("lora.lora_rank must be at least 1, got 0")

    def create(trainer_config: Any, *args: Any, **kwargs: Any) -> Any:
        reference, reference_mesh, actor, mesh, rollout_mesh = create_models(
            trainer_config, *args, **kwargs
        )
        # What MaxText's function reads of a config of its supervised trainer.
        config = types.SimpleNamespace(
            lora=section, lora_input_adapters_path="", model_name=trainer_config.model_name
        )
        utils = importlib.import_module("maxtext.utils.lora_utils")
        with jax.set_mesh(mesh), logical_axis_rules(trainer_config.logical_axis_rules):
            actor.base = utils.apply_lora_to_model(actor.base, mesh, config)
        return reference, reference_mesh, actor, mesh, rollout_mesh

    return create
