"""The RolloutConfigs of all modes of a cluster: training, and evaluation beside it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping

from tunix.rl import rl_cluster
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidConfigError

logger = logging.getLogger(__name__)


def find_cluster() -> rl_cluster.RLCluster | None:
    """The cluster that is being constructed around this call.

    Tunix passes a rollout the training config alone, and another mode's at its first use, hours
    into a run. The cluster that constructs the rollout has them all, and is a caller of this
    function: its frame is the one place that leads to it. Only frames of Tunix's module are read:
    to read a frame's local variables keeps a copy of them, models too, until it returns.
    """
    frame = inspect.currentframe()
    try:
        while frame is not None:
            if frame.f_globals is vars(rl_cluster):
                caller = frame.f_locals.get("self")
                if isinstance(caller, rl_cluster.RLCluster):
                    return caller
            frame = frame.f_back
        return None
    finally:
        del frame  # a cycle otherwise


def configs_by_mode(
    cluster: rl_cluster.RLCluster | None, training: RolloutConfig
) -> dict[str, RolloutConfig]:
    """The configs of a cluster by mode; without one, the training config alone."""
    configs = None if cluster is None else cluster.cluster_config.rollout_config
    if isinstance(configs, dict) and configs.get(rl_cluster.Mode.TRAIN) is training:
        return {mode.name: config for mode, config in configs.items()}
    return {rl_cluster.Mode.TRAIN.name: training}


def micro_batch_advice(cluster: rl_cluster.RLCluster | None) -> str | None:
    """Advice for a script whose rollouts come in parts of a mini-batch, since nothing is set."""
    if cluster is None:
        return None
    training = cluster.cluster_config.training_config
    micro, mini = training.train_micro_batch_size, training.mini_batch_size
    if training.rollout_micro_batch_size is not None or None in (micro, mini) or micro == mini:
        return None
    return (
        "RLTrainingConfig.rollout_micro_batch_size is not set and follows train_micro_batch_size: "
        f"the engine gets {micro} of a mini-batch's {mini} prompts at a time; with {mini} there it "
        "batches all of them, which is faster"
    )


def joins_calls(cluster: rl_cluster.RLCluster | None) -> bool:
    """Whether Tunix's learners put the prompts of several rollout calls into one array.

    They do unless they sample in micro-batches of a multiple of those that they score log-probs in.
    Sizes that default to the full batch are not known here, and count as equal.
    """
    if cluster is None:
        return False
    training = cluster.cluster_config.training_config
    default = training.train_micro_batch_size or training.mini_batch_size
    sampled = training.rollout_micro_batch_size or default
    scored = training.compute_logps_micro_batch_size or default
    return sampled is not None and scored is not None and sampled % scored != 0


def check_lengths(configs: Mapping[str, RolloutConfig], max_model_len: int) -> None:
    """Refuses configs whose longest sequences the engine cannot hold.

    Of the training config it only warns: its prompts may be shorter, and it is used at once.
    """
    for mode, config in configs.items():
        prompt, new = config.max_prompt_length, config.max_tokens_to_generate
        if prompt + new > max_model_len:
            message = (
                f"the RolloutConfig of {mode}: max_prompt_length {prompt} + max_tokens_to_generate "
                f"{new} = {prompt + new} exceeds the engine's context of {max_model_len} tokens; "
                "raise rollout_sglang_jax_context_length of the training config (max_model_len), "
                "or leave it out, if the model's own context allows it"
            )
            if mode != rl_cluster.Mode.TRAIN.name:
                raise InvalidConfigError(message)
            logger.warning("%s", message)
