"""Other entry points: a factory, and Tunix's cluster and learner with `rollout_worker=`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.grpo import grpo_learner as tunix_grpo
from tunix.rl.ppo import ppo_learner as tunix_ppo
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from sgljax_engine import InvalidConfigError
from tunix_sgljax.in_flight.wrapping import find_sgljax_rollout
from tunix_sgljax.replay import Replay, ReplayPpoTrainExample, ReplayTrainExample, replayed
from tunix_sgljax.rollout import SglJaxRollout
from tunix_sgljax.rollout.fleet import SglJaxFleetRollout

if TYPE_CHECKING:
    from sgljax_engine.fleet import FleetConfig


def create_sgljax_rollout(
    model: nnx.Module,
    tokenizer: Any,
    model_config: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    max_model_len: int | None = None,
    fleet: FleetConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> SglJaxRollout:
    """Makes a rollout worker for `RLCluster(rollout_worker=...)`, or for use on its own.

    Args:
        model: The Tunix model that provides the first weights.
        tokenizer: A Tunix TokenizerAdapter or anything it wraps.
        model_config: The model's shape: a Tunix ModelConfig, an HF config dict or the engine's
            ModelConfig; None takes `model.config`.
        mesh: Devices to run on; None, or an empty mesh, takes JAX's first device.
        max_model_len: Maximum number of prompt plus output tokens of one sequence.
        fleet: Sample on the servers of a fleet; see `SglJaxFleetRollout`. None samples here.
        **options: Keywords of `SglJaxRollout`, flat `EngineConfig` options among them.

    Raises:
        InvalidConfigError: names the option, its value and its limit.
        UnsupportedModelError: for a model that the engine does not implement.
    """
    if max_model_len is not None:
        options["max_model_len"] = max_model_len
    options |= {"tokenizer": tokenizer, "model_config": model_config, "mesh": mesh}
    if fleet is not None:
        return SglJaxFleetRollout(fleet=fleet, rollout_actor=model, **options)
    return SglJaxRollout(rollout_actor=model, **options)


class RLCluster(tunix_cluster.RLCluster):
    """Tunix's RLCluster that also accepts an existing rollout worker."""

    def __init__(
        self,
        *,
        actor: tunix_cluster.ModelOrPath,
        tokenizer: Any,
        cluster_config: tunix_cluster.ClusterConfig,
        critic: tunix_cluster.ModelOrPath | None = None,
        reference: tunix_cluster.ModelOrPath | None = None,
        reward: tunix_cluster.ModelOrPath | None = None,
        perf_config: Any = None,
        rollout_worker: BaseRollout | None = None,
    ) -> None:
        """Takes Tunix's arguments and one more.

        `rollout_worker` is used instead of `cluster_config.rollout_engine`: the result of
        `create_sgljax_rollout`, or any other BaseRollout.

        Raises:
            InvalidConfigError: when `rollout_worker` is not a BaseRollout.
        """
        if rollout_worker is not None:
            if not isinstance(rollout_worker, BaseRollout):
                raise InvalidConfigError(
                    f"rollout_worker must be a BaseRollout, got {type(rollout_worker).__name__}"
                )
            engine = functools.partial(_ExistingRollout, rollout_worker=rollout_worker)
            # Tunix's annotation omits the partial that its code accepts.
            cluster_config = dataclasses.replace(cluster_config, rollout_engine=engine)
        self._has_reference = reference is not None
        super().__init__(
            actor=actor,
            critic=critic,
            reference=reference,
            reward=reward,
            tokenizer=tokenizer,
            cluster_config=cluster_config,
            perf_config=perf_config,
        )

    def get_ref_per_token_logps(
        self,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        pad_id: int,
        eos_id: int,
        micro_batch_size: int | None = None,
    ) -> jax.Array:
        """Tunix's method; without a reference model it uses the rollout's frozen base.

        The frozen base needs a LoRA actor and a rollout with lora="adapter". The engine batches by
        itself: `micro_batch_size` is the reference model's.

        Raises:
            InvalidConfigError: without a reference model and such a rollout.
        """
        if self._has_reference:
            return super().get_ref_per_token_logps(
                prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size
            )
        worker = find_sgljax_rollout(self.rollout)
        if worker is None or worker.adapter is None:
            raise InvalidConfigError(
                "reference must be a model, got None: only a LoRA actor's SglJaxRollout with "
                "lora='adapter' can do without"
            )
        return worker.get_ref_per_token_logps(prompt_tokens, completion_tokens)


