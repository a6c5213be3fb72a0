"""Writes docs/recipes.md: which recipes run, as running them has shown.

    python -m tests.recipes.page [TUNIX]

Takes a quarter of an hour on two cores. The tests run the recipes too and compare with the page.
Recipes that need another environment are run where there is one, and else stay as the page has
them: TUNIX is a checkout of Tunix's main.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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

Each was run small for two steps: its family of models with random weights, its LoRA rule, its
fields of `RolloutConfig`, its sections for other engines, its learner, its meshes of fsdp x tp
(trainer + rollout) halved until they fit {num_devices} simulated devices. YAML files and shell
scripts ran by `tunix-sgljax tunix grpo`. In the end the rollout held exactly the weights that the
trainer had made (`tests/recipes`).

The PPO recipes ran as programs with Tunix's `PPOLearner`, since google-tunix 0.1.7 has no command
for them; their critic is a small Qwen3, for 0.1.7 cannot make one of a Gemma or a Llama.
"""
_TAIL = """
## Newer recipes

Tunix's main has more of them after {commit}, all with workers over gRPC and Raiden, its transfer
between TPUs. They were read, not run:

- Qwen3 0.6B (`recipes/ci_smoke_gsm8k_qwen3_0p6b.sh` at 035dbdb9): by the
  [nodes](experimental_sampler.md), as 32, with a folder in place of Raiden.
- The same in MaxText (03f93b8b): its trainer has no node here.
- FrozenLake, Gemma 4 E2B (1c2dcdc2): the nodes read Qwen2, Qwen3 and Llama 3 alone.
"""
_COLUMNS = "| | recipe | trains | meshes | |\n|---:|---|---|---|---|\n"


def run_recipes(numbers: Iterable[int], python: str | Path = sys.executable) -> dict[int, str]:
    """What comes out of recipes, run in a process with `NUM_DEVICES` devices; by number."""
    done = run_python(
        *("-m", "tests.recipes.run", *numbers),
        num_devices=NUM_DEVICES,
        as_users=True,
        limit_s=_LIMIT_S,
        python=python,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {entry["number"]: entry["outcome"] for entry in found}


def run_elsewhere(recipe: Recipe, tunix: str | None) -> str | None:
    """What comes out of a recipe in the environment that it needs; None without that.

    Args:
        recipe: One with `elsewhere`.
        tunix: A checkout of Tunix's main.
    """
    if recipe.elsewhere == "maxtext":
        python = ROOT / ".venv-maxtext" / "bin" / "python"
        return run_recipes([recipe.number], python)[recipe.number] if python.exists() else None
    if tunix is None:
        return None
    tests = ["tests/experimental/test_nodes.py", "-k", "three_steps"]
    done = subprocess.run(
        [sys.executable, "tests/with_tunix.py", tunix, "-q", "-m", "", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    # Skipped tests end well too.
    return "runs" if done.returncode == 0 and last.startswith("1 passed") else last


def row(recipe: Recipe, outcome: str) -> str:
    """The line of a recipe."""
    trains = "LoRA" if recipe.lora else "all weights"
    if recipe.dtype != "float32":
        trains += f", computes in {recipe.dtype}"
    if recipe.pad_is_eos:
        trains += ", pads with the end token"
    meshes = "x".join(map(str, recipe.mesh))
    if recipe.rollout_mesh is not None:
        meshes += f" + {'x'.join(map(str, recipe.rollout_mesh))}"
        meshes += " on the same devices" if recipe.shares_devices else ""
    if recipe.stops_at:
        outcome = f"its training {outcome}; not {recipe.stops_at}"
    elif recipe.remark:
        outcome += f"; {recipe.remark}"
    link = f"[{recipe.title}](https://github.com/google/tunix/blob/{COMMIT}/{recipe.source})"
    return f"| {recipe.number} | {link} | {trains} | {meshes} | {outcome} |"


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
    return head + "\n" + _COLUMNS + "\n".join(rows) + "\n" + _TAIL.format(commit=COMMIT)


def outcomes_of(page: str) -> dict[int, str]:
    """What a page says of the recipes that are run."""
    last = {int(n): text for n, text in re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", page, re.M)}
    return {
        recipe.number: last.get(recipe.number, "")
        .removeprefix("its training " if recipe.stops_at else "")
        .removesuffix(f"; not {recipe.stops_at}")
        .removesuffix(f"; {recipe.remark}")
        for recipe in RECIPES
        if recipe.model is not None or recipe.elsewhere
    }


def main(arguments: Sequence[str]) -> int:
    """Runs all recipes and writes the page."""
    tunix = next(iter(arguments), None)
    outcomes = outcomes_of(OUTPUT.read_text(encoding="utf-8"))
    for recipe in RECIPES:
        if recipe.elsewhere and (outcome := run_elsewhere(recipe, tunix)) is not None:
            outcomes[recipe.number] = outcome
    outcomes |= run_recipes(recipe.number for recipe in RECIPES if recipe.runs_here)
    OUTPUT.write_text(render(outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
