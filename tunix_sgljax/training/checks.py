"""Checks of a config's fields and of their consistency, before any device is touched."""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Collection, Iterable
from typing import Any

from sgljax_engine import EngineConfig, InvalidConfigError, SamplingParams
from tunix_sgljax.training.schema import OptimizerSection, TrainConfig

FAMILIES = ("qwen2", "qwen3", "llama3")
"""Tunix models that `model.family` and `model.path` can name."""

CRITIC_FAMILIES = ("qwen2", "qwen3")
"""Families that support a critic: Tunix 0.1.7 cannot ask its Llama 3 for values."""

_CHOICES = {
    "rollout_engine": ("sgljax", "vanilla"),
    "algorithm.name": ("grpo", "ppo"),
    "algorithm.grpo.kl_loss_mode": ("kl", "low_var_kl", "mse_kl"),
    "algorithm.grpo.loss_algo": ("grpo", "gspo-token"),
    "algorithm.ppo.kl_method": ("kl", "low_var_kl", "mse_kl"),
    "model.family": FAMILIES,
    "model.dtype": ("float32", "bfloat16", "float16"),
    "model.remat": ("none", "block", "decoder"),
    "lora.weight_qtype": ("int8", "int4", "nf4"),
    "training.optimizer.opt_type": ("adam", "adamw", "sgd"),
    "training.optimizer.schedule_type": ("constant", "linear", "warmup_cosine_decay"),
    "training.critic_optimizer.opt_type": ("adam", "adamw", "sgd"),
    "training.critic_optimizer.schedule_type": ("constant", "linear", "warmup_cosine_decay"),
    "engine.logprobs_mode": (
        "trainer_logprobs",
        "trainer_match",
        "processed_logprobs",
        "raw_logprobs",
    ),
    "engine.weight_update_mode": ("retract", "in_place", "wait", "abort"),
}
_AT_LEAST = {
    "seed": 0,
    "training.steps": 1,
    "training.batch_size": 1,
    "training.mini_batch_size": 1,
    "training.train_micro_batch_size": 1,
    "training.rollout_micro_batch_size": 1,
    "training.compute_logps_micro_batch_size": 1,
    "training.eval_every_n_steps": 1,
    "training.save_interval_steps": 1,
    "training.max_to_keep": 1,
    "rollout.max_prompt_length": 1,
    "rollout.max_tokens_to_generate": 1,
    "rollout.temperature": 0,
    "rollout.eval.temperature": 0,
    "engine.match_batch_size": 1,
    "algorithm.grpo.num_generations": 2,
    "algorithm.grpo.num_iterations": 1,
    "algorithm.grpo.beta": 0,
    "algorithm.ppo.num_iterations": 1,
    "algorithm.ppo.beta": 0,
    "model.init_seed": 0,
    "lora.rank": 1,
}


def check_config(config: TrainConfig, changed: Collection[str]) -> None:
    """Refuses values that are out of range, and those that contradict one another.

    Args:
        config: The whole config.
        changed: Dotted keys that are not at their defaults; keys that nothing reads are refused.

    Raises:
        InvalidConfigError: names the key, its value and its limit.
    """
    for key, choices in _CHOICES.items():
        _check_choice(key, value_of(config, key), choices)
    for key, low in _AT_LEAST.items():
        value = value_of(config, key)
        if value is not None and not (math.isfinite(value) and value >= low):
            raise InvalidConfigError(f"{key} must be at least {low}, got {value}")
    _check_unread(config, changed)
    _check_model(config)
    _check_lora(config)
    _check_task(config)
    _check_batches(config)
    _check_sampling(config)
    _check_engine(config)
    _check_mesh(config)
    for name in ("optimizer", "critic_optimizer"):
        section = getattr(config.training, name)
        if section is not None:
            _check_optimizer(f"training.{name}", section, num_updates(config))


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


def check_num_devices(config: TrainConfig, available: int) -> None:
    """Refuses a mesh that needs more devices than there are."""
    shape, rollout = config.mesh.shape, config.mesh.rollout_shape
    needed = math.prod(shape) + (math.prod(rollout) if rollout else 0)
    if needed > available:
        shapes = f"{shape}" if rollout is None else f"{shape} and mesh.rollout_shape {rollout}"
        raise InvalidConfigError(
            f"mesh.shape {shapes} take {needed} devices, but there are {available}"
        )


def updates_per_step(config: TrainConfig) -> int:
    """Number of weight updates with the completions of a step."""
    training, algorithm = config.training, config.algorithm
    section = algorithm.grpo if algorithm.name == "grpo" else algorithm.ppo
    num_mini = training.batch_size // (training.mini_batch_size or training.batch_size)
    return num_mini * section.num_iterations


