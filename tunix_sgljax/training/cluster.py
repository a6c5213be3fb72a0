"""Builds Tunix's cluster and learner from a config."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import optax
import orbax.checkpoint as ocp
from tunix.perf.metrics import PerfMetricsConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.profiler import ProfilerOptions

from sgljax_engine import InvalidConfigError, load_model_config
from tunix_sgljax.factory import RLCluster
from tunix_sgljax.long_tail import OverSampling, OverSamplingGrpoLearner
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.rollout import SglJaxRollout
from tunix_sgljax.rollout.options import rollout_options
from tunix_sgljax.rollout_config.hints import rollout_field_hint
from tunix_sgljax.training.checks import hint_at, make_checked, refuse_unknown
from tunix_sgljax.training.lora import apply_lora, checkpoint_root
from tunix_sgljax.training.models import ModelSpec, copy_of, load_policy, make_critic
from tunix_sgljax.training.rewards import whole_numbers
from tunix_sgljax.training.rollouts import SeededVanillaRollout
from tunix_sgljax.training.schema import MeshConfig, TrainConfig
from tunix_sgljax.training.task import Task, add_code_dir, import_function

T = TypeVar("T")

_OPTIMIZER_KEYS = {
    *("opt_type", "learning_rate", "schedule_type", "peak_value", "init_value", "end_value"),
    *("warmup_ratio", "warmup_steps", "decay_steps", "b1", "b2", "weight_decay", "max_grad_norm"),
}
"""Keys of Tunix's optimizer sections; each optimizer and schedule reads some."""


def check_sections(config: TrainConfig) -> None:
    """Has Tunix's classes check the sections that are theirs; InvalidConfigError names them."""
    make_algorithm(config)
    make_over_sampling(config)
    rollout_configs(config, None)
    _training_config(config)
    if config.rollout_engine == "sgljax":
        options = rollout_options(config.sgljax_config)
        longest, needed = options.get("max_model_len"), sum(config.max_tokens)
        if longest is not None and longest < needed:
            raise InvalidConfigError(
                "sgljax_config.max_model_len must hold max_prompt_length + "
                f"total_generation_steps ({needed}), got {longest}"
            )


def make_meshes(config: TrainConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """The meshes of the trainer and of the rollout, which may be the same."""
    devices, trainer = jax.devices(), config.actor_model_config.mesh
    rollout = config.rollout_model_config.mesh
    num_trainer = math.prod(trainer.shape)
    needed = num_trainer + (0 if rollout is None else math.prod(rollout.shape))
    if needed > len(devices):
        shapes = f"{trainer.shape}" if rollout is None else f"{trainer.shape} and {rollout.shape}"
        raise InvalidConfigError(
            f"meshes of {shapes} take {needed} devices, but there are {len(devices)}"
        )
    made = _make_mesh(trainer, devices[:num_trainer])
    return made, made if rollout is None else _make_mesh(rollout, devices[num_trainer:needed])


def _make_mesh(section: MeshConfig, devices: list[Any]) -> jax.sharding.Mesh:
    shape, names = tuple(section.shape), tuple(section.axis_names)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=auto, devices=devices)


def rollout_engine(
    config: TrainConfig, progress: Progress | None = None
) -> Callable[..., BaseRollout]:
    """What `ClusterConfig.rollout_engine` takes: the line that a user changes in a program."""
    if config.rollout_engine == "vanilla":
        return functools.partial(SeededVanillaRollout, seed=config.seed)
    options = {"random_seed": config.seed} | rollout_options(config.sgljax_config)
    return functools.partial(SglJaxRollout, progress=progress, **options)


def end_tokens(config: TrainConfig, eos_id: int | None) -> list[int] | None:
    """What ends a completion: the config's ids, else the tokenizer's and the model folder's.

    None leaves it to Tunix, which takes the tokenizer's.
    """
    given, folder = config.rollout_config.get("eos_tokens"), config.actor_model_config.model_path
    if given is not None or folder is None:
        return given
    own = () if eos_id is None or eos_id < 0 else (int(eos_id),)
    return list(dict.fromkeys((*own, *load_model_config(folder).eos_token_ids))) or None


