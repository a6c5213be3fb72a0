"""Checks that a run can resume from a checkpoint, and keeps LoRA settings beside its own."""

from __future__ import annotations

from pathlib import Path

from flax import nnx

from sgljax_engine import InvalidConfigError
from tunix_sgljax.checkpoints.lora_settings import LoraSettings, read_settings, write_settings
from tunix_sgljax.checkpoints.tunix import find_latest, stored_shapes
from tunix_sgljax.lora import is_lora_name
from tunix_sgljax.training.lora import abstract_actor
from tunix_sgljax.training.models import ModelSpec
from tunix_sgljax.training.schema import TrainConfig


def check_resume(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuses a checkpoint whose LoRA pairs differ from the config's. Reads no weights.

    Raises:
        InvalidConfigError: names what differs.
    """
    root = checkpoint_root(config)
    folder = None if root is None else find_latest(root)
    if root is None or folder is None:
        return
    stored = stored_shapes(folder)
    where = f"rl_training_config.checkpoint_root_directory {root}"
    lora = config.actor_model_config.lora_config
    has_pairs = any(map(is_lora_name, stored))
    if has_pairs != (lora is not None):
        raise InvalidConfigError(
            f"{where} holds {'LoRA pairs' if has_pairs else 'whole models'}, but lora_config "
            f"is {'null' if has_pairs else 'given'}; name another folder"
        )
    if lora is None:
        return
    ours, theirs = lora_settings(config), read_settings(root)
    if theirs is not None and theirs != ours:
        raise InvalidConfigError(f"{where} was trained with {theirs}, but lora_config is {ours}")
    pairs = nnx.to_flat_state(abstract_actor(spec, lora).pairs)
    wanted = {".".join(map(str, key)): tuple(pair.shape) for key, pair in pairs}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise InvalidConfigError(
                f"{where} does not fit lora_config: {name} has shape {stored.get(name)} there and "
                f"{wanted.get(name)} in the model"
            )


def keep_lora_settings(config: TrainConfig) -> None:
    """Writes the LoRA settings, which checkpoints lack, beside them."""
    root = checkpoint_root(config)
    if root is not None and config.actor_model_config.lora_config is not None:
        write_settings(root, lora_settings(config))


def checkpoint_root(config: TrainConfig) -> Path | None:
    """Absolute path of Tunix's checkpoints."""
    given = config.rl_training_config.get("checkpoint_root_directory")
    return None if given is None else Path(given).expanduser().absolute()


def lora_settings(config: TrainConfig) -> LoraSettings:
    """The LoRA settings of a config with a `lora_config`."""
    lora = config.actor_model_config.lora_config
    assert lora is not None
    return LoraSettings(lora.rank, lora.alpha, lora.module_path, lora.weight_qtype)
