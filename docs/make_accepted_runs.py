"""Draws the accepted runs of docs/speculation.md: answers of the demo's policy, step by step.

    python docs/make_accepted_runs.py            # after a change of drafts

The policy answers some sums twice, with other seeds; the second time the first answers are history.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from tunix.rl.rollout.base_rollout import RolloutConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from addition_task import Tokenizer, load_checkpoint, problem_rows  # noqa: E402
from sgljax_engine import RequestOutput, SamplingParams  # noqa: E402
from tunix_sgljax import SglJaxRollout  # noqa: E402

COLOURS = ("#ffffff", "#bbdefb", "#c8e6c9", "#ffe0b2")
NAMES = ("the model's own", "history", "siblings", "ngram")
INK = "#263238"
NUM_PROMPTS, NUM_SAMPLES = 3, 2


def answers() -> tuple[Tokenizer, list[RequestOutput]]:
    """The second answers to some prompts, one of each."""
    tokenizer = Tokenizer()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rollout = SglJaxRollout(
        rollout_actor=load_checkpoint(ROOT / "examples/data/addition_sft.safetensors", mesh),
        tokenizer=tokenizer,
        mesh=mesh,
        rollout_config=RolloutConfig(max_prompt_length=16, max_tokens_to_generate=40),
        max_running_requests=8,
        speculation="always",
    )
    prompts = [tokenizer.encode(row["prompts"]) for row in problem_rows(NUM_PROMPTS, seed=5)]
    params = [SamplingParams(max_new_tokens=40, seed=seed, n=NUM_SAMPLES) for seed in range(2)]
    _, outputs = [rollout.engine.generate_requests(prompts, each) for each in params]
    rollout.close()
    return tokenizer, outputs[::NUM_SAMPLES]


def steps_of(output: RequestOutput) -> list[list[tuple[int, int]]]:
    """(token, source) of each step: drafts that were right, and behind them the model's own."""
    steps: list[list[tuple[int, int]]] = [[]]
    for token, source in zip(output.output_ids, output.draft_sources, strict=True):
        steps[-1].append((token, source))
        if source == 0:
            steps.append([])
    return [step for step in steps if step]


def draw(tokenizer: Tokenizer, outputs: Sequence[RequestOutput]) -> Figure:
    """A line for each answer, a box for each step."""
    longest = max(len(o.output_ids) + 0.4 * len(steps_of(o)) for o in outputs)
    width = max(longest + 10, 56)
    figure = Figure(figsize=(width * 0.17, 0.55 * len(outputs) + 0.6), facecolor="#ffffff")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(len(outputs) + 0.9, -0.2))
    axes.axis("off")
    for line, output in enumerate(outputs):
        prompt = tokenizer.decode(output.prompt_ids)
        axes.text(9, line + 0.4, prompt, ha="right", va="center", fontsize=9, color=INK)
        x = 9.8
        for step in steps_of(output):
            shape = FancyBboxPatch(
                (x, line), len(step), 0.8, "round,pad=0,rounding_size=0.15", fc="none", ec=INK
            )
            for place, (token, source) in enumerate(step):
                character = tokenizer.decode([token]) or "■"
                axes.axvspan(
                    x + place,
                    x + place + 1,
                    ymin=1 - (line + 1) / (len(outputs) + 1.1),
                    ymax=1 - (line + 0.2) / (len(outputs) + 1.1),
                    color=COLOURS[source],
                    lw=0,
                )
                axes.text(
                    x + place + 0.5, line + 0.42, character, fontsize=8, ha="center", va="center"
                )
            axes.add_patch(shape)
            x += len(step) + 0.4
    for place, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        x = 9.8 + 12 * place
        box = FancyBboxPatch((x, len(outputs) + 0.2), 1, 0.4, "round,pad=0", fc=colour, ec=INK)
        axes.add_patch(box)
        axes.text(x + 1.6, len(outputs) + 0.42, name, va="center", fontsize=8, color=INK)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(description="Draws accepted runs.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/accepted_runs.svg")
    args = parser.parse_args(argv)
    mpl.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "accepted_runs"}
    draw(*answers()).savefig(args.output, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
