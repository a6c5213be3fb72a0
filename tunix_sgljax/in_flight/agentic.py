"""Tunix's agentic GRPO learner with weights that change while episodes are in flight."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.agentic import agentic_grpo_learner as tunix_grpo
from tunix.rl.agentic.agents.base_agent import ConversationAgentBase
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv
from tunix.rl.agentic.environments.task_environment import TaskEnvironment
from tunix.rl.agentic.pipeline.rollout_orchestrator import RolloutOrchestrator
from tunix.rl.agentic.utils import right_pad

from sgljax_engine import InvalidConfigError
from tunix_sgljax.checkpoints.data_place import DataPlace, restored_place
from tunix_sgljax.in_flight.episodes import (
    FAILED_EPISODES,
    EpisodeError,
    EpisodeRules,
    cancel_others,
    contained,
    describe_difference,
    unmade,
)
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.in_flight.policy_versions import (
    NO_VERSION,
    AnnouncedSyncLock,
    PolicyVersions,
)
from tunix_sgljax.in_flight.trajectories import VersionedCollectEngine
from tunix_sgljax.reward_functions import all_checked
from tunix_sgljax.rollout import SglJaxRollout

logger = logging.getLogger(__name__)

WEIGHT_UPDATES = ("in_flight", "drain")

_END_LIMIT_S = 30.0
"""For tasks that are cancelled to end; none waits for an environment's thread."""

_TRAIN = tunix_cluster.Mode.TRAIN


@struct.dataclass(frozen=True)
class VersionedTrainExample(tunix_grpo.TrainExample):
    """Tunix's TrainExample with the policy that sampled each token.

    Attributes:
        token_versions: Policy versions of `completion_ids`; `NO_VERSION` (-1) at tokens of the
            environment and at padding. None where Tunix packed sequences. Shape: [B, C] int32.
    """

    token_versions: jax.Array | np.ndarray | None = None


