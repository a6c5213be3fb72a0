"""Tunix's GRPOLearner for steps that ask for more groups than they train on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.grpo import grpo_learner as tunix_grpo

from sgljax_engine import InvalidConfigError
from tunix_sgljax.checkpoints.data_place import restored_place
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.in_flight.policy_versions import NO_VERSION, PolicyVersions
from tunix_sgljax.in_flight.wrapping import require_sgljax_rollout
from tunix_sgljax.long_tail.asking import GroupSource, trajectory_ids
from tunix_sgljax.long_tail.columns import Columns, join_rows, repeated
from tunix_sgljax.long_tail.config import OverSampling
from tunix_sgljax.long_tail.feed import ROW, PromptFeed, Row
from tunix_sgljax.long_tail.groups import GroupsInFlight, to_output
from tunix_sgljax.padding import right_pad
from tunix_sgljax.replay import Replay, extended
from tunix_sgljax.reward_functions import all_checked
from tunix_sgljax.rollout import SglJaxRollout

logger = logging.getLogger(__name__)

_TRAIN = tunix_cluster.Mode.TRAIN

_USES_OLD_LOGPS = ("grpo",)
"""Tunix's losses whose ratio is that of the old log-probs in the train example."""

_ZERO_IF_EQUAL = ("grpo", "rloo", "drgrpo")
"""Tunix's estimators that give a group of equal rewards no advantage."""


@struct.dataclass(frozen=True)
class PartialTrainExample(tunix_grpo.TrainExample):
    """Tunix's TrainExample with the policy behind each token.

    Attributes:
        token_versions: Policy versions of `completion_ids`: the global step whose weights sampled
            each; `NO_VERSION` (-1) at padding. Shape: [B, C] int32.
        sampling_masks: As of `ReplayTrainExample`; None without replay.
    """

    token_versions: np.ndarray | None = None
    sampling_masks: np.ndarray | None = None


