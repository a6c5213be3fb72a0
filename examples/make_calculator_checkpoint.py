"""Makes the supervised checkpoint from which `grpo_tools.py` starts.

    python examples/make_calculator_checkpoint.py --output examples/data/calculator_sft.safetensors

The policy learns from episodes in which, at a third of all turns, somebody stopped asking the
calculator and wrote a wrong result; see `supervised.py`.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import RolloutConfig

from calculator import (
    END_OF_TURN,
    MAX_PROMPT_LENGTH,
    MAX_RESPONSE_LENGTH,
    MAX_TURNS,
    Calculation,
    Tokenizer,
)
from calculator_task import (
    CalculatorAgent,
    CalculatorEnvironment,
    ChatParser,
    model_config,
    sample_problem,
)
from supervised import Batch, Defaults, Task, make_checkpoint, spoil
from tunix_sgljax import SglJaxRollout

LENGTH = 80  # of an episode with its prompt and begin token


def demonstration(
    problem: Calculation, corrupted: float, rng: np.random.Generator
) -> list[tuple[str, str]]:
    """Returns turns of the policy and the tool's replies; a share of `corrupted` give up."""
    turns = []
    for call, result in problem.calls:
        if rng.random() < corrupted:
            return [*turns, (f"{spoil(problem.answer, rng)}{END_OF_TURN}", "")]
        turns.append((f"{call}{END_OF_TURN}", f" {result} "))
    return [*turns, (f"{problem.answer}{END_OF_TURN}", "")]


def batches(batch_size: int, corrupted: float, seed: int) -> Iterator[Batch]:
    """Yields batches of demonstrations, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        tokens = np.full((batch_size, LENGTH), Tokenizer().pad_id(), np.int32)
        is_target = np.zeros(tokens.shape, np.bool_)
        for row in range(batch_size):
            ids, mask = _row(corrupted, rng)
            tokens[row, : len(ids)] = ids
            is_target[row, : len(ids)] = mask
        yield Batch(tokens, is_target)


def _row(corrupted: float, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """An episode's tokens, and which are the policy's: the tool's replies are no targets."""
    tokenizer = Tokenizer()
    problem = sample_problem(rng)
    ids = [tokenizer.bos_id(), *tokenizer.encode(problem.prompt)]
    is_target = [False] * len(ids)
    for turn, reply in demonstration(problem, corrupted, rng):
        ids += tokenizer.encode(turn + reply)
        is_target += [True] * len(turn) + [False] * len(reply)
    return ids, is_target


def sampled_accuracy(model: qwen3.Qwen3, task: Task, num_problems: int, seed: int) -> float:
    """Returns the share of right answers when sampling at temperature 1, tools included."""
    rng = np.random.default_rng(seed)
    problems = [task.sample_problem(rng) for _ in range(num_problems)]
    rollout_config = RolloutConfig(
        max_tokens_to_generate=32,
        max_prompt_length=MAX_PROMPT_LENGTH,
        kv_cache_size=MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH + 32,
        temperature=1.0,
    )
    rollout = SglJaxRollout(
        rollout_actor=model,
        tokenizer=Tokenizer(),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")),
        rollout_config=rollout_config,
        max_running_requests=64,
        random_seed=seed,
    )
    try:
        return float(np.mean(play(rollout, rollout_config, problems)))
    finally:
        rollout.close()


def play(
    rollout: SglJaxRollout, rollout_config: RolloutConfig, problems: list[Calculation]
) -> list[float]:
    """Plays an episode of each problem, all of them together turn by turn; returns rewards."""
    episodes: list[tuple[CalculatorAgent, CalculatorEnvironment]] = []
    for index, problem in enumerate(problems):
        task: dict[str, Any] = {
            "prompts": np.array([problem.prompt]),
            "answer": np.array([problem.answer]),
        }
        environment = CalculatorEnvironment(task, group_id=index, pair_index=0)
        agent = CalculatorAgent("")
        agent.update_from_env(environment.reset()[0], 0.0, False, {})
        episodes.append((agent, environment))
    rewards = [0.0] * len(problems)
    active = list(range(len(problems)))
    parser = ChatParser()
    for _ in range(MAX_TURNS):
        if not active:
            break
        prompts = [parser.parse(episodes[index][0].chat_completions) for index in active]
        still_active = []
        texts = rollout.generate(prompts, rollout_config).text
        for index, text in zip(active, texts, strict=True):
            agent, environment = episodes[index]
            action = agent.update_from_model(text).action
            observation, rewards[index], done, info = environment.step(action)
            agent.update_from_env(observation, rewards[index], done, info)
            if not done:
                still_active.append(index)
        active = still_active
    return rewards


if __name__ == "__main__":
    make_checkpoint(
        Task(
            name="calculations with a tool",
            maker=Path(__file__),
            config=model_config(),
            batches=batches,
            sample_problem=sample_problem,
            max_prompt_length=MAX_PROMPT_LENGTH,
            max_new_tokens=MAX_RESPONSE_LENGTH,
        ),
        Defaults(600, 64, corrupted=0.35, num_problems=256, learning_rate=5e-3),
        sampled_accuracy,
    )
