"""Checks of a config's own fields and of their consistency, before any device is touched.

The sections that are Tunix's are checked by Tunix's classes, when a run is prepared.
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Iterable
from typing import Any

from sgljax_engine import InvalidConfigError
from tunix_sgljax.training.schema import MeshConfig, TrainConfig

FAMILIES = ("qwen2", "qwen3", "llama3")
"""Tunix models that `family` and `model_path` can name."""

CRITIC_FAMILIES = ("qwen2", "qwen3")
"""Families that support a critic: Tunix 0.1.7 cannot ask its Llama 3 for values."""

_CHOICES = {
    "rollout_engine": ("sgljax", "vanilla"),
    "training_mode": ("grpo", "ppo"),
    "actor_model_config.family": FAMILIES,
    "actor_model_config.dtype": ("float32", "bfloat16", "float16"),
    "actor_model_config.remat": ("none", "block", "decoder"),
    "actor_model_config.lora_config.weight_qtype": ("int8", "int4", "nf4"),
}
_AT_LEAST = {
    "seed": 0,
    "batch_size": 1,
    "num_batches": 1,
    "actor_model_config.rng_seed": 0,
    "actor_model_config.lora_config.rank": 1,
}


def check_config(config: TrainConfig) -> None:
    """Refuses values that are out of range, and those that contradict one another.

    Raises:
        InvalidConfigError: names the key, its value and its limit.
    """
    for key, choices in _CHOICES.items():
        value = value_of(config, key)
        if value is not None and value not in choices:
            raise InvalidConfigError(unknown_choice(key, value, choices))
    for key, low in _AT_LEAST.items():
        value = value_of(config, key)
        if value is not None and value < low:
            raise InvalidConfigError(f"{key} must be at least {low}, got {value}")
    _check_model(config)
    _check_lora(config)
    _check_task(config)
    _check_batches(config)
    _check_meshes(config)
    if config.training_mode == "ppo" and config.eval_rollout_config:
        raise InvalidConfigError(
            "eval_rollout_config must be empty with PPO: Tunix's PPOLearner evaluates with the "
            f"sampling of training; got {config.eval_rollout_config}"
        )


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted key; None where a section on the way is null."""
    for name in key.split("."):
        config = None if config is None else getattr(config, name)
    return config


def unknown_choice(key: str, value: str, choices: Iterable[str]) -> str:
    """Says that a value is none of the choices, with the nearest one or all of them."""
    choices = list(choices)
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"
    return f"{key} must not be {value!r}; {hint}"


def meshes_of(config: TrainConfig) -> tuple[MeshConfig, MeshConfig | None]:
    """The trainer's mesh, and the rollout's own."""
    return config.actor_model_config.mesh, config.rollout_model_config.mesh


def _check_model(config: TrainConfig) -> None:
    model, section = config.actor_model_config, "actor_model_config"
    if (model.family is None) != (model.shape is None):
        raise InvalidConfigError(
            f"{section}.family and shape belong together, got {model.family} and {model.shape}"
        )
    if model.model_path is None and (model.family is None) == (model.model_name is None):
        raise InvalidConfigError(
            f"{section} must have one of model_path, model_name, and family with shape; got "
            f"model_name={model.model_name}, family={model.family}"
        )
    if model.model_path is not None and (model.family or model.checkpoint):
        extra = "family" if model.family else "checkpoint"
        raise InvalidConfigError(f"{section}.{extra} must be null with model_path, which has both")
    tokenizer = config.tokenizer_config
    if tokenizer.function and tokenizer.tokenizer_path:
        raise InvalidConfigError(
            "tokenizer_config.tokenizer_path must be null with function, got "
            f"{tokenizer.tokenizer_path}"
        )
    if not (tokenizer.function or tokenizer.tokenizer_path or model.model_path):
        raise InvalidConfigError(
            f"tokenizer_config.tokenizer_path must be given where {section}.model_path is null"
        )


def _check_lora(config: TrainConfig) -> None:
    lora, section = config.actor_model_config.lora_config, "actor_model_config.lora_config"
    if lora is None:
        return
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise InvalidConfigError(f"{section}.alpha must be finite and above 0, got {lora.alpha}")
    try:
        re.compile(lora.module_path)
    except re.error as error:
        raise InvalidConfigError(
            f"{section}.module_path {lora.module_path!r} is no regular expression: {error}"
        ) from None


def _check_task(config: TrainConfig) -> None:
    task = config.task
    if not task.reward_functions:
        raise InvalidConfigError("task.reward_functions must name at least one, got []")
    if task.prompt_template is not None:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(task.prompt_template)]
        except ValueError as error:
            raise InvalidConfigError(
                f"task.prompt_template {task.prompt_template!r} is no template: {error}"
            ) from None
        if not any(names):
            raise InvalidConfigError(
                f"task.prompt_template must name a column in braces, got {task.prompt_template!r}"
            )
    if task.system_prompt is not None and not task.chat:
        raise InvalidConfigError("task.system_prompt needs task.chat=true")


def _check_batches(config: TrainConfig) -> None:
    full, given = config.batch_size, config.rl_training_config
    for name, whole, of in (
        ("mini_batch_size", full, "batch_size"),
        ("train_micro_batch_size", config.mini_batch_size, "mini_batch_size"),
        ("rollout_micro_batch_size", full, "batch_size"),
        ("compute_logps_micro_batch_size", full, "batch_size"),
    ):
        size = given.get(name)
        if size and whole % size:
            raise InvalidConfigError(
                f"rl_training_config.{name} must divide {of} ({whole}), got {size}"
            )
    if given.get("checkpoint_root_directory") and config.algorithm.get("num_iterations", 1) > 1:
        raise InvalidConfigError(
            "rl_training_config.checkpoint_root_directory must be null with num_iterations "
            f"{config.algorithm['num_iterations']}: Tunix 0.1.7 resumes at the wrong place of the "
            "data"
        )


def _check_meshes(config: TrainConfig) -> None:
    trainer, rollout = meshes_of(config)
    for section, mesh in (("actor", trainer), ("rollout", rollout)):
        key = f"{section}_model_config.mesh"
        if mesh is None:
            continue
        if sorted(mesh.axis_names) != ["fsdp", "tp"]:
            raise InvalidConfigError(
                f"{key}.axis_names must be fsdp and tp, by which Tunix's models are sharded, got "
                f"{mesh.axis_names}"
            )
        if len(mesh.shape) != 2 or min(mesh.shape) < 1:
            raise InvalidConfigError(f"{key}.shape must have two sizes >= 1, got {mesh.shape}")
    # Tunix shards the rows that it trains on over "fsdp".
    num_fsdp = dict(zip(trainer.axis_names, trainer.shape, strict=True))["fsdp"]
    rows = config.micro_batch_size * config.num_generations
    if rows % num_fsdp:
        raise InvalidConfigError(
            f"actor_model_config.mesh.shape has {num_fsdp} devices along fsdp, which must divide "
            f"the {rows} rows of a micro batch of the trainer"
        )