class OverSamplingGrpoLearner(tunix_grpo.GRPOLearner[tunix_grpo.GRPOConfig]):
    """Tunix's GRPOLearner for a SglJaxRollout, which does not wait for the longest answers.

    A step has more groups in work than it trains on, and ends when enough of them are complete. The
    others go on in the next step under the new weights, with all that they have, or are dropped.
    Set `rollout_micro_batch_size` to the full batch: each call of the rollout is such a step.

    With groups that are carried, `old_per_token_logps` of a train example are the rollout's
    log-probs, each under the weights that sampled the token, so that the ratio and its clipping are
    right. `token_versions` has the policy of each token.

    Metrics of each call: `over_sampling/carried_groups`, `/dropped_groups`, `/aborted_groups`,
    `/ended_groups` (that ended early, in the step's batch), `/mixed_samples` (the share of trained
    samples that more than one policy sampled), `/age_mean` and `/age_max` (the policies between
    sampling a token and training on it), and `/wait_s` (seconds that the step waited for its
    samples).
    """

    def __init__(
        self,
        rl_cluster: tunix_cluster.RLCluster,
        algo_config: tunix_grpo.GRPOConfig,
        reward_fns: Callable[..., Any] | list[Callable[..., Any]],
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        over_sampling: OverSampling | None = None,
        replay: str = "auto",
    ) -> None:
        """Takes the arguments of Tunix's learner and two more.

        Args:
            rl_cluster: Cluster with a SglJaxRollout.
            algo_config: Tunix's GRPOConfig.
            reward_fns: See Tunix's learner, also for the arguments below.
            metric_fns: More metrics.
            data_shuffle_seed: Seed of the order of train examples.
            over_sampling: How many groups a step asks for; None takes the defaults.
            replay: Whether to replay sampling masks, see `GrpoLearner`.

        Raises:
            InvalidConfigError: names the option that cannot be right with groups that live through
                weight updates, and its value.
        """
        config = OverSampling() if over_sampling is None else over_sampling
        rollout = _check_options(rl_cluster, algo_config, config)
        super().__init__(
            rl_cluster,  # by position: its name differs between releases of Tunix
            algo_config,
            reward_fns=all_checked(reward_fns),
            metric_fns=metric_fns,
            data_shuffle_seed=data_shuffle_seed,
        )
        self._replay = Replay.choose(replay, rl_cluster, rollout, algo_config.beta)
        self._cluster = rl_cluster
        self._config = config
        self._keeps_prompts = config.keeps_prompts
        self._versioned_rollout = rollout
        self._versions = PolicyVersions(rollout.weight_version, rl_cluster.global_steps)
        self._last_version = rollout.weight_version
        self._source: GroupSource | None = None
        self._groups: GroupsInFlight | None = None
        self._micro_batch_size: int | None = None

    def train(
        self,
        train_ds: Iterable[dict[str, Any]],
        eval_ds: Iterable[dict[str, Any]] | None = None,
        skip_jit: bool = False,
    ) -> None:
        """Trains as Tunix's learner does; groups that are left at the end are dropped.

        After a restored checkpoint it reads `train_ds` again from its beginning, and asks for the
        rows that were neither trained on nor dropped: also for those that were in work.
        """
        trainer = self._cluster.actor_trainer
        batches = iter(train_ds)
        first = next(batches)
        place = restored_place(trainer, self._num_trained_rows(len(first["prompts"])))
        feed = PromptFeed(itertools.chain([first], batches), place)
        self._iter_steps = trainer.iter_steps  # the feed goes forward, not Tunix
        if not feed.has_batch():
            logger.warning("train_ds has no batch that the checkpoint was not trained on")
            self._cluster.close()
            return
        num_samples = self.algo_config.num_generations
        self._groups = GroupsInFlight(
            self._versioned_rollout, self._config, num_samples, self._columns_of
        )
        self._source = GroupSource(feed, self._groups)
        try:
            super().train(feed, eval_ds, skip_jit)
        finally:
            self._groups.close()

    def _num_trained_rows(self, batch_size: int) -> int:
        """Rows that Tunix's learner would have trained on, in order, for the restored weights."""
        trainer, config = self._cluster.actor_trainer, self._training_config
        size = config.mini_batch_size or config.train_micro_batch_size or batch_size
        num_batches = -(-trainer.train_steps // self.algo_config.num_iterations)
        return num_batches * size

    def _columns_of(self, rows: Sequence[Row]) -> Columns:
        """The columns that Tunix would make of these rows, for the rewards."""
        numbers = np.array([row.number for row in rows])
        size = self._micro_batch_size
        micro_batches = None
        if size is not None:
            micro_batches = functools.partial(
                super()._create_micro_batch_iterator, micro_batch_size=min(size, len(rows))
            )
        columns = repeated(
            join_rows([row.columns for row in rows]) | {ROW: numbers},
            self.algo_config.num_generations,
            lambda example: self._compute_trajectory_ids(example, 0),
            micro_batches,
        )
        del columns[ROW]
        return columns

    # ------------------------------------------------------------------ Tunix calls these

    def _create_micro_batch_iterator(
        self, full_batch_iterator: Iterator[Columns], micro_batch_size: int
    ) -> Iterator[Columns]:
        self._micro_batch_size = micro_batch_size  # Tunix calls it only if it divides batches
        return super()._create_micro_batch_iterator(full_batch_iterator, micro_batch_size)

    def _compute_trajectory_ids(self, example: dict[str, Any], steps: int) -> list[str]:
        if ROW not in example:
            return super()._compute_trajectory_ids(example, steps)
        return trajectory_ids(example[ROW], self.algo_config.num_generations)

    def _generate_and_compute_advantage(
        self, training_input: dict[str, Any], mode: tunix_cluster.Mode = _TRAIN
    ) -> tunix_grpo.TrainExample:
        assert self._groups is not None
        assert self._source is not None
        if mode != _TRAIN:
            with self._groups.running():
                return super()._generate_and_compute_advantage(training_input, mode)
        rollout = self._versioned_rollout
        config = self._cluster.get_rollout_config(mode=_TRAIN)
        rollout.follow_trainer()
        self._announce_weights()
        numbers = training_input[ROW][:: self.algo_config.num_generations].tolist()
        self._source.ask(numbers, config)
        start_s = time.perf_counter()
        taken = self._source.take(len(numbers))
        wait_s = time.perf_counter() - start_s
        output = to_output(taken, rollout, config)
        columns = self._columns_of([group.row for group in taken])
        with rollout.prepared_outputs(output):
            example = super()._generate_and_compute_advantage(columns, mode)
        ended = [group.ended_early for group in taken]
        num_left = len(self._groups.ended)
        self._cluster.buffer_metrics(
            {
                "over_sampling/carried_groups": (len(self._groups), np.mean),
                "over_sampling/dropped_groups": (num_left * (not self._keeps_prompts), np.sum),
                "over_sampling/aborted_groups": (num_left * self._keeps_prompts, np.sum),
                "over_sampling/ended_groups": (sum(ended), np.sum),
                "over_sampling/wait_s": (wait_s, np.sum),
            },
            mode=_TRAIN,
        )
        if any(ended):
            example = _without_advantages(
                example, np.repeat(ended, self.algo_config.num_generations)
            )
        return self._with_versions(example, output, config.max_tokens_to_generate)

    # ------------------------------------------------------------------ versions

    def _announce_weights(self) -> None:
        version = self._versioned_rollout.weight_version
        if version != self._last_version:
            self._versions.announce(version, self._cluster.global_steps)
            self._last_version = version

    def _with_versions(
        self,
        example: Any,
        output: VersionedRolloutOutput,
        width: int,
    ) -> PartialTrainExample:
        """Adds the versions of tokens, and with carried groups their log-probs."""
        assert output.logprobs is not None
        rows = [self._versions.translate(versions) for versions in output.weight_versions]
        fields: dict[str, Any] = {}
        if self._config.carries:
            old_BC = right_pad(output.logprobs, width, 0.0)
            example = dataclasses.replace(example, old_per_token_logps=jnp.asarray(old_BC))
        if self._replay is not None:
            logps = None if self._config.carries else output.logprobs  # the example has them
            fields = self._replay.fields(example, output.sampling_masks or (), logps)
        ages = self._cluster.global_steps - np.concatenate(rows)
        self._cluster.buffer_metrics(
            {
                "over_sampling/mixed_samples": (
                    np.mean([len(np.unique(row)) > 1 for row in rows]),
                    np.mean,
                ),
                "over_sampling/age_mean": (ages.mean() if ages.size else 0.0, np.mean),
                "over_sampling/age_max": (ages.max(initial=0), np.max),
            },
            mode=_TRAIN,
        )
        versions_BC = right_pad(rows, width, NO_VERSION)
        return extended(example, PartialTrainExample, token_versions=versions_BC, **fields)


def _without_advantages(example: Any, is_ended_B: np.ndarray) -> Any:
    """No advantage for groups that ended early: their rewards are those of texts so far."""
    advantages_B = jnp.where(jnp.asarray(is_ended_B), 0.0, example.advantages)
    return dataclasses.replace(example, advantages=advantages_B)


def _check_options(
    cluster: tunix_cluster.RLCluster, config: tunix_grpo.GRPOConfig, over_sampling: OverSampling
) -> SglJaxRollout:
    rollout = require_sgljax_rollout(cluster, "OverSamplingGrpoLearner")
    if rollout.logprobs_mode == "trainer_match":
        raise InvalidConfigError(
            "over-sampling goes without logprobs_mode='trainer_match', which scores the samples of "
            "one call together"
        )
    training = cluster.cluster_config.training_config
    if training.max_seq_token_per_tpu is not None:
        raise InvalidConfigError(
            "over-sampling goes without RLTrainingConfig.max_seq_token_per_tpu "
            f"({training.max_seq_token_per_tpu}): packed sequences have no versions"
        )
    if over_sampling.known_rewards and config.advantage_estimator not in _ZERO_IF_EQUAL:
        raise InvalidConfigError(
            f"known_rewards needs a GRPOConfig.advantage_estimator out of {_ZERO_IF_EQUAL}, got "
            f"{config.advantage_estimator!r}: another one may give equal rewards an advantage"
        )
    if not over_sampling.carries:
        return rollout
    if config.policy_loss_fn not in _USES_OLD_LOGPS:
        raise InvalidConfigError(
            f"groups that live through weight updates need a GRPOConfig.policy_loss_fn out of "
            f"{_USES_OLD_LOGPS}, got {config.policy_loss_fn!r}: another loss may take all tokens "
            "for the current policy's; 'drop' and 'abort' go with any"
        )
    if rollout.weight_update_mode not in ("retract", "in_place"):
        raise InvalidConfigError(
            "groups that live through weight updates need a rollout whose weight_update_mode is "
            f"'retract' or 'in_place', got {rollout.weight_update_mode!r}"
        )
    if cluster.cluster_config.offload_to_cpu:
        raise InvalidConfigError(
            "groups that live through weight updates go without ClusterConfig.offload_to_cpu: the "
            "engine cannot sleep while it has them"
        )
    rollout.check_comparable(cluster.get_rollout_config(mode=_TRAIN))
    return rollout
