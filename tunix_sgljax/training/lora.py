"""The section `lora_config`: qwix's low-rank pairs beside a frozen base, and their checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import qwix
from flax import nnx

from sgljax_engine import InvalidConfigError
from tunix_sgljax.checkpoints.lora_settings import LoraSettings, read_settings, write_settings
from tunix_sgljax.checkpoints.tunix import find_latest, stored_shapes
from tunix_sgljax.lora import is_lora_name
from tunix_sgljax.training.models import ModelSpec, check_shapes
from tunix_sgljax.training.schema import TrainConfig

_EMBEDDER = "embedder"


class AbstractActor(NamedTuple):
    """The trained pairs and the frozen base of a LoRA actor, as states of shapes and dtypes."""

    pairs: nnx.State
    base: nnx.State


def apply_lora(model: nnx.Module, section: LoraSettings, seed: int) -> nnx.Module:
    """Adds pairs that change nothing yet: A is random, and B is 0.

    The model stays unchanged; the result shares its arrays, except quantised weights.
    """
    given: Any = model
    provider = qwix.LoraProvider(**dataclasses.asdict(section))
    inputs, before = given.get_model_input(), given.config.remat_config
    # qwix must see all weights, which newer models hide in rematerialised layers. Some configs are
    # frozen.
    object.__setattr__(given.config, "remat_config", type(before).NONE)
    try:
        actor: Any = qwix.apply_lora_to_model(given, provider, **inputs, rngs=nnx.Rngs(seed))
    finally:
        object.__setattr__(given.config, "remat_config", before)
    return actor


def abstract_actor(spec: ModelSpec, section: LoraSettings) -> AbstractActor:
    """A LoRA actor without weights."""
    try:
        made = _abstract(spec, section)
    except TypeError as error:  # of Tunix's layers, for a weight that is no array
        if section.weight_qtype is None:
            raise
        raise InvalidConfigError(
            f"lora_config.weight_qtype {section.weight_qtype!r} with module_path "
            f"{section.module_path!r}: Tunix's {spec.family} cannot compute with all of these "
            f"weights quantised ({error}); try '.*mlp.*', or null"
        ) from None
    pairs = nnx.state(made, nnx.LoRAParam)
    paths = _module_paths(pairs)
    if _EMBEDDER in paths:
        raise InvalidConfigError(
            f"lora_config.module_path {section.module_path!r} fits the embedding, beside which "
            "Tunix cannot train a pair; '.*(attn|mlp).*' leaves it out"
        )
    if not paths:
        everything = LoraSettings(rank=1, alpha=1.0, module_path=".*")
        paths = _module_paths(nnx.state(_abstract(spec, everything), nnx.LoRAParam))
        raise InvalidConfigError(
            f"lora_config.module_path {section.module_path!r} fits no projection of the model; it "
            f"must match the whole of a path: {', '.join(p for p in paths if p != _EMBEDDER)}"
        )
    return AbstractActor(pairs, nnx.state(made, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))


def _abstract(spec: ModelSpec, section: LoraSettings) -> nnx.Module:
    def make() -> nnx.Module:
        actor: Any = apply_lora(spec.model_class(spec.config, rngs=nnx.Rngs(0)), section, 0)
        if section.weight_qtype is not None:
            # qwix needs a second call to find abstract quantised kernels; it is the first in which
            # Tunix's layers see quantised weights.
            actor.set_attributes(qwix_rngs=nnx.Rngs(0))
            actor(**actor.get_model_input())
        return actor

    return nnx.eval_shape(make)


def _module_paths(pairs: nnx.State) -> list[str]:
    """Modules with a pair, in qwix's spelling, with all layers merged into one."""
    names = (
        "/".join("<layer>" if isinstance(part, int) else str(part) for part in key[:-1])
        for key, _ in nnx.to_flat_state(pairs)
    )
    return list(dict.fromkeys(names))


def checkpoint_root(config: TrainConfig) -> Path | None:
    given = config.rl_training_config.get("checkpoint_root_directory")
    return None if given is None else Path(given).expanduser().absolute()


def check_resume(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuses a checkpoint whose LoRA pairs differ from the config's. Reads no weights."""
    root = checkpoint_root(config)
    folder = None if root is None else find_latest(root)
    if root is None or folder is None:
        return
    stored, lora = stored_shapes(folder), config.actor_model_config.lora_config
    where = f"rl_training_config.checkpoint_root_directory {root}"
    has_pairs = any(map(is_lora_name, stored))
    if has_pairs != (lora is not None):
        raise InvalidConfigError(
            f"{where} holds {'LoRA pairs' if has_pairs else 'whole models'}, but lora_config "
            f"is {'null' if has_pairs else 'given'}; name another folder"
        )
    if lora is None:
        return
    theirs = read_settings(root)
    if theirs is not None and theirs != lora:
        raise InvalidConfigError(f"{where} was trained with {theirs}, but lora_config is {lora}")
    check_shapes(where, stored, abstract_actor(spec, lora).pairs)


def keep_lora_settings(config: TrainConfig) -> None:
    """Writes the LoRA settings, which checkpoints lack, beside them."""
    root, lora = checkpoint_root(config), config.actor_model_config.lora_config
    if root is not None and lora is not None:
        write_settings(root, lora)
