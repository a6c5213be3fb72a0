"""A task of long answers for a small model: to explain something in words that are easy to read.

    python examples/plain_task.py    # samples from SmolLM2: rewards and lengths before training

The reward follows from the text alone: Flesch's reading ease (Flesch, 1948, "A New Readability
Yardstick"), which short words and short sentences raise, if the text is long enough and does not
repeat itself. Answers have 100 to 512 tokens.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from get_smollm2 import get_smollm2

HARDEST, EASIEST = 30.0, 100.0
"""Reading eases that get 0 and 1: "very difficult" ends at 30, and "very easy" at 100."""

MIN_WORDS, MIN_DISTINCT = 120, 0.4
"""Words of a text, and the share of different ones among them, below which it gets less."""

TURN = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
"""SmolLM2's chat template."""

TOPICS = tuple((Path(__file__).parent / "data/topics.txt").read_text("utf-8").splitlines())
"""What prompts ask to explain. Their order decides which are held out."""

NUM_HELD_OUT_TOPICS = 24
"""Topics of which no training prompt tells: the last of a fixed shuffle."""


def plain_rows(num: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Rows for the config's `task.dataset`: a prompt each.

    Args:
        num: How many.
        seed: Draws topics.
        held_out: Whether the topics are those that no training prompt has.
    """
    topics = list(TOPICS)
    random.Random(0).shuffle(topics)
    kept = topics[-NUM_HELD_OUT_TOPICS:] if held_out else topics[:-NUM_HELD_OUT_TOPICS]
    draw = random.Random(seed)
    return [
        {"prompts": TURN.format(question=f"Explain step by step how to {draw.choice(kept)}.")}
        for _ in range(num)
    ]


def is_plain(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Tunix reward function: how easy the completions are to read, from 0 to 1.

    Args:
        prompts: What was asked; not needed.
        completions: What the policy wrote, without special tokens.
        **_: The settings that Tunix passes to every reward function.

    Returns:
        The rewards, one for each completion.
    """
    del prompts
    return [_reward(text) for text in completions]


def _reward(text: str) -> float:
    words = _words(text)
    if not words:
        return 0.0
    ease = (reading_ease(text) - HARDEST) / (EASIEST - HARDEST)
    distinct = len({word.lower() for word in words}) / len(words)
    length = min(len(words) / MIN_WORDS, 1.0)
    return min(max(ease, 0.0), 1.0) * length * min(distinct / MIN_DISTINCT, 1.0)


def reading_ease(text: str) -> float:
    """Flesch's reading ease of a text with words; about 100 for the easiest."""
    words = _words(text)
    pieces = re.split(r"[.!?:]+(?=\s|$)|\n", text)
    sentences = sum(any(letter.isalpha() for letter in piece) for piece in pieces)
    syllables = sum(map(_syllables, words))
    return 206.835 - 1.015 * len(words) / sentences - 84.6 * syllables / len(words)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def _syllables(word: str) -> int:
    count = len(re.findall(r"[aeiouy]+", word.lower()))
    is_silent = word.endswith("e") and not word.endswith("le") and count > 1
    return max(count - is_silent, 1)


def main(argv: list[str] | None = None) -> int:
    """Prints what SmolLM2 gets before any training: sampled at temperature 1, and greedily."""
    parser = argparse.ArgumentParser(description="SmolLM2's rewards before training.")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2, help="of each prompt, at temperature 1")
    parser.add_argument("--tokens", type=int, default=384, help="most tokens of an answer")
    args = parser.parse_args(argv)
    from sgljax_engine import Engine

    rows = plain_rows(args.prompts, seed=1)
    with Engine(get_smollm2(), max_running_requests=32, max_model_len=args.tokens + 64) as engine:
        prompts = [engine.tokenize(row["prompts"]) for row in rows]
        for params in ({"temperature": 1.0, "n": args.samples}, {"temperature": 0.0, "n": 1}):
            start = time.perf_counter()
            outputs = engine.generate(
                input_ids=prompts,
                sampling_params={"max_new_tokens": args.tokens, "seed": 0, **params},
            )
            seconds = time.perf_counter() - start
            texts = [output["text"] for output in outputs]
            rewards = is_plain(texts, texts)
            lengths = sorted(len(output["output_ids"]) for output in outputs)
            print(
                f"temperature {params['temperature']}: mean reward "
                f"{sum(rewards) / len(rewards):.2f}; {lengths[0]} to {lengths[-1]} tokens, "
                f"{sum(lengths) / len(lengths):.0f} on average; prompts of at most "
                f"{max(map(len, prompts))} tokens, {seconds:.0f} s; {texts[0]!r}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