class _ExistingRollout(BaseRollout):
    """Stands in for a class that Tunix expects; "constructing" it returns the worker itself."""

    def __new__(
        cls,
        *,
        rollout_worker: BaseRollout,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
    ) -> BaseRollout:
        del rollout_actor, tokenizer, mesh  # the worker has its own
        if isinstance(rollout_worker, SglJaxRollout):
            rollout_worker.bind(rollout_config)
        return rollout_worker


class GrpoLearner(tunix_grpo.GRPOLearner):
    """Tunix's GRPOLearner with the rollout's specification's argument order, and sampling replay.

    Where top_k, top_p or min_p leave out tokens, the sampler draws from another distribution than
    the one that Tunix's learner takes log-probs of. With replay the current, old and reference
    log-probs, and the KL and entropy made of them, are over the tokens that were left.
    """

    def __init__(
        self,
        rl_cluster: tunix_cluster.RLCluster,
        reward_fns: Callable[..., Any] | list[Callable[..., Any]],
        grpo_config: tunix_grpo.GRPOConfig,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        replay: str = "auto",
    ) -> None:
        """Takes the arguments of Tunix's learner; `grpo_config` is its `algo_config`.

        Args:
            rl_cluster: Cluster of any rollout.
            reward_fns: See Tunix's learner, as for the arguments below.
            grpo_config: Tunix's GRPOConfig.
            metric_fns: More metrics.
            data_shuffle_seed: Seed of the order of train examples.
            replay: "support" replays sampling masks, "off" does not. "auto" does where the training
                config leaves out tokens and the rollout is a SglJaxRollout.

        Raises:
            InvalidConfigError: when `replay` cannot be right with the cluster's other options.
        """
        super().__init__(
            rl_cluster,  # by position: its name differs between releases of Tunix
            grpo_config,
            reward_fns=reward_fns,
            metric_fns=metric_fns,
            data_shuffle_seed=data_shuffle_seed,
        )
        rollout = find_sgljax_rollout(rl_cluster.rollout)
        self._replay = Replay.choose(replay, rl_cluster, rollout, grpo_config.beta)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: tunix_cluster.Mode = tunix_cluster.Mode.TRAIN
    ) -> Any:
        make = functools.partial(super()._generate_and_compute_advantage, training_input, mode)
        return replayed(self._replay, make, ReplayTrainExample, mode)


class PpoLearner(tunix_ppo.PPOLearner):
    """Tunix's PPOLearner with sampling replay, see `GrpoLearner`.

    The KL that Tunix takes off the rewards stays the one over the whole vocabulary, since the
    rewards are made before the masks can be applied.
    """

    def __init__(
        self,
        rl_cluster: tunix_cluster.RLCluster,
        ppo_config: tunix_ppo.PPOConfig,
        reward_fns: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        replay: str = "auto",
    ) -> None:
        """Takes the arguments of Tunix's learner; `ppo_config` is its `algo_config`.

        Args:
            rl_cluster: Cluster of any rollout.
            ppo_config: Tunix's PPOConfig.
            reward_fns: See Tunix's learner, as for the arguments below.
            metric_fns: More metrics.
            data_shuffle_seed: Seed of the order of train examples.
            replay: Whether to replay sampling masks, see `GrpoLearner`. It needs a temperature of
                1, the only one that Tunix's loss of PPO knows.

        Raises:
            InvalidConfigError: when `replay` cannot be right with the cluster's other options.
        """
        super().__init__(
            rl_cluster,  # by position: its name differs between releases of Tunix
            ppo_config,
            reward_fns=reward_fns,
            metric_fns=metric_fns,
            data_shuffle_seed=data_shuffle_seed,
        )
        temperature = rl_cluster.get_rollout_config(mode=tunix_cluster.Mode.TRAIN).temperature
        problem = ""
        if temperature != 1.0:
            problem = f"needs a temperature of 1 in PPO, got {temperature}"
        rollout = find_sgljax_rollout(rl_cluster.rollout)
        self._replay = Replay.choose(replay, rl_cluster, rollout, ppo_config.beta, problem)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: tunix_cluster.Mode = tunix_cluster.Mode.TRAIN
    ) -> Any:
        make = functools.partial(super()._generate_and_compute_advantage, training_input, mode)
        return replayed(self._replay, make, ReplayPpoTrainExample, mode)