def rollout_configs(config: TrainConfig, eos_tokens: list[int] | None) -> dict[Mode, RolloutConfig]:
    """Sampling configs of training and evaluation, for Tunix; `eos_tokens` as `end_tokens`."""
    configs = {}
    for mode, changes in ((Mode.TRAIN, {}), (Mode.EVAL, config.eval_rollout_config)):
        values = {"kv_cache_size": sum(config.max_tokens), **config.rollout_config, **changes}
        values["eos_tokens"] = values.get("eos_tokens", eos_tokens)
        if "total_generation_steps" in values:  # the name in Tunix's files
            values["max_tokens_to_generate"] = values.pop("total_generation_steps")
        if config.rollout_engine == "vanilla" and values.get("temperature") == 0:
            values["top_p"] = None  # vanilla's greedy; with a top_p it would return nothing
        name = "rollout_config" if mode is Mode.TRAIN else "eval_rollout_config"
        for key in values.keys() - RolloutConfig.__dataclass_fields__.keys():
            hint = rollout_field_hint(key)
            raise InvalidConfigError(f"unknown key {name}.{key}" + (f"; {hint}" if hint else ""))
        configs[mode] = make_checked(RolloutConfig, name, values)
    if configs[Mode.TRAIN].temperature == 0:
        raise InvalidConfigError(
            "rollout_config.temperature must be above 0: greedy completions have no advantages; "
            "set eval_rollout_config.temperature for evaluation"
        )
    return configs


def make_optimizer(
    key: str, section: Mapping[str, Any], total: int
) -> optax.GradientTransformation:
    """An optimizer for `total` updates, as Tunix's files describe it.

    `opt_type` is a function of optax, `schedule_type` one of optax.schedules, and other keys are
    their arguments. `max_grad_norm` scales gradients down to that norm.
    """
    function = _function_of(optax, f"{key}.opt_type", str(section.get("opt_type", "adam")).lower())
    values, schedule = dict(section), section.get("schedule_type")
    known = _OPTIMIZER_KEYS | inspect.signature(function).parameters.keys()
    if schedule:
        make_schedule = _function_of(optax.schedules, f"{key}.schedule_type", schedule)
        known |= inspect.signature(make_schedule).parameters.keys()
        values.setdefault("peak_value", values.get("learning_rate"))
        values["decay_steps"] = values.get("decay_steps") or total
        default = values.get("warmup_ratio", 0.0) * total
        values["warmup_steps"] = int(values.get("warmup_steps") or default)
        values["learning_rate"] = _call(key, make_schedule, {"init_value": 0.0, **values})
    refuse_unknown(key, section, known)
    max_norm = values.pop("max_grad_norm", None)
    optimizer = _call(key, function, values)
    if max_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(max_norm), optimizer)


def make_optimizers(
    config: TrainConfig,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimizers of the policy and of the critic, which takes the policy's if it has none."""
    given, key, total = config.rl_training_config, "rl_training_config", config.num_updates
    of_actor = {"learning_rate": 1e-6, **(given.get("actor_optimizer_config") or {})}
    of_critic = given.get("critic_optimizer_config") or of_actor
    return (
        make_optimizer(f"{key}.actor_optimizer_config", of_actor, total),
        make_optimizer(f"{key}.critic_optimizer_config", of_critic, total),
    )


def make_algorithm(config: TrainConfig) -> GRPOConfig | PPOConfig:
    if config.training_mode == "ppo":
        return make_checked(PPOConfig, "ppo_config", config.ppo_config)
    return make_checked(GRPOConfig, "grpo_config", config.grpo_config)


def make_cluster(
    config: TrainConfig,
    spec: ModelSpec,
    tokenizer: Any,
    engine: Callable[..., BaseRollout],
    perf_config: PerfMetricsConfig | None = None,
) -> RLCluster:
    """The cluster with loaded models; `perf_config` makes Tunix trace its steps."""
    trainer, rollout = make_meshes(config)
    model = config.actor_model_config
    actor = policy = load_policy(model, spec, trainer)
    reference = copy_of(policy)
    if model.lora_config is not None:
        actor = apply_lora(policy, model.lora_config, config.seed)
        # New pairs change nothing; but a quantised base differs from the policy.
        reference = policy if model.lora_config.weight_qtype is None else copy_of(actor)
    is_ppo = config.training_mode == "ppo"
    roles = (Role.ACTOR, Role.REFERENCE, Role.CRITIC)
    eos_tokens = end_tokens(config, tokenizer.eos_id())
    cluster = RLCluster(
        actor=actor,
        reference=reference if config.has_reference_model else None,
        critic=make_critic(spec, policy, trainer, config.seed) if is_ppo else None,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh={**dict.fromkeys(roles, trainer), Role.ROLLOUT: rollout},
            rollout_engine=engine,  # pyright: ignore[reportArgumentType]  a partial will do
            offload_to_cpu=config.offload_to_cpu,
            rollout_config=rollout_configs(config, eos_tokens),
            training_config=_training_config(config),
        ),
        perf_config=perf_config,
    )
    # Tunix's learner counts the steps; a trainer with its own limit would draw a bar.
    cluster.actor_trainer.config.max_steps = None
    if is_ppo:
        cluster.critic_trainer.config.max_steps = None
    return cluster


