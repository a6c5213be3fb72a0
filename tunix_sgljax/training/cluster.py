"""Builds Tunix's cluster and learner from a config."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.perf.metrics import PerfMetricsConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig
from tunix.sft.metrics_logger import MetricsLoggerOptions

from sgljax_engine import load_model_config
from tunix_sgljax.factory import RLCluster
from tunix_sgljax.lora import check_lora_mode
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.rollout import SglJaxRollout
from tunix_sgljax.training.checks import (
    check_num_devices,
    engine_options,
    has_reference_model,
    num_updates,
)
from tunix_sgljax.training.lora import apply_lora
from tunix_sgljax.training.models import ModelSpec, copy_of, load_policy, make_critic
from tunix_sgljax.training.resuming import checkpoint_root
from tunix_sgljax.training.rewards import whole_numbers
from tunix_sgljax.training.rollouts import SeededVanillaRollout
from tunix_sgljax.training.schema import OptimizerSection, TrainConfig

RolloutEngine = Callable[..., BaseRollout]
"""What `ClusterConfig.rollout_engine` takes."""


def make_meshes(config: TrainConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """The meshes of the trainer and of the rollout, which may be the same.

    Raises:
        InvalidConfigError: there are too few devices.
    """
    devices = jax.devices()
    check_num_devices(config, len(devices))
    section = config.mesh
    num_trainer = math.prod(section.shape)
    trainer = _make_mesh(section.shape, section.axis_names, devices[:num_trainer])
    if section.rollout_shape is None:
        return trainer, trainer
    rest = devices[num_trainer : num_trainer + math.prod(section.rollout_shape)]
    return trainer, _make_mesh(section.rollout_shape, section.axis_names, rest)


def rollout_engine(config: TrainConfig, progress: Progress | None = None) -> RolloutEngine:
    """The rollout engine: the line that a user changes in their own program."""
    if config.rollout_engine == "vanilla":
        return functools.partial(SeededVanillaRollout, seed=config.seed)
    engine = config.engine
    return functools.partial(
        SglJaxRollout,
        sampling_params=engine.sampling_params,
        logprobs_mode=engine.logprobs_mode,
        match_batch_size=engine.match_batch_size,
        weight_update_mode=engine.weight_update_mode,
        release_kv_between_steps=engine.release_kv_between_steps,
        strict_config=engine.strict_config,
        lora="merged" if config.lora is None else check_lora_mode(config.lora.mode),
        progress=progress,
        **engine_options(config),
    )


def end_tokens(config: TrainConfig, eos_id: int | None) -> list[int] | None:
    """What ends a completion: the config's ids, else the tokenizer's and the model folder's.

    An instruct model's generation_config.json often has more than its tokenizer. None leaves it to
    Tunix, which takes the tokenizer's.
    """
    if config.rollout.eos_tokens is not None or config.model.path is None:
        return config.rollout.eos_tokens
    own = () if eos_id is None or eos_id < 0 else (int(eos_id),)
    return list(dict.fromkeys((*own, *load_model_config(config.model.path).eos_token_ids))) or None


def rollout_configs(config: TrainConfig, eos_tokens: list[int] | None) -> dict[Mode, RolloutConfig]:
    """Sampling configs of training and evaluation, for Tunix; `eos_tokens` as `end_tokens`."""
    rollout = config.rollout
    needed = rollout.max_prompt_length + rollout.max_tokens_to_generate
    configs = {}
    for mode, section in ((Mode.TRAIN, rollout), (Mode.EVAL, rollout.eval or rollout)):
        top_p = section.top_p
        if config.rollout_engine == "vanilla" and section.temperature == 0:
            top_p = None  # vanilla's greedy; with a top_p it would return nothing
        configs[mode] = RolloutConfig(
            max_tokens_to_generate=rollout.max_tokens_to_generate,
            max_prompt_length=rollout.max_prompt_length,
            kv_cache_size=rollout.kv_cache_size or needed,
            temperature=section.temperature,
            top_p=top_p,
            top_k=section.top_k,
            eos_tokens=eos_tokens,
            return_logprobs=rollout.return_logprobs,
        )
    return configs


def make_optimizer(section: OptimizerSection, total: int) -> optax.GradientTransformation:
    """An optimizer for `total` updates."""
    schedule = _make_schedule(section, total)
    if section.opt_type == "adam":
        optimizer = optax.adam(schedule, b1=section.b1, b2=section.b2)
    elif section.opt_type == "adamw":
        optimizer = optax.adamw(
            schedule, b1=section.b1, b2=section.b2, weight_decay=section.weight_decay
        )
    else:
        optimizer = optax.sgd(schedule)
    if section.max_grad_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), optimizer)


def make_optimizers(
    config: TrainConfig,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimizers of the policy and of the critic."""
    training, total = config.training, num_updates(config)
    critic = training.critic_optimizer or training.optimizer
    return make_optimizer(training.optimizer, total), make_optimizer(critic, total)


