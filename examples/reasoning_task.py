"""Tasks of reasoning-gym for a small model: rows, a reward, and what it can do before training.

    python examples/reasoning_task.py    # samples from SmolLM2: the share of right answers by task

reasoning-gym draws problems from a seed and scores answers itself. Here an answer is right where
its score is 1, and a completion must be the answer alone. Asked without examples the model always
talks, and is never right; so each prompt begins with a solved problem, as an earlier turn of the
chat. `TASKS` has settings that are easy enough for a model of 135M parameters.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from get_smollm2 import MissingPackageError, get_smollm2

NUM_EXAMPLES, EXAMPLES_SEED = 1, 99_999
MAX_PROBLEMS = 1_000_000  # of a seed
TURN = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
"""SmolLM2's chat template, without a system message."""
TASKS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "max_digits": 1,
        "operators": ["+", "-", "*"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "max_value": 10},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "number_sorting": {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0},
    "number_filtering": {"min_numbers": 2, "max_numbers": 3, "max_decimals": 0, "min_value": 0},
    "word_sorting": {"min_words": 3, "max_words": 3, "max_word_length": 6},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 3},
}


def problem_rows(task: str, num: int, seed: int) -> list[dict[str, str]]:
    """Rows for the config's `task.dataset`: a prompt, and the problem as its scorer takes it.

    A prompt has the chat template's marks, and one solved problem, the same in all.

    Args:
        task: One of `TASKS`.
        num: How many.
        seed: Draws them.

    Raises:
        MissingPackageError: reasoning-gym is not installed.
    """
    examples = "".join(
        f"{TURN.format(question=each['question'].strip())}{each['answer']}<|im_end|>\n"
        for each in _problems(task, NUM_EXAMPLES, EXAMPLES_SEED)
    )
    return [
        {
            "prompts": examples + TURN.format(question=problem["question"].strip()),
            "problem": json.dumps(problem),
        }
        for problem in _problems(task, num, seed)
    ]


def held_out_rows(task: str, num: int, seed: int, num_train: int, train_seed: int) -> list[Any]:
    """`problem_rows` of which none is among those of a training set; at most `num` of them."""
    seen = {row["prompts"] for row in problem_rows(task, num_train, train_seed)}
    rows = {row["prompts"]: row for row in problem_rows(task, 4 * num, seed)}
    return [row for prompt, row in rows.items() if prompt not in seen][:num]


def is_right(
    prompts: Sequence[str], completions: Sequence[str], problem: Sequence[str], **_: Any
) -> list[float]:
    """Tunix reward function: 1 where reasoning-gym gives a completion the full score, else 0.

    Args:
        prompts: What was asked; not needed.
        completions: What the policy wrote, without special tokens.
        problem: The problems, one for each completion.
        **_: The other columns and settings that Tunix passes to every reward function.

    Returns:
        The rewards, one for each completion.
    """
    del prompts
    gym, rewards = _gym(), []
    for text, encoded in zip(completions, problem, strict=True):
        entry = json.loads(encoded)
        score = gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        rewards.append(float(score(text.strip(), entry) == 1.0))
    return rewards


def _problems(task: str, num: int, seed: int) -> Any:
    # reasoning-gym draws problem i from seed + i, so neighbouring seeds have the same problems.
    return _gym().create_dataset(task, size=num, seed=seed * MAX_PROBLEMS, **TASKS[task])


def _gym() -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingPackageError(
            'the tasks need the package reasoning-gym: pip install "reasoning-gym>=0.1.25", or in '
            "a checkout: make install-reasoning"
        )
    return importlib.import_module("reasoning_gym")


def main(argv: list[str] | None = None) -> int:
    """Prints how often SmolLM2 is right, by task: sampled at temperature 1, and greedily."""
    parser = argparse.ArgumentParser(description="How often SmolLM2 is right, by task.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2, help="of each problem, at temperature 1")
    parser.add_argument("--tokens", type=int, default=12, help="most tokens of an answer")
    args = parser.parse_args(argv)
    from sgljax_engine import Engine

    with Engine(get_smollm2(), max_running_requests=64, max_model_len=384) as engine:
        for task in args.tasks:
            start, rows = time.perf_counter(), problem_rows(task, args.problems, seed=1)
            prompts = [engine.tokenize(row["prompts"]) for row in rows]
            shares, shown = [], ""
            for params in ({"temperature": 1.0, "n": args.samples}, {"temperature": 0.0}):
                outputs = engine.generate(
                    input_ids=prompts,
                    sampling_params={"max_new_tokens": args.tokens, "seed": 0, **params},
                )
                texts = [output["text"] for output in outputs]
                problems = [row["problem"] for row in rows for _ in range(len(texts) // len(rows))]
                rewards = is_right(texts, texts, problems)
                shares.append(sum(rewards) / len(rewards))
                shown = repr(texts[0])
            longest = max(map(len, prompts))
            print(
                f"{task:17} sampled {shares[0]:6.1%}  greedy {shares[1]:6.1%}  prompts of at most "
                f"{longest} tokens, {time.perf_counter() - start:.0f} s; {shown}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
