"""A task of long answers for a small model: to explain something in a given number of steps.

    python examples/steps_task.py    # samples from SmolLM2: rewards and lengths before training

A prompt asks for a list of exactly so many numbered steps, each of one sentence or two. The reward
follows from the text alone, as in IFEval (Zhou et al., 2023, "Instruction-Following Evaluation for
Large Language Models"): the share of the steps that are there, in order, neither short nor long.
Answers have 100 to 400 tokens, by how many steps a prompt asks for.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from get_smollm2 import get_smollm2

MIN_STEPS, MAX_STEPS = 5, 12
"""How many steps prompts ask for."""

MIN_WORDS, MAX_WORDS = 12, 32
"""Words of a good step."""

TURN = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
"""SmolLM2's chat template."""

TOPICS = (
    *("plant a tree", "bake bread", "learn to swim", "paint a room", "plan a trip", "wash a car"),
    *("write a poem", "fix a flat tire", "clean a kitchen", "start a garden", "train a dog"),
    *("study for an exam", "make coffee", "build a birdhouse", "organize a closet", "cook rice"),
    *("choose a good book", "run a long race", "learn a language", "save money", "sew a button"),
    *("pack a suitcase", "make a salad", "ride a bicycle", "take a good photo", "draw a face"),
    *("write a letter", "give a speech", "play chess", "grow tomatoes", "feed birds in winter"),
    *("set up a tent", "light a campfire", "read a map", "iron a shirt", "wrap a present"),
    *("make soup", "boil an egg", "brush your teeth", "wash your hands", "sleep better"),
    *("find a job", "write a resume", "prepare for an interview", "buy a house", "rent a flat"),
    *("host a party", "bake a cake", "decorate a cake", "make pancakes", "make a pizza"),
    *("clean a window", "unclog a sink", "hang a picture", "change a light bulb", "make a bed"),
    *("recycle at home", "save water", "save energy", "make compost", "mow a lawn", "rake leaves"),
    *("care for a cat", "keep a fish tank", "groom a horse", "walk a dog", "raise chickens"),
    *("learn the guitar", "sing in tune", "keep a diary", "meditate", "stretch before a run"),
    *("lift a heavy box", "treat a small cut", "cool a burn", "stop a nosebleed", "stay healthy"),
    *("make a budget", "start a small business", "sell old clothes", "hold a meeting"),
    *("write a short story", "learn to type", "back up a computer", "choose a password"),
    *("make new friends", "say sorry", "help a neighbor", "listen well", "solve an argument"),
)  # fmt: skip

NUM_HELD_OUT_TOPICS = 24
"""Topics of which no training prompt tells: the last of a fixed shuffle."""


def steps_rows(num: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Rows for the config's `task.dataset`: a prompt, and how many steps it asks for.

    Args:
        num: How many.
        seed: Draws topics and numbers.
        held_out: Whether the topics are those that no training prompt has.
    """
    topics = list(TOPICS)
    random.Random(0).shuffle(topics)
    kept = topics[-NUM_HELD_OUT_TOPICS:] if held_out else topics[:-NUM_HELD_OUT_TOPICS]
    draw, rows = random.Random(seed), []
    for _ in range(num):
        topic, steps = draw.choice(kept), draw.randint(MIN_STEPS, MAX_STEPS)
        question = f"Write a list of exactly {steps} numbered steps that explain how to {topic}."
        rows.append({"prompts": TURN.format(question=question), "steps": steps})
    return rows


def share_of_steps(
    prompts: Sequence[str], completions: Sequence[str], steps: Sequence[Any], **_: Any
) -> list[float]:
    """Tunix reward function: good steps over the steps asked for, or written where those are more.

    A step is a line that begins with its number and a dot. It is good if its number follows that of
    the step before, is one of those asked for, and it has `MIN_WORDS` to `MAX_WORDS` words.

    Args:
        prompts: What was asked; not needed.
        completions: What the policy wrote, without special tokens.
        steps: How many steps each prompt asks for.
        **_: The other columns and settings that Tunix passes to every reward function.

    Returns:
        The rewards, one for each completion, from 0 to 1.
    """
    del prompts
    return [_share(text, int(asked)) for text, asked in zip(completions, steps, strict=True)]


def _share(text: str, asked: int) -> float:
    parts = re.split(r"(?m)^ *(\d+)\. ", text)[1:]
    good, following = 0, 1
    for number, body in zip(parts[::2], parts[1::2], strict=True):
        if int(number) == following <= asked:
            good += MIN_WORDS <= len(body.split()) <= MAX_WORDS
            following += 1
    return good / max(asked, len(parts) // 2)


def main(argv: list[str] | None = None) -> int:
    """Prints what SmolLM2 gets before any training: sampled at temperature 1, and greedily."""
    parser = argparse.ArgumentParser(description="SmolLM2's rewards before training.")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2, help="of each prompt, at temperature 1")
    parser.add_argument("--tokens", type=int, default=384, help="most tokens of an answer")
    args = parser.parse_args(argv)
    from sgljax_engine import Engine

    rows = steps_rows(args.prompts, seed=1)
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
            asked = [row["steps"] for row in rows for _ in range(params["n"])]
            rewards = share_of_steps(texts, texts, asked)
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
