"""Tunix's agentic GRPO learner with a number of groups in work, and a bound on their age."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Queue
from typing import Any

import numpy as np
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.agentic import agentic_grpo_learner as tunix_grpo

from sgljax_engine import InvalidConfigError
from tunix_sgljax.in_flight.agentic import AgenticGrpoLearner
from tunix_sgljax.long_tail.config import OverSampling


class _OnePrompt(dict[str, Any]):
    """A batch of one prompt, as Tunix's learner divides batches."""


class PromptGate:
    """Lets so many prompts through as groups are wanted in work; the queue that Tunix reads.

    `born` is the policy when each prompt passed, in the order in which Tunix numbers their groups.
    Any thread.
    """

    def __init__(
        self,
        prompts: Queue[dict[str, Any] | None],
        num_open: int,
        policy_version: Callable[[], int],
        divide: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
    ) -> None:
        self.born: list[int] = []
        self._policy_version = policy_version
        self._divide = divide
        self._changed = threading.Condition()
        self._rows: collections.deque[dict[str, Any]] = collections.deque()
        self._num_open = num_open
        self._has_ended = self._is_closed = False
        reader = threading.Thread(target=self._read, args=(prompts,), daemon=True)
        reader.name = "prompt-gate"
        reader.start()

    def get(self) -> dict[str, Any] | None:
        """The next prompt, as a batch of one, once it may pass; None after the last one."""
        with self._changed:
            self._changed.wait_for(self._is_decided)
            if self._is_closed or not self._rows:
                return None
            self._num_open -= 1
            self.born.append(self._policy_version())
            return self._rows.popleft()

    def put(self, end: None = None) -> None:
        """Lets nothing through any more; Tunix's producer puts None when it has ended."""
        del end
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def open(self, count: int) -> None:
        with self._changed:
            self._num_open += count
            self._changed.notify_all()

    def _is_decided(self) -> bool:
        is_empty = not self._rows
        return self._is_closed or (self._has_ended if is_empty else self._num_open > 0)

    def _read(self, prompts: Queue[dict[str, Any] | None]) -> None:
        while (batch := prompts.get()) is not None:
            rows = [_OnePrompt(row) for row in self._divide(batch)]
            with self._changed:
                self._rows.extend(rows)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class OverSamplingAgenticGrpoLearner(AgenticGrpoLearner):
    """AgenticGrpoLearner with a number of groups in work, at most so many updates old.

    Tunix's agentic learner has `off_policy_steps` + 1 batches of groups in work and trains on those
    that end first, however old. Here `factor` batches are in work, and a step waits for groups that
    would become older than `max_age` updates. All groups are trained on, each once.

    Only `unfinished="carry"` is possible: if an episode is cancelled, Tunix's orchestrator ends all
    others, and the rest of its group would be waited for without end. Nor does it tell the texts of
    a group before its episodes end, so there is no `known_rewards`.

    The metric `over_sampling/carried_groups` counts groups that a step leaves in work.
    """

    def __init__(
        self,
        rl_cluster: tunix_cluster.RLCluster,
        algo_config: tunix_grpo.GRPOConfig,
        *args: Any,
        over_sampling: OverSampling | None = None,
        **options: Any,
    ) -> None:
        """Takes the arguments of AgenticGrpoLearner and one more.

        Args:
            rl_cluster: Cluster with a SglJaxRollout.
            algo_config: Tunix's agentic GRPOConfig.
            *args: More arguments of AgenticGrpoLearner.
            over_sampling: How many groups are in work; None takes the defaults.
            **options: Options of AgenticGrpoLearner.

        Raises:
            InvalidConfigError: names the option that this learner cannot have, and its value.
        """
        self._config = OverSampling() if over_sampling is None else over_sampling
        # First: Tunix's learner starts a thread, and sets the cluster's steps.
        _check_options(self._config, rl_cluster, algo_config, options)
        super().__init__(rl_cluster, algo_config, *args, **options)
        self._gate: PromptGate | None = None
        self._taken: set[int] = set()

    async def _producer(self, orchestrator: Any, prompt_queue: Any, train_data_queue: Any) -> None:
        num_asked = self._config.num_asked(self._full_batch_size)
        self._gate = PromptGate(
            prompt_queue, num_asked, lambda: self.policy_version, self._divide_batch
        )
        gate: Any = self._gate  # Tunix calls `get`, and `put` at its end
        await super()._producer(orchestrator, gate, train_data_queue)

    def _divide_batch(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return super()._create_micro_batch_iterator(iter([batch]), 1)

    def _create_micro_batch_iterator(
        self, full_batch_iterator: Iterator[dict[str, Any]], micro_batch_size: int
    ) -> Iterator[dict[str, Any]]:
        """What has passed the gate is divided already; twice would flatten lists."""
        first = next(full_batch_iterator, None)
        if isinstance(first, _OnePrompt):
            return iter([first])
        batches = itertools.chain([] if first is None else [first], full_batch_iterator)
        return super()._create_micro_batch_iterator(batches, micro_batch_size)

    def _announce_sync(self) -> None:
        super()._announce_sync()
        assert self._gate is not None
        num_carried = len(self._gate.born) - len(self._taken)
        self._cluster.buffer_metrics_async(
            {"over_sampling/carried_groups": (num_carried, np.mean)},
            mode=tunix_cluster.Mode.TRAIN,
            step=self._cluster.global_steps,
        )

    def _data_consumer_batch_generator(
        self, queue: Any, batch_size: int
    ) -> Generator[list[Any], Any, None]:
        """Micro-batches of whole steps; on the training thread."""
        arrivals = iter(lambda: queue.get(block=True), None)
        arrived: dict[int, Any] = {}
        while True:
            num_left = self._full_batch_size
            while num_left:
                batch = self._next_groups(arrivals, arrived, min(batch_size, num_left), num_left)
                if not batch:
                    return
                self._use(group[0].group_id for group in batch)
                yield batch
                num_left -= len(batch)
            assert self._gate is not None
            max_steps = self._training_config.max_steps
            if max_steps and self._cluster.global_steps >= max_steps:
                self._gate.put()  # Tunix asks for no more
            self._gate.open(self._full_batch_size)  # after the weight update

    def _next_groups(
        self, arrivals: Iterator[Any], arrived: dict[int, Any], count: int, num_left: int
    ) -> list[Any]:
        """Groups to train on next: those that may not become older, then in order."""
        is_over = False
        while not is_over:
            due = self._due()
            num_missing = len(due - arrived.keys())
            if len(arrived) >= count and num_missing <= num_left - count:
                break
            group = next(arrivals, None)
            is_over = group is None
            if group is not None:
                arrived[group[0].group_id - self._first_group] = group
        due = self._due()
        chosen = sorted(arrived, key=lambda number: (number not in due, number))[:count]
        self._taken.update(chosen)
        return [arrived.pop(number) for number in chosen]

    def _due(self) -> set[int]:
        if self._gate is None:  # Tunix's producer has not started, on another thread
            return set()
        youngest = self.policy_version - self._config.max_age
        return {n for n, born in enumerate(self._gate.born) if born <= youngest} - self._taken


def _check_options(
    config: OverSampling,
    cluster: tunix_cluster.RLCluster,
    algorithm: tunix_grpo.GRPOConfig,
    options: dict[str, Any],
) -> None:
    needs = "OverSamplingAgenticGrpoLearner needs"
    if not config.carries:
        raise InvalidConfigError(
            f"{needs} OverSampling(unfinished='carry'), got {config.unfinished!r}: where one "
            "episode is cancelled, Tunix's orchestrator ends all"
        )
    if config.known_rewards is not None:
        raise InvalidConfigError(
            f"{needs} OverSampling(known_rewards=None), got {config.known_rewards!r}: Tunix tells "
            "no texts of episodes that have not ended"
        )
    if options.get("weight_updates", "in_flight") != "in_flight":
        raise InvalidConfigError(
            f"{needs} weight_updates='in_flight', got {options['weight_updates']!r}: Tunix's own "
            "lock waits for the longest episode"
        )
    if algorithm.off_policy_steps < 1:
        raise InvalidConfigError(
            f"{needs} GRPOConfig.off_policy_steps >= 1, got {algorithm.off_policy_steps}: Tunix "
            "hands over no prompt before its turn"
        )
    training = cluster.cluster_config.training_config
    size = training.compute_logps_micro_batch_size or 1
    if size < 2:
        raise InvalidConfigError(
            f"{needs} RLTrainingConfig.compute_logps_micro_batch_size >= 2, got {size}: else Tunix "
            "makes train examples before it is known which step has them"
        )
