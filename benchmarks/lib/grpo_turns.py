"""Trainings that take turns, step by step, so that their rollouts meet the same machine."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from flax import nnx
from tunix.perf.metrics import MetricsBuffer
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from benchmarks.lib.drafted_rollout import DraftedRollout
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.in_flight.wrapping import RolloutWrapper
from tunix_sgljax.training import TrainConfig, prepare
from tunix_sgljax.training.cluster import close_rollout, make_cluster, make_learner, rollout_engine
from tunix_sgljax.training.task import batches

_REWARD = "rewards/score/mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What a training did, step by step.

    Attributes:
        rollouts: Seconds and drafts.
        tokens: Token ids of the step's samples.
        rewards: Their mean reward.
        losses: The trainer's loss.
        weights_digest: Of all bits of the policy at the end.
        policy: The policy at the end.
    """

    rollouts: list[DraftedRollout]
    tokens: list[list[list[int]]]
    rewards: list[float]
    losses: list[float]
    weights_digest: str
    policy: nnx.Module

    def first_difference(self, other: Training) -> dict[str, int]:
        """For what differs by a bit from another training, the first step, from 1, that has it."""
        found = {}
        for name in ("tokens", "rewards", "losses"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            differing = [step for step, (mine, its) in enumerate(pairs, 1) if mine != its]
            found |= {name: differing[0]} if differing else {}
        if self.weights_digest != other.weights_digest:
            found["weights"] = len(self.rewards)
        return found


class Turns:
    """Lets threads work one at a time, in a fixed order."""

    def __init__(self, names: Sequence[str]) -> None:
        """The first name begins."""
        self._order = list(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        """Returns when it is the turn of `name`."""
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == name)

    def next(self, name: str) -> None:
        """Ends the turn of `name`, and returns when its next one begins."""
        with self._changed:
            self._order.append(self._order.pop(0))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._order[0] == name)

    def leave(self, name: str) -> None:
        """Takes `name` out, whoever has the turn."""
        with self._changed:
            self._order.remove(name)
            self._changed.notify_all()


class RecordingRollout(RolloutWrapper):
    """Records what each `generate` sampled, after a warm-up of the engine."""

    def __init__(self, *, make_engine: Any, **arguments: Any) -> None:
        """Takes what Tunix passes to a rollout worker, and who makes the inner one from it."""
        super().__init__(make_engine(**arguments))
        self.rollouts: list[DraftedRollout] = []
        self.tokens: list[list[list[int]]] = []

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Generates with the inner worker."""
        assert isinstance(self.inner, SglJaxRollout)
        if not self.rollouts:
            self.inner.engine.warmup()
        gc.collect()  # or it would take a quarter of a second of some rollout
        before = self.inner.observers.totals()
        output = self.inner.generate(prompts, rollout_config, **kwargs)
        self.rollouts.append(DraftedRollout.between(before, self.inner.observers.totals()))
        self.tokens.append([np.asarray(ids).tolist() for ids in output.tokens])
        return output


def train_in_turns(configs: dict[str, TrainConfig]) -> dict[str, Training]:
    """Trains with each config, a step of each in turn; they are alike but for engine options."""
    turns = Turns(list(configs))
    with ThreadPoolExecutor(len(configs)) as pool:
        futures = {
            name: pool.submit(_train, name, config, turns) for name, config in configs.items()
        }
    return {name: future.result() for name, future in futures.items()}


def _train(name: str, config: TrainConfig, turns: Turns) -> Training:
    turns.wait(name)
    worker: BaseRollout | None = None
    try:
        prepared = prepare(config)
        make_worker = functools.partial(RecordingRollout, make_engine=rollout_engine(config))
        cluster = make_cluster(config, prepared.spec, prepared.tokenizer, make_worker)
        worker = cluster.rollout
        assert isinstance(worker, RecordingRollout)
        rewards: list[float] = []
        cluster.with_external_metrics_logger(functools.partial(_add_reward, rewards))
        learner = make_learner(config, cluster, prepared.task.reward_fns)
        learner.train(_batches_in_turn(name, config, prepared.task.rows, turns))
        return _result(cluster, worker, rewards)
    finally:
        if isinstance(worker, RecordingRollout):
            close_rollout(worker.inner)
        turns.leave(name)


def _batches_in_turn(
    name: str, config: TrainConfig, rows: Sequence[dict[str, Any]], turns: Turns
) -> Iterator[dict[str, Any]]:
    """Batches of the training; the learner asks for the next one when a step is done."""
    size, number = config.batch_size, config.num_batches
    for batch in batches(rows, size, shuffle_seed=None, num_batches=number):
        turns.next(name)
        yield batch


def _add_reward(rewards: list[float], metrics: MetricsBuffer) -> None:
    if _REWARD in metrics.metrics:
        values, _ = metrics.metrics[_REWARD]
        rewards.append(float(np.mean(np.asarray(values, np.float64))))


def _result(cluster: RLCluster, worker: RecordingRollout, rewards: list[float]) -> Training:
    policy = cluster.actor_trainer.model
    logger = cluster.actor_trainer.metrics_logger
    assert logger is not None
    losses = logger.get_metric_history("actor", "loss", "train")
    return Training(
        rollouts=worker.rollouts,
        tokens=worker.tokens,
        rewards=rewards,
        losses=[float(loss) for loss in losses],
        weights_digest=_digest(policy),
        policy=policy,
    )


def _digest(policy: nnx.Module) -> str:
    digest = hashlib.sha256()
    for name, param in nnx.to_flat_state(nnx.state(policy, nnx.Param)):
        digest.update(repr(name).encode())
        digest.update(np.asarray(param[...]).tobytes())
    return digest.hexdigest()
