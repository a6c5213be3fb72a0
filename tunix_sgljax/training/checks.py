"""Checks of a config's own fields and of their consistency, before any device is touched.

The sections that are Tunix's are checked by Tunix's classes, when a run is prepared.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from sgljax_engine import InvalidConfigError
from tunix_sgljax.training.schema import MeshConfig, ModelSection, TaskSection, TrainConfig

T = TypeVar("T")

FAMILIES = ("qwen2", "qwen3", "llama3")
"""Tunix models that `family` and `model_path` can name."""

_MODEL, _TRAINING = "actor_model_config", "rl_training_config"
_LIMITS: dict[str, int | tuple[str, ...]] = {
    "rollout_engine": ("sgljax", "vanilla"),
    "training_mode": ("grpo", "ppo"),
    f"{_MODEL}.family": FAMILIES,
    f"{_MODEL}.dtype": ("float32", "bfloat16", "float16"),
    f"{_MODEL}.remat": ("none", "block", "decoder"),
    f"{_MODEL}.lora_config.weight_qtype": ("int8", "int4", "nf4"),
    "seed": 0,
    "batch_size": 1,
    "num_batches": 1,
    "show_sample_every_n_steps": 0,
    f"{_MODEL}.rng_seed": 0,
    f"{_MODEL}.lora_config.rank": 1,
}
"""What a key may be: one of some words, or a number that is not less."""


def check_config(config: TrainConfig) -> None:
    """Refuses values that are out of range, and those that contradict one another."""
    for key, limit in _LIMITS.items():
        value: Any = config
        for name in key.split("."):
            value = None if value is None else getattr(value, name)
        if value is None:
            continue
        if isinstance(limit, int):
            if value < limit:
                raise InvalidConfigError(f"{key} must be at least {limit}, got {value}")
        elif value not in limit:
            raise InvalidConfigError(unknown_choice(key, value, limit))
    for problem in _contradictions(config):
        raise InvalidConfigError(problem)


def unknown_choice(key: str, value: str, choices: Iterable[str]) -> str:
    """Says that a value is none of the choices, with the nearest one or all of them."""
    choices = list(choices)
    hint = hint_at(value, choices) or f"; known: {', '.join(choices)}"
    return f"{key} must not be {value!r}{hint}"


def hint_at(name: str, known: Iterable[str]) -> str:
    """A question for the nearest known name; "" where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def make_checked(kind: Callable[..., T], section: str, values: Mapping[str, Any]) -> T:
    """An object of one of Tunix's classes, or what it says against the values."""
    fields = getattr(kind, "__dataclass_fields__", None)
    names: Collection[str] = inspect.signature(kind).parameters if fields is None else fields
    refuse_unknown(section, values, names)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise InvalidConfigError(f"{section}: {error}") from None


def refuse_unknown(section: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses keys of a section that are not known, with the nearest one."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {section}.{near[0]}?" if near else ""
            raise InvalidConfigError(f"unknown key {section}.{name}{hint}")


def _contradictions(config: TrainConfig) -> Iterator[str]:
    yield from _of_model(config.actor_model_config)
    tokenizer = config.tokenizer_config
    path = tokenizer.tokenizer_path
    if tokenizer.function and path:
        yield f"tokenizer_config.tokenizer_path must be null with function, got {path}"
    if not (tokenizer.function or path or config.actor_model_config.model_path):
        yield f"tokenizer_config.tokenizer_path must be given where {_MODEL}.model_path is null"
    yield from _of_task(config.task)
    yield from _of_batches(config)
    for section in ("actor_model_config", "rollout_model_config"):
        yield from _of_mesh(f"{section}.mesh", getattr(config, section).mesh)
    # Tunix shards the rows that it trains on over "fsdp".
    trainer = config.actor_model_config.mesh
    num_fsdp = dict(zip(trainer.axis_names, trainer.shape, strict=True))["fsdp"]
    rows = config.micro_batch_size * config.num_generations
    if rows % num_fsdp:
        yield (
            f"{_MODEL}.mesh.shape has {num_fsdp} devices along fsdp, which must divide the {rows} "
            "rows of a micro batch of the trainer"
        )
    for key, needed in (("training_mode", "grpo"), ("rollout_engine", "sgljax")):
        given = getattr(config, key)
        if config.over_sampling is not None and given != needed:
            yield f"over_sampling must be null unless {key} is {needed!r}, got {given!r}"
    if config.training_mode == "ppo" and config.eval_rollout_config:
        yield (
            "eval_rollout_config must be empty with PPO: Tunix's PPOLearner evaluates with the "
            f"sampling of training; got {config.eval_rollout_config}"
        )


def _of_model(model: ModelSection) -> Iterator[str]:
    if (model.family is None) == bool(model.shape):
        yield (f"{_MODEL}.family and shape belong together, got {model.family} and {model.shape}")
    if model.model_path is None and (model.family is None) == (model.model_name is None):
        yield (
            f"{_MODEL} must have one of model_path, model_name, and family with shape; got "
            f"model_name={model.model_name}, family={model.family}"
        )
    if model.model_path is not None and (model.family or model.checkpoint):
        extra = "family" if model.family else "checkpoint"
        yield f"{_MODEL}.{extra} must be null with model_path, which has both"
    lora, key = model.lora_config, f"{_MODEL}.lora_config"
    if lora is None:
        return
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        yield f"{key}.alpha must be finite and above 0, got {lora.alpha}"
    try:
        re.compile(lora.module_path)
    except re.error as error:
        yield f"{key}.module_path {lora.module_path!r} is no regular expression: {error}"


def _of_task(task: TaskSection) -> Iterator[str]:
    if not task.reward_functions:
        yield "task.reward_functions must name at least one, got []"
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(task.prompt_template)]
        if not any(names):
            yield f"task.prompt_template must name a column in braces, got {task.prompt_template!r}"
    except ValueError as error:
        yield f"task.prompt_template {task.prompt_template!r} is no template: {error}"
    if task.system_prompt is not None and not task.chat:
        yield "task.system_prompt needs task.chat=true"


def _of_batches(config: TrainConfig) -> Iterator[str]:
    full, given = config.batch_size, config.rl_training_config
    for name, whole, of in (
        ("mini_batch_size", full, "batch_size"),
        ("train_micro_batch_size", config.mini_batch_size, "mini_batch_size"),
        ("rollout_micro_batch_size", full, "batch_size"),
        ("compute_logps_micro_batch_size", full, "batch_size"),
    ):
        size = given.get(name)
        if size and whole % size:
            yield f"{_TRAINING}.{name} must divide {of} ({whole}), got {size}"


def _of_mesh(key: str, mesh: MeshConfig | None) -> Iterator[str]:
    if mesh is None:
        return
    if sorted(mesh.axis_names) != ["fsdp", "tp"]:
        yield (
            f"{key}.axis_names must be fsdp and tp, by which Tunix's models are sharded, got "
            f"{mesh.axis_names}"
        )
    if len(mesh.shape) != 2 or min(mesh.shape) < 1:
        yield f"{key}.shape must have two sizes >= 1, got {mesh.shape}"