class AgenticGrpoLearner(tunix_grpo.GRPOLearner[tunix_grpo.GRPOConfig]):
    """Tunix's agentic GRPOLearner for a SglJaxRollout, with in-flight weight updates.

    Tunix drains before a weight sync: it starts no episode and waits for all running ones, even the
    longest. With `weight_updates="in_flight"` nothing waits. Completions that are being sampled
    continue under the new weights according to the rollout's `weight_update_mode`. Their log-probs
    and weight versions stay those of the weights that sampled each token, and Tunix's importance
    ratios use them (`use_rollout_logps`). Set `off_policy_steps` to at least 1, or nothing is ever
    in flight during a sync, and `max_concurrency` to the engine's capacity.

    `policy_version` of a train example is the oldest policy of the sequence's tokens. Metrics of
    the examples of each step: `weight_lag/mean` and `/max` (policies between sampling a token and
    training on it, before masking), `weight_lag/masked_fraction`, and `weight_lag/mixed_fraction`
    (sequences that more than one policy sampled); `episodes/failed_groups`, and
    `episodes/retokenized_turns` (the share of later turns sampled from other tokens than those
    before them in the trained sequence, since the conversation was tokenised again).
    """

    def __init__(
        self,
        rl_cluster: tunix_cluster.RLCluster,
        algo_config: tunix_grpo.GRPOConfig,
        reward_fns: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        chat_parser: Any | None = None,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        agent_class: type[ConversationAgentBase] = ModelAgent,
        agent_kwargs: dict[str, Any] | None = None,
        env_class: type[BaseTaskEnv] = TaskEnvironment,
        env_kwargs: dict[str, Any] | None = None,
        *,
        weight_updates: str = "in_flight",
        max_token_lag: int | None = None,
        failed_episodes: str = "raise",
        mask_retokenized: bool = False,
    ) -> None:
        """Takes the arguments of Tunix's learner and four more options.

        Args:
            rl_cluster: Cluster with a SglJaxRollout.
            algo_config: Tunix's agentic GRPOConfig.
            reward_fns: See Tunix's learner, also for the arguments below.
            chat_parser: Turns messages into prompts; Tunix trains on nothing without one.
            metric_fns: More metrics.
            agent_class: Class of the agents.
            agent_kwargs: Arguments of the agents.
            env_class: Class of the environments.
            env_kwargs: Arguments of the environments.
            weight_updates: "in_flight", or "drain" for Tunix's own lock.
            max_token_lag: Mask a token out of the loss if its policy is more than this many
                versions older than the one being trained; None masks none.
            failed_episodes: What a failure of an episode does: of its environment, agent, model
                call or reward of the environment, or a reset beyond `episode_timeout`. "raise" ends
                the training with that error. "drop" goes on with the group masked out of the loss,
                and ends only if as many groups in a row fail as a step has, at least two.
            mask_retokenized: Mask turns out of the loss that were sampled from other tokens than
                those before them in the trained sequence.

        Raises:
            InvalidConfigError: names the option and its value.
        """
        rollout = _check_options(rl_cluster, algo_config, weight_updates, max_token_lag)
        if failed_episodes not in FAILED_EPISODES:
            raise InvalidConfigError(
                f"failed_episodes must be one of {FAILED_EPISODES}, got {failed_episodes!r}"
            )
        super().__init__(
            rl_cluster,  # by position: its name differs between releases of Tunix
            algo_config,
            reward_fns=all_checked(reward_fns),
            chat_parser=chat_parser,
            metric_fns=metric_fns,
            agent_class=agent_class,
            agent_kwargs=agent_kwargs,
            env_class=env_class,
            env_kwargs=env_kwargs,
        )
        self._cluster = rl_cluster
        self._versioned_rollout = rollout
        self._max_token_lag = max_token_lag
        self._drops_failed = failed_episodes == "drop"
        self._masks_retokenized = mask_retokenized
        self._failure: EpisodeError | None = None
        self._num_failed = self._num_failed_in_row = 0  # groups
        self._turns: list[tuple[int, int]] = []  # of an episode: later ones, tokenised again
        self._training_thread: int | None = None
        self._has_warned = False
        self._place = DataPlace()
        self._first_group = 0  # Tunix numbers groups on from the steps of the checkpoint
        self._row_numbers: list[int] = []  # of the groups, in order
        self._group_ids: collections.deque[int] = collections.deque()  # of examples in the queue
        self._prompt_queue: Any = None
        self._lags: list[dict[str, float]] = []  # of this step's examples; training thread
        self._versions = PolicyVersions(rollout.weight_version, self.policy_version)
        self._rollout_sync_lock = AnnouncedSyncLock(
            self._announce_sync, is_in_flight=weight_updates == "in_flight"
        )

    def train(
        self,
        train_dataset: Iterable[dict[str, Any]],
        eval_dataset: Iterable[dict[str, Any]] | None = None,
        skip_jit: bool = False,
    ) -> None:
        """Trains as Tunix's learner does; ends with the error of an episode that fails.

        After a restored checkpoint it reads `train_dataset` again from its beginning, and asks for
        the rows that were not trained on: also for those that were in work.

        Raises:
            BaseException: what an episode raised, with a note of what raised it.
        """
        self._training_thread = threading.get_ident()
        try:
            super().train(self._unused(train_dataset), eval_dataset, skip_jit)
        except EpisodeError as failure:
            self._failure = self._failure or failure
        finally:
            self._end_episodes()
        failure, self._failure = self._failure, None
        if failure is not None and not self._drops_failed:
            failure.error.add_note(f"raised by {failure.what} in an episode")
            raise failure.error

    def _unused(self, train_dataset: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Batches of rows that are not used, after one for each step that Tunix skips."""
        batches = iter(train_dataset)
        first = next(batches, None)
        if first is None:
            return
        size, num_steps = len(next(iter(first.values()))), self._cluster.global_steps
        self._first_group = num_steps * size
        place = restored_place(self._cluster.actor_trainer, self._first_group)
        self._place, self._row_numbers = place, []
        yield from [first] * num_steps
        numbers, left = itertools.count(), []
        for batch in itertools.chain([first], batches):
            rows = list(super()._create_micro_batch_iterator(iter([batch]), 1))
            unused = []
            for row, number in zip(rows, numbers, strict=False):
                prompt: Any = next(iter(row.values()))
                place.read(prompt[0])
                if number not in place:
                    unused.append(row)
                    self._row_numbers.append(number)
            if not left and len(unused) == len(rows):
                yield batch  # as it is: columns of any kind
                continue
            left += unused
            while len(left) >= size:
                yield _joined(left[:size])
                left = left[size:]
        place.end()
        if left:
            yield _joined(left)

    def _end_episodes(self) -> None:
        """Ends what an error left behind; at the end of a whole training there is nothing."""
        if self._prompt_queue is None:
            return
        self._prompt_queue.put(None)  # a thread may wait for the next batch
        ended = asyncio.run_coroutine_threadsafe(cancel_others(), self.loop)
        try:
            ended.result(_END_LIMIT_S)
        except TimeoutError:
            logger.error("episodes of a training that has ended do not end")

    def _announce_sync(self) -> None:
        """Announces that the engine's next weights are the next policy; on the training thread.

        Called once per step, so it also logs the step's metrics: Tunix opens a new buffer whenever
        a call has another step than the last call, and the loop's thread is a step ahead.
        """
        self._versions.announce(self._versioned_rollout.weight_version + 1, self.policy_version + 1)
        lags, self._lags = self._lags, []
        num_failed, self._num_failed = self._num_failed, 0
        turns, self._turns = self._turns, []
        num_later, num_retokenized = np.sum([(0, 0), *turns], axis=0)
        self._cluster.buffer_metrics_async(
            {
                "episodes/failed_groups": (num_failed, np.sum),
                "episodes/retokenized_turns": (num_retokenized / max(num_later, 1), np.mean),
            },
            mode=_TRAIN,
            step=self._cluster.global_steps,
        )
        if lags:
            reduce = {"weight_lag/max": np.max}
            self._cluster.buffer_metrics_async(
                {
                    name: (reduce.get(name, np.mean)([lag[name] for lag in lags]), np.mean)
                    for name in lags[0]
                },
                mode=_TRAIN,
                step=self._cluster.global_steps,
            )

    # ------------------------------------------------------------------ sampling

    def _build_orchestrator(self) -> RolloutOrchestrator:
        orchestrator = super()._build_orchestrator()
        rollout = self._versioned_rollout
        rules = EpisodeRules(
            drops_failed=self._drops_failed,
            masks_retokenized=self._masks_retokenized,
            pad_id=rollout.pad_id(),
            max_prompt_length=rollout.rollout_config.max_prompt_length,
            policy_version=lambda: self.policy_version,
            failed=functools.partial(self._note_failure, orchestrator),
            retokenized=self._note_retokenized,
        )
        engine: Any = functools.partial(VersionedCollectEngine, rules=rules)
        orchestrator.engine_cls = engine  # Tunix only calls it
        return orchestrator

    async def _note_failure(
        self, orchestrator: RolloutOrchestrator, failure: EpisodeError, group: Any
    ) -> None:
        """Hands an episode's failure on: Tunix looks at it only when its pool is full."""
        self._failure = failure if self._drops_failed else self._failure or failure
        if self._drops_failed:
            logger.warning("group %s is dropped: %s", group, failure, exc_info=failure.error)
        elif orchestrator._group_queue_manager is not None:
            await orchestrator._group_queue_manager.put_exception(failure)

    def _note_retokenized(self, turn: int, trained: Sequence[int], found: Sequence[int]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "turn %d of an episode was sampled from other tokens than those before it in the "
            "sequence that is trained on, %s: the chat parser's text, tokenised again, gives other "
            "ids. Log-probs of such turns are of another context; mask_retokenized=True masks "
            "them, and the metric episodes/retokenized_turns counts them",
            turn + 1,
            describe_difference(trained, found),
        )

    def _create_agent_env_pair(self, single_example: Any, group_id: int, pair_index: int) -> Any:
        make = contained(super()._create_agent_env_pair, "making an agent and its environment")
        try:
            return make(single_example, group_id, pair_index)
        except (EpisodeError, TimeoutError) as error:
            failure = error if isinstance(error, EpisodeError) else EpisodeError(error, "making")
            return unmade(single_example, failure, group_id=group_id, pair_index=pair_index)

    async def _producer(self, orchestrator: Any, prompt_queue: Any, train_data_queue: Any) -> None:
        self._prompt_queue = prompt_queue
        await super()._producer(orchestrator, prompt_queue, train_data_queue)

    def _model_call(
        self,
        chat_lists: list[dict[str, str]],
        env: Any = None,
        max_generation_steps: int | None = None,
    ) -> VersionedRolloutOutput:
        with self._versioned_rollout.recorded_outputs() as outputs:
            result = super()._model_call(chat_lists, env, max_generation_steps)
        return VersionedRolloutOutput(
            **{field.name: getattr(result, field.name) for field in dataclasses.fields(result)},
            weight_versions=[row for output in outputs for row in output.weight_versions],
        )

    # ------------------------------------------------------------------ train examples

    def _batch_to_train_example(
        self, batch_results: list[Any], mode: tunix_cluster.Mode
    ) -> list[tunix_grpo.TrainExample]:
        if mode != _TRAIN:
            return super()._batch_to_train_example(batch_results, mode)
        if not self._process_in_consumer:
            examples = super()._batch_to_train_example(batch_results, mode)
            count = len(examples) * self._num_iterations()
            self._group_ids.extend([batch_results[0].group_id] * count)
            return examples
        # Groups end in any order, so their own numbers do not tell which step trains on them. This
        # number does: the batch is about to be trained on.
        return self._process_results(batch_results, mode, self._cluster.global_steps)

    def _process_results(
        self,
        trajectories: list[Any],
        mode: tunix_cluster.Mode = _TRAIN,
        expected_step: int | None = None,
    ) -> list[tunix_grpo.TrainExample]:
        """Runs on the loop's thread, or on the training thread if that computes log-probs."""
        rows = [self._versions.translate(item.traj["token_versions"]) for item in trajectories]
        if mode == _TRAIN:
            self._turns += [
                (max(item.traj["num_turns"] - 1, 0), item.traj["num_retokenized"])
                for item in trajectories
            ]
            self._mask_failed(trajectories)
        for item, row in zip(trajectories, rows, strict=True):
            sampled = row[row != NO_VERSION]
            if sampled.size:  # else Tunix's own value: the policy at the last call
                item.traj["policy_version"] = int(sampled.min())
        process = super()._process_results
        if threading.get_ident() != self._training_thread:
            process = contained(process, "a reward function")
        examples = process(trajectories, mode, expected_step)
        width = self.algo_config.max_response_length
        versions_BC = np.stack([right_pad(row, width, NO_VERSION) for row in rows])
        versioned = [_with_versions(example, versions_BC) for example in examples]
        if mode == _TRAIN and self._process_in_consumer:
            return [self._admit(example) for example in versioned]
        return list(versioned)

    def _mask_failed(self, trajectories: list[Any]) -> None:
        """Masks all episodes of groups in which one failed; EpisodeError for too many."""
        failed = {item.group_id for item in trajectories if item.traj.get("has_failed")}
        for group in dict.fromkeys(item.group_id for item in trajectories):
            self._num_failed += group in failed
            self._num_failed_in_row = self._num_failed_in_row + 1 if group in failed else 0
            if self._num_failed_in_row >= max(2, self._full_batch_size):
                assert self._failure is not None
                self._drops_failed = False  # the training ends with it
                raise self._failure
        others = [item for item in trajectories if not item.traj.get("has_failed")]
        for item in trajectories:
            if item.traj.get("has_failed"):  # the columns of its group, or at least their names
                same = [other for other in others if other.group_id == item.group_id]
                if same or others:
                    item.traj["original_input"] = (same or others)[0].traj["original_input"]
            if item.group_id in failed:
                item.traj["conversation_masks"] = np.zeros_like(item.traj["conversation_masks"])

    def _data_consumer_batch_generator(
        self, queue: Any, batch_size: int
    ) -> Generator[list[Any], Any, None]:
        """Runs on the training thread, just before it trains on the batch."""
        for batch in super()._data_consumer_batch_generator(queue, batch_size):
            if self._process_in_consumer:
                self._use(group[0].group_id for group in batch)
                yield batch  # trajectories; `_process_results` comes next
            else:
                self._use(self._group_ids.popleft() for _ in batch)
                yield [self._admit(example) for example in batch]

    def _use(self, group_ids: Iterable[int]) -> None:
        self._place.use([self._row_numbers[number - self._first_group] for number in group_ids])

    def _admit(self, example: VersionedTrainExample) -> VersionedTrainExample:
        """Measures the age of an example's tokens, and masks those that are too old."""
        versions_BC = np.asarray(example.token_versions)
        trained_BC = np.asarray(example.completion_mask).astype(bool) & (versions_BC != NO_VERSION)
        lag_BC = np.where(trained_BC, self.policy_version - versions_BC, 0)
        num_trained = max(int(trained_BC.sum()), 1)
        stale_BC = np.zeros_like(trained_BC)
        if self._max_token_lag is not None:
            stale_BC = lag_BC > self._max_token_lag
            mask_BC = example.completion_mask * ~stale_BC
            example = dataclasses.replace(example, completion_mask=mask_BC)
        is_mixed_B = [len(np.unique(row[row != NO_VERSION])) > 1 for row in versions_BC]
        self._lags.append(
            {
                "weight_lag/mean": float(lag_BC.sum() / num_trained),
                "weight_lag/max": float(lag_BC.max()),
                "weight_lag/masked_fraction": float(stale_BC.sum() / num_trained),
                "weight_lag/mixed_fraction": float(np.mean(is_mixed_B)),
            }
        )
        return example


def _joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch that Tunix divides into these rows again."""
    return {name: [row[name][0] for row in rows] for name in rows[0]}


def _with_versions(example: Any, versions_BC: np.ndarray) -> VersionedTrainExample:
    fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
    return VersionedTrainExample(**fields, token_versions=versions_BC)


def _check_options(
    cluster: tunix_cluster.RLCluster,
    config: tunix_grpo.GRPOConfig,
    weight_updates: str,
    max_token_lag: int | None,
) -> SglJaxRollout:
    rollout = cluster.rollout
    if not isinstance(rollout, SglJaxRollout):
        raise InvalidConfigError(
            "AgenticGrpoLearner needs a cluster whose rollout is a SglJaxRollout, got "
            f"{type(rollout).__name__}"
        )
    if weight_updates not in WEIGHT_UPDATES:
        raise InvalidConfigError(
            f"weight_updates must be one of {WEIGHT_UPDATES}, got {weight_updates!r}"
        )
    if max_token_lag is not None:
        if not isinstance(max_token_lag, int) or max_token_lag < 0:
            raise InvalidConfigError(f"max_token_lag must be None or >= 0, got {max_token_lag!r}")
        if cluster.cluster_config.training_config.max_seq_token_per_tpu is not None:
            raise InvalidConfigError(
                f"max_token_lag={max_token_lag} cannot be combined with "
                "RLTrainingConfig.max_seq_token_per_tpu: Tunix's packing takes masked tokens for "
                "the end of a sequence"
            )
    if weight_updates == "in_flight":
        if cluster.perf_config is not None and cluster.perf_config.custom_export_fn_v2 is not None:
            raise InvalidConfigError(
                "weight_updates='in_flight' goes without PerfMetricsConfig.custom_export_fn_v2: "
                "Tunix's tracer fails episodes that are in flight when a step ends"
            )
        if not config.use_rollout_logps:
            raise InvalidConfigError(
                "weight_updates='in_flight' needs GRPOConfig.use_rollout_logps=True: several "
                "policies sample one completion, and only the rollout has their log-probs"
            )
        if rollout.weight_update_mode == "abort":
            raise InvalidConfigError(
                "weight_updates='in_flight' needs a rollout whose weight_update_mode is not "
                "'abort': Tunix would train on completions that were cut short"
            )
    return rollout