def make_learner(
    config: TrainConfig,
    cluster: RLCluster,
    task: Task,
    metric_fns: Sequence[Callable[..., Any]] = (),
) -> GRPOLearner[GRPOConfig] | PPOLearner:
    algorithm, reward_fns = make_algorithm(config), task.reward_fns
    if isinstance(algorithm, PPOConfig):
        whole = [whole_numbers(fn) for fn in reward_fns]
        return PPOLearner(cluster, algorithm, whole, metric_fns=metric_fns)
    over_sampling = make_over_sampling(config)
    if over_sampling is None:
        return GRPOLearner(cluster, algorithm, reward_fns, metric_fns)
    if over_sampling.known_rewards is not None:
        known_rewards = task.with_columns(over_sampling.known_rewards)
        over_sampling = dataclasses.replace(over_sampling, known_rewards=known_rewards)
    return OverSamplingGrpoLearner(
        cluster, algorithm, reward_fns, metric_fns, over_sampling=over_sampling
    )


def make_over_sampling(config: TrainConfig) -> OverSampling | None:
    section = config.over_sampling
    if section is None:
        return None
    values = dataclasses.asdict(section)
    if section.known_rewards is not None:
        add_code_dir(config.task.code_dir)
        key = "over_sampling.known_rewards"
        values["known_rewards"] = import_function(key, section.known_rewards)
    return OverSampling(**values)


def _training_config(config: TrainConfig) -> RLTrainingConfig:
    given, name = dict(config.rl_training_config), "rl_training_config"
    for key in ("actor_optimizer_config", "critic_optimizer_config"):
        given.pop(key, None)
    for key, kind in (
        ("checkpointing_options", ocp.CheckpointManagerOptions),
        ("metrics_logging_options", MetricsLoggerOptions),
        ("profiler_options", ProfilerOptions),
    ):
        if given.get(key):
            given[key] = make_checked(kind, f"{name}.{key}", given[key])
    if given.get("metrics_logging_options"):
        options = given["metrics_logging_options"]
        options.log_dir = str(Path(options.log_dir).expanduser().absolute())
    if "data_sharding_axis" in given:
        given["data_sharding_axis"] = tuple(given["data_sharding_axis"])
    root, (optimizer, critic_optimizer) = checkpoint_root(config), make_optimizers(config)
    return make_checked(
        RLTrainingConfig,
        name,
        {
            "rollout_micro_batch_size": config.batch_size,  # as continuous batching needs
            **given,
            "actor_optimizer": optimizer,
            "critic_optimizer": critic_optimizer if config.training_mode == "ppo" else None,
            "max_steps": config.num_updates,
            "eval_every_n_steps": given.get("eval_every_n_steps") or config.num_updates + 1,
            "mini_batch_size": config.mini_batch_size,
            "train_micro_batch_size": config.micro_batch_size,
            "checkpoint_root_directory": None if root is None else str(root),
        },
    )


def _call(key: str, function: Callable[..., T], values: Mapping[str, Any]) -> T:
    names = inspect.signature(function).parameters
    taken = {name: value for name, value in values.items() if name in names}
    return make_checked(function, key, taken)


def _function_of(module: Any, key: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        hint = hint_at(name, dir(module))
        raise InvalidConfigError(f"{key} {name!r} is no function of {module.__name__}{hint}")
    return function
