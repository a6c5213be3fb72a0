"""Samples the same prompts again and again, without drafts and with, in pairs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from tunix.rl.rl_cluster import Mode

from benchmarks.lib.drafted_rollout import DraftedRollout, total
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.training import TrainConfig, prepare
from tunix_sgljax.training.cluster import end_tokens, make_meshes, rollout_configs, rollout_engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeats:
    """Rollouts of the same prompts, each pair with its own seeds.

    Attributes:
        num_prompts: Distinct prompts.
        num_rows: Samples of all of them, which are decoded together.
        answer_tokens: Mean tokens of an answer.
        seconds: By the name of the config, of each rollout.
        drafted: Sum of the rollouts with drafts.
        num_differing: Rollouts of which a token differs from its pair's.
    """

    num_prompts: int
    num_rows: int
    answer_tokens: float
    seconds: dict[str, list[float]]
    drafted: DraftedRollout
    num_differing: int

    @property
    def ratios(self) -> list[float]:
        """Of each pair, how many times as fast the one with drafts was."""
        return [a / b for a, b in zip(self.seconds["off"], self.seconds["auto"], strict=True)]


def measure_repeats(
    configs: dict[str, TrainConfig], policy: nnx.Module, numbers: Sequence[int], num_pairs: int
) -> list[Repeats]:
    """Samples some prompts; a pass before the first pair is the drafts' history.

    Args:
        configs: Of "off" and "auto", alike but for engine options.
        policy: Its weights sample.
        numbers: How many prompts are sampled together, one measurement each.
        num_pairs: Pairs of each; which of a pair is first alternates.
    """
    prompts, count = _prompts(configs["off"]), configs["off"].num_generations
    with contextlib.ExitStack() as stack:
        workers = {name: _worker(config, policy) for name, config in configs.items()}
        for worker in workers.values():
            stack.callback(worker.close)
            worker.engine.warmup()
        return [
            _measure(workers, prompts[: number * count], number, num_pairs) for number in numbers
        ]


def _measure(
    workers: dict[str, SglJaxRollout], prompts: list[str], num_prompts: int, num_pairs: int
) -> Repeats:
    rollouts: dict[str, list[DraftedRollout]] = {name: [] for name in workers}
    num_differing = 0
    for pair in range(num_pairs + 1):
        tokens: dict[str, Any] = {}
        for name in list(workers)[:: 1 if pair % 2 else -1]:
            rollout, tokens[name] = _sample(workers[name], prompts)
            rollouts[name] += [rollout] if pair else []
        num_differing += tokens["off"] != tokens["auto"]
    return Repeats(
        num_prompts=num_prompts,
        num_rows=len(prompts),
        answer_tokens=total(rollouts["off"]).num_tokens / (len(prompts) * num_pairs),
        seconds={name: [each.seconds for each in made] for name, made in rollouts.items()},
        drafted=total(rollouts["auto"]),
        num_differing=num_differing,
    )


def _worker(config: TrainConfig, policy: nnx.Module) -> SglJaxRollout:
    tokenizer = prepare(config).tokenizer
    ends = end_tokens(config, tokenizer.eos_id())
    worker = rollout_engine(config)(
        rollout_actor=policy,
        tokenizer=tokenizer,
        mesh=make_meshes(config)[1],
        rollout_config=rollout_configs(config, ends)[Mode.TRAIN],
    )
    assert isinstance(worker, SglJaxRollout)
    return worker


def _prompts(config: TrainConfig) -> list[str]:
    rows = prepare(config).task.rows[: config.batch_size]
    count = config.num_generations
    return [row["prompts"] for row in rows for _ in range(count)]


def _sample(worker: SglJaxRollout, prompts: list[str]) -> tuple[DraftedRollout, list[list[int]]]:
    """A rollout with an empty prefix cache, as after a weight sync, and its tokens."""
    worker.engine.flush_cache()
    gc.collect()
    before = worker.observers.totals()
    output = worker.generate(prompts, worker.rollout_config)
    tokens = [np.asarray(ids).tolist() for ids in output.tokens]
    return DraftedRollout.between(before, worker.observers.totals()), tokens
