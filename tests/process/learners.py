"""Scripts with learners that are interrupted in a step; for a child of `zygote.py`."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from absl import logging
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig as AgenticConfig
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster

from sgljax_engine import EngineShutdownError
from tests.adapter import agentic_parts, grpo_parts
from tests.geometry import SMALL
from tests.process import rewards
from tests.process.ends import ENDS
from tests.process.scenes import tell
from tunix_sgljax import AgenticGrpoLearner, OverSampling, OverSamplingGrpoLearner, SglJaxRollout

NUM_STEPS = 10**6
LONG_STEP = 20_000
"""Prompts of a step that takes many minutes, two a call."""


class Asker:
    """Asks for the case's signal at the second call of `ask`, and waits until it came."""

    def __init__(self, case: dict[str, str]) -> None:
        row = ENDS[case["ends"]]
        self._pipe, self._signal = int(case["ask"]), row.signal
        self._count = 0
        if case["ends"] == "handles":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(row.code))

    def ask(self) -> None:
        self._count += 1
        if self._count == 2:
            tell("ready")
            os.write(self._pipe, self._signal.encode())

    def reward(self, prompts: Any, completions: Any, **_: Any) -> list[float]:
        del prompts
        self.ask()
        return [float(len(text)) for text in completions]


def endless(num_prompts: int) -> Iterator[dict[str, Any]]:
    texts = list(itertools.islice(itertools.cycle(grpo_parts.PROMPTS), num_prompts))
    batch = {"prompts": np.array(texts)}
    return itertools.repeat(batch, NUM_STEPS)


def cluster_of(**training: Any) -> Any:
    parts = grpo_parts.make_parts(
        rollout_engine=functools.partial(SglJaxRollout, **SMALL), max_steps=NUM_STEPS
    )
    config: Any = parts.arguments["cluster_config"].training_config
    for name, value in training.items():
        setattr(config, name, value)
    return RLCluster(**parts.arguments)


def sampling(asker: Asker) -> None:
    """The learner's thread samples, in a step that takes many minutes."""
    cluster = cluster_of(mini_batch_size=LONG_STEP)
    learner = GRPOLearner(cluster, grpo_parts.grpo_config(), asker.reward)
    learner.train(endless(LONG_STEP))


def training(asker: Asker) -> None:
    """The actor is updated."""
    cluster = cluster_of()
    update = cluster.update_actor

    def watched(*args: Any) -> None:
        asker.ask()
        update(*args)

    cluster.update_actor = watched
    learner = GRPOLearner(cluster, grpo_parts.grpo_config(), grpo_parts.reward)
    learner.train(endless(2))


def over_sampling(asker: Asker) -> None:
    cluster = cluster_of()
    learner = OverSamplingGrpoLearner(
        cluster,
        grpo_parts.grpo_config(beta=0.0),
        asker.reward,
        over_sampling=OverSampling(factor=2.0),
    )
    learner.train(endless(2))


def agentic(asker: Asker) -> None:
    """Episodes wait in Tunix's executor and event loop."""

    class Turns(agentic_parts.Turns):
        def _step_impl(self, action: Any) -> Any:
            asker.ask()
            return super()._step_impl(action)

    cluster = agentic_parts.make_cluster(num_steps=NUM_STEPS, rollout=SglJaxRollout)
    learner = AgenticGrpoLearner(
        cluster,
        AgenticConfig(
            num_generations=agentic_parts.GROUP,
            max_response_length=agentic_parts.RESPONSE,
            max_concurrency=2 * agentic_parts.PER_STEP * agentic_parts.GROUP,
            off_policy_steps=1,
        ),
        [agentic_parts.reward],
        chat_parser=agentic_parts.Parser(),
        env_class=Turns,
    )
    learner.train(agentic_parts.batches(1000))


def reward_workers() -> None:
    """Rewards come from processes, which have copies of the rollout; none is of use or hangs."""
    fork = multiprocessing.get_context("fork")
    cluster = cluster_of(max_steps=grpo_parts.NUM_STEPS)
    rollout = cluster.rollout
    answers, answer = fork.Pipe(duplex=False)

    def use_rollout() -> None:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: rollout.generate(grpo_parts.PROMPTS, grpo_parts.rollout_config()),
            lambda: rollout.get_per_token_logps(None, None),
            lambda: rollout.update_params({}),
            lambda: rollout.engine,
        )
        for call in calls:
            with pytest.raises(EngineShutdownError, match="this rollout lives in process"):
                call()
        rollout.close()
        answer.send("refused")

    def reward(completions: list[str], **_: Any) -> list[float]:
        with fork.Pool(2) as pool:
            found = pool.map(rewards.reward, completions)
        child = fork.Process(target=use_rollout)
        child.start()
        child.join()
        assert answers.recv() == "refused"  # forked by an executor, it ends with code 1 in 3.11
        return found

    GRPOLearner(cluster, grpo_parts.grpo_config(), reward).train(grpo_parts.list_batches())
    grpo_parts.check_trained(cluster)
    rollout.close()
    tell("trained")


DOES: dict[str, Callable[[Asker], None]] = {
    each.__name__: each for each in (sampling, training, over_sampling, agentic)
}


def play(case: dict[str, str]) -> None:
    """Trains until the case's signal has ended the process, or to the end."""
    logging.set_verbosity(logging.ERROR)
    if case["does"] == "reward_workers":
        reward_workers()
        return
    DOES[case["does"]](Asker(case))
