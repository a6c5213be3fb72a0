"""GRPO on addition with a rollout of any kind, whose rows are counted."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from addition_task import problem_batches
from fleet.audit import Audit, AuditedCluster, AuditedRollout
from grpo_addition import make_cluster, make_learner
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.training import TrainConfig
from tunix_sgljax.training.report import StepRecord, StepRecorder
from tunix_sgljax.training.rollouts import TimedRollout


def train(
    config: TrainConfig,
    make_rollout: Callable[..., SglJaxRollout],
    audit: Audit,
    on_step: Callable[[StepRecord], None],
    limit_s: float | None = None,
) -> list[StepRecord]:
    """Trains with Tunix's learner, and returns what happened at each step.

    Args:
        config: That of `grpo_addition.py`.
        make_rollout: Makes the rollout from Tunix's keywords.
        audit: Counts the rows.
        on_step: Gets each step's record.
        limit_s: Seconds after which no further step is started, if batches are left; None for none.
    """
    made: list[SglJaxRollout] = []

    def audited(**keywords: Any) -> AuditedRollout:
        made.append(make_rollout(**keywords))
        return AuditedRollout(made[0], audit)

    recorder = StepRecorder(on_step)
    engine = functools.partial(TimedRollout, engine=audited, on_generate=recorder.add_rollout)
    with contextlib.ExitStack() as ends:
        cluster = make_cluster(config, engine, AuditedCluster)
        for rollout in made:
            ends.callback(rollout.close)
        assert isinstance(cluster, AuditedCluster)
        cluster.audit = audit
        make_learner(config, cluster, recorder).train(_batches(config, limit_s))
    return recorder.records


def _batches(config: TrainConfig, limit_s: float | None) -> Iterator[Any]:
    """Batches of problems, until the limit."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    for batch in problem_batches(config.num_batches, config.batch_size, config.seed):
        if deadline is not None and time.monotonic() >= deadline:
            return
        yield batch