def has_reference_model(config: TrainConfig) -> bool:
    """Whether a run holds a reference model: not without a penalty, or if the base is it."""
    algorithm = config.algorithm
    section = algorithm.grpo if algorithm.name == "grpo" else algorithm.ppo
    lora = config.lora
    is_adapter = lora is not None and lora.mode == "adapter" and config.rollout_engine == "sgljax"
    return section.beta > 0 and not is_adapter


def num_updates(config: TrainConfig) -> int:
    """Number of weight updates in the whole run, as Tunix counts them."""
    return config.training.steps * updates_per_step(config)


def _check_choice(key: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidConfigError(unknown_choice(key, value, choices))


def _check_unread(config: TrainConfig, changed: Collection[str]) -> None:
    is_ppo = config.algorithm.name == "ppo"
    unread = {
        "algorithm.grpo." if is_ppo else "algorithm.ppo.": f"algorithm.name is "
        f"{config.algorithm.name}"
    }
    if not is_ppo:
        unread["training.critic_optimizer."] = "GRPO has no critic"
    if config.rollout_engine == "vanilla":
        unread["engine.match_batch_size"] = "rollout_engine is vanilla"
    else:
        unread["rollout.kv_cache_size"] = "the sgljax engine takes engine.options.max_model_len"
    if is_ppo and config.rollout.eval is not None:
        raise InvalidConfigError(
            "rollout.eval must be null with PPO: Tunix's PPOLearner evaluates with the sampling of "
            f"training; got {config.rollout.eval}"
        )
    for prefix, reason in unread.items():
        for key in changed:
            value = value_of(config, key)
            if key.startswith(prefix) and value is not None:
                raise InvalidConfigError(f"{key}={value} is read by nothing: {reason}")


def _check_model(config: TrainConfig) -> None:
    model = config.model
    if (model.family is None) != (model.shape is None):
        raise InvalidConfigError(
            f"model.family and model.shape belong together, got {model.family} and {model.shape}"
        )
    if model.path is None and (model.family is None) == (model.name is None):
        raise InvalidConfigError(
            "model must have one of path, name, and family with shape; got "
            f"name={model.name}, family={model.family}"
        )
    if model.path is not None and (model.family or model.checkpoint):
        extra = "model.family" if model.family else "model.checkpoint"
        raise InvalidConfigError(f"{extra} must be null with model.path, which holds both")
    tokenizer = config.tokenizer
    if tokenizer.function and tokenizer.path:
        raise InvalidConfigError(
            f"tokenizer.path must be null with tokenizer.function, got {tokenizer.path}"
        )
    if not (tokenizer.function or tokenizer.path or model.path):
        raise InvalidConfigError("tokenizer.path must be given where model.path is null")


def _check_lora(config: TrainConfig) -> None:
    lora = config.lora
    if lora is None:
        return
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise InvalidConfigError(f"lora.alpha must be finite and above 0, got {lora.alpha}")
    try:
        re.compile(lora.module_path)
    except re.error as error:
        raise InvalidConfigError(
            f"lora.module_path {lora.module_path!r} is no regular expression: {error}"
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
    every = config.training.eval_every_n_steps
    if (every is None) != (task.eval_dataset is None):
        raise InvalidConfigError(
            "training.eval_every_n_steps and task.eval_dataset belong together, got "
            f"{every} and {task.eval_dataset}"
        )


def _check_batches(config: TrainConfig) -> None:
    training = config.training
    full = training.batch_size
    mini = training.mini_batch_size or full
    micro = training.train_micro_batch_size or mini
    for name, size, of, whole in (
        ("mini_batch_size", mini, "batch_size", full),
        ("train_micro_batch_size", micro, "mini_batch_size", mini),
        ("rollout_micro_batch_size", training.rollout_micro_batch_size or full, "batch_size", full),
        (
            "compute_logps_micro_batch_size",
            training.compute_logps_micro_batch_size or micro,
            "batch_size",
            full,
        ),
    ):
        if whole % size:
            raise InvalidConfigError(
                f"training.{name} must divide training.{of} ({whole}), got {size}"
            )
    algorithm = config.algorithm
    section = algorithm.grpo if algorithm.name == "grpo" else algorithm.ppo
    if training.checkpoint_root_directory is not None and section.num_iterations > 1:
        raise InvalidConfigError(
            "training.checkpoint_root_directory must be null with num_iterations "
            f"{section.num_iterations}: Tunix 0.1.7 resumes at the wrong place of the data"
        )


def _check_sampling(config: TrainConfig) -> None:
    rollout = config.rollout
    fixed = {
        "top_p": 1.0 if rollout.top_p is None else rollout.top_p,
        "top_k": -1 if rollout.top_k in (None, 0) else rollout.top_k,
    }
    _check_params("rollout", {"temperature": rollout.temperature, **fixed})
    if rollout.temperature == 0:
        raise InvalidConfigError(
            "rollout.temperature must be above 0: greedy completions have no advantages; set "
            "rollout.eval.temperature for evaluation"
        )
    needed = rollout.max_prompt_length + rollout.max_tokens_to_generate
    if rollout.kv_cache_size is not None and rollout.kv_cache_size < needed:
        raise InvalidConfigError(
            "rollout.kv_cache_size must hold max_prompt_length + max_tokens_to_generate "
            f"({needed}), got {rollout.kv_cache_size}"
        )
    extra = config.engine.sampling_params
    if extra and config.rollout_engine == "sgljax":
        _check_params(
            "engine.sampling_params",
            {"max_new_tokens": rollout.max_tokens_to_generate, **extra},
        )


def _check_params(section: str, params: dict[str, Any]) -> None:
    try:
        SamplingParams.from_dict(params)
    except ValueError as error:
        raise InvalidConfigError(f"{section}: {error}") from None


def _check_engine(config: TrainConfig) -> None:
    if config.rollout_engine == "vanilla":
        return  # so that a single override can switch the engine of a config
    try:
        options = EngineConfig.from_options(engine_options(config))
    except InvalidConfigError as error:
        raise InvalidConfigError(f"engine.options: {error}") from None
    rollout = config.rollout
    needed = rollout.max_prompt_length + rollout.max_tokens_to_generate
    if options.max_model_len is not None and options.max_model_len < needed:
        raise InvalidConfigError(
            "engine.options.max_model_len must hold rollout.max_prompt_length + "
            f"max_tokens_to_generate ({needed}), got {options.max_model_len}"
        )


def engine_options(config: TrainConfig) -> dict[str, Any]:
    """The engine's options, with buckets in its form and the run's seed as the default."""
    options: dict[str, Any] = {"random_seed": config.seed} | config.engine.options
    for name in ("batch_buckets", "token_buckets"):
        buckets = options.get(name)
        if isinstance(buckets, list):
            options[name] = tuple(buckets)
    return options


def _check_mesh(config: TrainConfig) -> None:
    mesh = config.mesh
    for key, shape in (("mesh.shape", mesh.shape), ("mesh.rollout_shape", mesh.rollout_shape)):
        if shape is None:
            continue
        if len(shape) != len(mesh.axis_names):
            raise InvalidConfigError(
                f"{key} must have a size for each of mesh.axis_names {mesh.axis_names}, got {shape}"
            )
        if any(size < 1 for size in shape):
            raise InvalidConfigError(f"{key} must have sizes of at least 1, got {shape}")
    if sorted(mesh.axis_names) != ["fsdp", "tp"]:
        raise InvalidConfigError(
            "mesh.axis_names must be fsdp and tp, by which Tunix's models are sharded, got "
            f"{mesh.axis_names}"
        )
    # Tunix shards the rows that it trains on over "fsdp".
    num_fsdp = dict(zip(mesh.axis_names, mesh.shape, strict=True))["fsdp"]
    training, algorithm = config.training, config.algorithm
    rows = training.train_micro_batch_size or training.mini_batch_size or training.batch_size
    rows *= algorithm.grpo.num_generations if algorithm.name == "grpo" else 1
    if rows % num_fsdp:
        raise InvalidConfigError(
            f"mesh.shape has {num_fsdp} devices along fsdp, which must divide the {rows} rows of a "
            "micro batch of the trainer"
        )


def _check_optimizer(prefix: str, section: OptimizerSection, total: int) -> None:
    for name in ("learning_rate", "init_value", "end_value", "weight_decay"):
        value = getattr(section, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidConfigError(f"{prefix}.{name} must be at least 0, got {value}")
    if section.max_grad_norm is not None and not section.max_grad_norm > 0:
        raise InvalidConfigError(
            f"{prefix}.max_grad_norm must be null or above 0, got {section.max_grad_norm}"
        )
    if section.weight_decay and section.opt_type != "adamw":
        raise InvalidConfigError(
            f"{prefix}.weight_decay {section.weight_decay} needs opt_type adamw, got "
            f"{section.opt_type}"
        )
    if section.schedule_type == "constant" and (section.warmup_steps or section.decay_steps):
        raise InvalidConfigError(
            f"{prefix}.schedule_type is constant, which takes no warmup_steps and decay_steps, "
            f"got {section.warmup_steps} and {section.decay_steps}"
        )
    decay = section.decay_steps or total
    if section.schedule_type != "constant" and decay <= section.warmup_steps:
        raise InvalidConfigError(
            f"{prefix}.warmup_steps must be below decay_steps ({decay}), got {section.warmup_steps}"
        )