def cluster_config(
    config: TrainConfig,
    meshes: tuple[jax.sharding.Mesh, jax.sharding.Mesh],
    engine: RolloutEngine,
    eos_tokens: list[int] | None,
) -> ClusterConfig:
    """The cluster's config, without its models."""
    training = config.training
    trainer, rollout = meshes
    roles = (Role.ACTOR, Role.REFERENCE, Role.CRITIC)
    optimizer, critic_optimizer = make_optimizers(config)
    every = training.eval_every_n_steps or num_updates(config) + 1
    checkpoints = checkpoint_root(config)
    return ClusterConfig(
        role_to_mesh={**dict.fromkeys(roles, trainer), Role.ROLLOUT: rollout},
        rollout_engine=engine,  # pyright: ignore[reportArgumentType]  a partial will do
        offload_to_cpu=config.offload_to_cpu,
        rollout_config=rollout_configs(config, eos_tokens),
        training_config=RLTrainingConfig(
            actor_optimizer=optimizer,
            critic_optimizer=critic_optimizer if config.algorithm.name == "ppo" else None,
            max_steps=num_updates(config),
            eval_every_n_steps=every,
            mini_batch_size=training.mini_batch_size or training.batch_size,
            train_micro_batch_size=training.train_micro_batch_size
            or training.mini_batch_size
            or training.batch_size,
            rollout_micro_batch_size=training.rollout_micro_batch_size or training.batch_size,
            compute_logps_micro_batch_size=training.compute_logps_micro_batch_size,
            checkpoint_root_directory=None if checkpoints is None else str(checkpoints),
            checkpointing_options=ocp.CheckpointManagerOptions(
                save_interval_steps=training.save_interval_steps,
                max_to_keep=training.max_to_keep,
            ),
            metrics_logging_options=None
            if training.metrics_log_dir is None
            else MetricsLoggerOptions(
                log_dir=_absolute(training.metrics_log_dir), flush_every_n_steps=1
            ),
        ),
    )


def make_cluster(
    config: TrainConfig,
    spec: ModelSpec,
    tokenizer: Any,
    engine: RolloutEngine,
    perf_config: PerfMetricsConfig | None = None,
) -> RLCluster:
    """The cluster with loaded models; `perf_config` makes Tunix trace its steps."""
    meshes = make_meshes(config)
    policy = load_policy(config.model, spec, meshes[0])
    actor, reference = _actor_and_reference(config, policy)
    is_ppo = config.algorithm.name == "ppo"
    critic: nnx.Module | None = None
    if is_ppo:
        critic = make_critic(spec, policy, meshes[0], config.seed)
    cluster = RLCluster(
        actor=actor,
        reference=reference if has_reference_model(config) else None,
        critic=critic,
        tokenizer=tokenizer,
        cluster_config=cluster_config(
            config, meshes, engine, end_tokens(config, tokenizer.eos_id())
        ),
        perf_config=perf_config,
    )
    # Tunix's learner counts the steps; a trainer with its own limit would draw a bar.
    cluster.actor_trainer.config.max_steps = None
    if is_ppo:
        cluster.critic_trainer.config.max_steps = None
    return cluster


def _actor_and_reference(config: TrainConfig, policy: nnx.Module) -> tuple[nnx.Module, nnx.Module]:
    """The trained model and its initial state; both have the same arrays."""
    if config.lora is None:
        return policy, copy_of(policy)
    actor = apply_lora(policy, config.lora, config.seed)
    # New pairs change nothing; but a quantised base differs from the policy.
    return actor, policy if config.lora.weight_qtype is None else copy_of(actor)


def make_learner(
    config: TrainConfig, cluster: RLCluster, reward_fns: list[Callable[..., Any]]
) -> GRPOLearner[GRPOConfig] | PPOLearner:
    """The learner that `algorithm` names."""
    if config.algorithm.name == "ppo":
        ppo = config.algorithm.ppo
        ppo_config = PPOConfig(
            num_iterations=ppo.num_iterations,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
            beta=ppo.beta,
            epsilon=ppo.epsilon,
            epsilon_low=ppo.epsilon_low,
            epsilon_high=ppo.epsilon_high,
            epsilon_c=ppo.epsilon_c,
            entropy_coef=ppo.entropy_coef,
            clip_range_value=ppo.clip_range_value,
            kl_method=ppo.kl_method,
            kl_clamp_value=ppo.kl_clamp_value,
        )
        return PPOLearner(cluster, ppo_config, [whole_numbers(fn) for fn in reward_fns])
    grpo = config.algorithm.grpo
    grpo_config = GRPOConfig(
        num_generations=grpo.num_generations,
        num_iterations=grpo.num_iterations,
        beta=grpo.beta,
        epsilon=grpo.epsilon,
        kl_loss_mode=grpo.kl_loss_mode,
        kl_clamp_value=grpo.kl_clamp_value,
        loss_algo=grpo.loss_algo,
        loss_agg_mode=grpo.loss_agg_mode,
    )
    return GRPOLearner(cluster, grpo_config, reward_fns)


def close_rollout(rollout: BaseRollout) -> None:
    """Ends the engine of a rollout that has one."""
    if isinstance(rollout, SglJaxRollout):
        rollout.close()


def _make_mesh(shape: list[int], names: list[str], devices: list[Any]) -> jax.sharding.Mesh:
    if len(devices) == 1:
        return jax.sharding.Mesh(np.array(devices).reshape(shape), tuple(names))
    return jax.make_mesh(
        tuple(shape),
        tuple(names),
        axis_types=(jax.sharding.AxisType.Auto,) * len(names),
        devices=devices,
    )


def _make_schedule(section: OptimizerSection, total: int) -> float | optax.Schedule:
    peak, warmup = section.learning_rate, section.warmup_steps
    decay = section.decay_steps or total
    if section.schedule_type == "constant":
        return peak
    if section.schedule_type == "warmup_cosine_decay":
        return optax.warmup_cosine_decay_schedule(
            section.init_value, peak, warmup, decay, section.end_value
        )
    rise = optax.linear_schedule(section.init_value, peak, warmup)
    fall = optax.linear_schedule(peak, section.end_value, decay - warmup)
    return optax.join_schedules([rise, fall], [warmup])


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
