"""Tiny trainings that die in the middle and are resumed; for a child of `tests/process/zygote.py`.

Weights are almost zero, so that all tokens are about as likely under all policies: a completion is
its noise. The journal, a file of JSON lines, outlives the process.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging
from flax import nnx
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig as AgenticConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.utils import create_critic_model

from tests import lora_models
from tests import tunix_reference as ref
from tests.adapter.agentic_parts import Parser
from tests.adapter.grpo_parts import MODEL, one_device_mesh, rollout_config
from tests.adapter.helpers import EndingTokenizer
from tests.geometry import SMALL
from tunix_sgljax import (
    AgenticGrpoLearner,
    OverSampling,
    OverSamplingAgenticGrpoLearner,
    OverSamplingGrpoLearner,
    SglJaxRollout,
)

NUM_ROWS = 32
BATCH_SIZE = 4
NUM_GENERATIONS = 2
ENDS = (2, 3, 4, 5, 6, 7)
"""Tokens that end a completion: lengths differ, so that groups are left."""

MAX_TOKENS = 16

PARTS: dict[str, dict[str, int]] = {
    "whole": {},
    "micro": {"train_micro_batch_size": 2, "rollout_micro_batch_size": 4},
    "calls": {"train_micro_batch_size": 2, "rollout_micro_batch_size": 2},
    "updates": {"mini_batch_size": 2},
    "agents": {"train_micro_batch_size": 2},
}
"""How a batch is divided: not at all; for the trainer; for the rollout too; for several updates; as
agents need it."""


def prompt_of(row: int) -> str:
    """A prompt that says its row."""
    return f"{10 + row % 7} {10 + row // 7}"


def batches(first_row: int = 0) -> list[dict[str, Any]]:
    """The data, whose last batch is smaller."""
    rows = np.arange(first_row, first_row + NUM_ROWS)
    return [
        {
            "prompts": np.array([prompt_of(row) for row in part]),
            "row": part,
            "tags": np.array([f"tag {row}" for row in part]),
        }
        for part in (rows[i : i + BATCH_SIZE] for i in range(0, NUM_ROWS, BATCH_SIZE))
    ]


class Journal:
    """Tells what was sampled, and kills the process a while after the `num_calls`-th call."""

    def __init__(self, path: Path, num_calls: int, delay_s: float) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._num_left = num_calls
        self._delay_s = delay_s
        self.updates: Callable[[], int] = lambda: 0

    def tell(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())
        if not self._num_left:
            threading.Thread(target=self._kill, daemon=True).start()
        self._num_left -= 1

    def reward(self, prompts: Any, completions: Any, row: Any, tags: Any, **_: Any) -> list[float]:
        """Whole numbers, as PPO needs them; checks the columns."""
        rows = [int(np.asarray(each).item()) for each in row]  # agents give arrays
        assert [prompt_of(each) for each in rows] == [np.asarray(p).item() for p in prompts], rows
        assert [f"tag {each}" for each in rows] == [np.asarray(t).item() for t in tags], rows
        self.tell(update=self.updates(), rows=rows, texts=list(completions))
        return [float(len(text) % 3) for text in completions]

    def _kill(self) -> None:
        time.sleep(self._delay_s)  # not to wait for anything: the moment is to be any
        os.kill(os.getpid(), signal.SIGKILL)


def flat(model: nnx.Module) -> nnx.Module:
    """The model with weights of almost nothing."""
    nnx.update(model, jax.tree.map(lambda x: x * 1e-3, nnx.state(model, nnx.Param)))
    return model


def make_cluster(case: dict[str, Any]) -> RLCluster:
    kind = case["kind"]
    shape = MODEL | {"num_layers": 1, "use_tied_embedding": kind != "ppo"}
    parts = PARTS[case["parts"]]
    training: dict[str, Any] = {
        "mini_batch_size": BATCH_SIZE,
        "train_micro_batch_size": parts.get("mini_batch_size", BATCH_SIZE),
        "actor_optimizer": optax.adam(1e-5),
        "critic_optimizer": optax.adam(1e-5) if kind == "ppo" else None,
        "checkpoint_root_directory": case["checkpoints"],
        "checkpointing_options": ocp.CheckpointManagerOptions(
            save_interval_steps=case["save_every"], max_to_keep=2
        ),
        # Else agents' examples are made long before it is known which update they are for.
        "compute_logps_micro_batch_size": 2 if kind.startswith("agentic") else None,
        "eval_every_n_steps": 10**6,
        "max_steps": case["max_steps"] or 10**6,
        **parts,
    }
    roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT, Role.CRITIC)
    mesh = one_device_mesh()
    seeds = {} if case["seed"] == "engine" else {"seed": 7}
    engine: Any = functools.partial(SglJaxRollout, random_seed=7, **SMALL)
    actor = reference = flat(ref.make_tunix_qwen3(shape))
    if kind == "lora":
        rule = {"module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 8.0}
        actor = lora_models.add_pairs(reference, [rule])
    elif kind == "ppo":
        reference = flat(ref.make_tunix_qwen3(shape))
    cluster = RLCluster(
        actor=actor,
        reference=reference if kind == "ppo" else None,
        critic=create_critic_model(actor) if kind == "ppo" else None,
        tokenizer=EndingTokenizer(eos=1),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla" if kind == "vanilla" else engine,
            rollout_config=rollout_config(
                max_tokens_to_generate=MAX_TOKENS,
                temperature=1.0,
                eos_tokens=list(ENDS),
                return_logprobs=True,
                **seeds,
            ),
            training_config=RLTrainingConfig(**training),
        ),
    )
    cluster.actor_trainer.config.max_steps = None  # a trainer with a limit of its own draws a bar
    if kind == "ppo":
        cluster.critic_trainer.config.max_steps = None
    return cluster


def make_learner(case: dict[str, Any], cluster: RLCluster, reward: Any) -> Any:
    if case["kind"] == "ppo":
        return PPOLearner(cluster, PPOConfig(), reward)
    config = GRPOConfig(
        num_generations=NUM_GENERATIONS, beta=0.0, num_iterations=case["iterations"]
    )
    if case["kind"].startswith("agentic"):
        agents = AgenticConfig(
            num_generations=NUM_GENERATIONS,
            beta=0.0,
            num_iterations=case["iterations"],
            max_response_length=MAX_TOKENS,
            max_concurrency=8,
            off_policy_steps=1,
        )
        if case["kind"] == "agentic":
            return AgenticGrpoLearner(cluster, agents, [reward], chat_parser=Parser())
        tail = OverSampling(factor=1.5, max_age=2)
        return OverSamplingAgenticGrpoLearner(
            cluster, agents, [reward], chat_parser=Parser(), over_sampling=tail
        )
    if case["kind"] in ("carry", "abort", "drop"):
        return OverSamplingGrpoLearner(
            cluster,
            config,
            reward,
            over_sampling=OverSampling(factor=1.5, unfinished=case["kind"], max_age=2),
        )
    return GRPOLearner(cluster, config, reward)


def play(case: dict[str, Any]) -> None:
    """Trains until the process is killed, or the data is over.

    Args:
        case: "kind" of training, folder of "checkpoints", "journal", "parts", "iterations",
            "seed", "save_every", "max_steps" of weights, "num_calls" before it dies (-1: never)
            and "delay_s".
    """
    logging.set_verbosity(logging.ERROR)
    journal = Journal(Path(case["journal"]), case["num_calls"], case["delay_s"])
    cluster = make_cluster(case)
    trainer = cluster.actor_trainer
    learner = make_learner(case, cluster, journal.reward)
    journal.updates = lambda: trainer.train_steps
    journal.tell(starts=trainer.train_steps, step=cluster.global_steps)
    learner.train(batches())
    if isinstance(cluster.rollout, SglJaxRollout):
        cluster.rollout.close()
    journal.tell(ends=trainer.train_steps, step=cluster.global_steps)
