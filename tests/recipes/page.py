"""Writes docs/recipes.md: which recipes run, as running them has shown.

    python -m tests.recipes.page

Takes a quarter of an hour on two cores. The tests run the recipes too and compare with the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping

from tests.devices import ROOT, run_python
from tests.recipes.recipes import NUM_DEVICES, RECIPES, Recipe

OUTPUT = ROOT / "docs" / "recipes.md"
COMMIT = "c7d8950f"
_LIMIT_S = 3600

_HEAD = """# Recipes of Tunix

<!-- Written by `python -m tests.recipes.page`; do not edit. -->

The recipes in [Tunix's repository](https://github.com/google/tunix) at {commit}, with our engine
named and nothing else changed, as [Use it from Tunix](tunix.md) has it:
**{num_running} of {num_all} run.**

Each was run small: its family of models with random weights, its LoRA rule, its fields of
`RolloutConfig`, its sections for other engines, its learner, for two steps. The meshes are its own
on {num_devices} simulated devices; larger ones are halved until they fit. Those for the command
line went through `tunix-sgljax tunix grpo`. In the end the rollout held exactly the weights that
the trainer had made. `tests/recipes` has the recipes, and runs them again.
"""
_TAIL = """
*names* is what the recipe gives as `rollout_engine`. *meshes* are (fsdp, tp) of the trainer, which
the rollout shares unless there is a second. The PPO recipes ran as programs with Tunix's
`PPOLearner`, since google-tunix 0.1.7 has no command for them; their critic is a small Qwen3, for
0.1.7 cannot make one of a Gemma or a Llama.
"""
_COLUMNS = "| | recipe | trains | meshes | names | |\n|---:|---|---|---|---|---|\n"


def run_recipes(numbers: Iterable[int]) -> dict[int, str]:
    """What comes out of recipes, run in a process with `NUM_DEVICES` devices; by number."""
    done = run_python(
        "-m", "tests.recipes.run", *numbers, num_devices=NUM_DEVICES, limit_s=_LIMIT_S
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {entry["number"]: entry["outcome"] for entry in found}


def row(recipe: Recipe, outcome: str) -> str:
    """The line of a recipe."""
    trains = "LoRA" if recipe.lora else "all weights"
    if recipe.dtype != "float32":
        trains += f", computes in {recipe.dtype}"
    if recipe.pad_is_eos:
        trains += ", pads with the end token"
    meshes = str(recipe.mesh)
    if recipe.rollout_mesh is not None:
        meshes += f" + {recipe.rollout_mesh}"
    if recipe.waits_for:
        trains, meshes, outcome = "", "", f"waits for {recipe.waits_for}"
    elif recipe.stops_at:
        outcome = f"its training {outcome}; not {recipe.stops_at}"
    elif recipe.remark:
        outcome += f"; {recipe.remark}"
    link = f"[{recipe.title}](https://github.com/google/tunix/blob/{COMMIT}/{recipe.source})"
    way = "CLI" if recipe.way == "cli" else "program"
    return (
        f"| {recipe.number} | {link}, {way} | {trains} | {meshes} | {recipe.engine} | {outcome} |"
    )


def num_running(outcomes: Mapping[int, str]) -> int:
    """How many run from start to end."""
    whole = [recipe.number for recipe in RECIPES if not recipe.stops_at]
    return sum(outcomes.get(number) == "runs" for number in whole)


def render(outcomes: Mapping[int, str]) -> str:
    """The text of the page."""
    head = _HEAD.format(
        commit=COMMIT,
        num_running=num_running(outcomes),
        num_all=len(RECIPES),
        num_devices=NUM_DEVICES,
    )
    rows = [row(recipe, outcomes.get(recipe.number, "")) for recipe in RECIPES]
    return head + "\n" + _COLUMNS + "\n".join(rows) + "\n" + _TAIL


def outcomes_of(page: str) -> dict[int, str]:
    """What a page says of the recipes that are run."""
    last = {int(n): text for n, text in re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", page, re.M)}
    return {
        recipe.number: last[recipe.number]
        .removeprefix("its training " if recipe.stops_at else "")
        .removesuffix(f"; not {recipe.stops_at}")
        .removesuffix(f"; {recipe.remark}")
        for recipe in RECIPES
        if recipe.model is not None
    }


def main() -> int:
    """Runs all recipes but MaxText's, which the page says as before, and writes the page."""
    numbers = [
        recipe.number for recipe in RECIPES if recipe.model is not None and not recipe.needs_maxtext
    ]
    before = outcomes_of(OUTPUT.read_text(encoding="utf-8"))
    OUTPUT.write_text(render(before | run_recipes(numbers)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
