"""Tunix's recipes, shrunk, with our engine: docs/recipes.md says what comes out of them."""

from __future__ import annotations

import pytest

from tests.recipes import page
from tests.recipes.recipes import NUM_DEVICES, RECIPES

QUICK_COMPILE = "which recipes run, not what they learn"

RUN = [recipe.number for recipe in RECIPES if recipe.runs_here]
# Each in one process, so that Tunix is imported once.
GROUPS = {"first": RUN[: len(RUN) // 2], "second": RUN[len(RUN) // 2 :]}


def page_text():
    return page.OUTPUT.read_text(encoding="utf-8")


@pytest.mark.first
@pytest.mark.soak
@pytest.mark.parametrize("group", GROUPS)
def test_recipes(group):
    found, said = page.run_recipes(GROUPS[group]), page.outcomes_of(page_text())
    assert found == {number: said[number] for number in GROUPS[group]}


def test_the_page_is_written_from_the_table():
    outcomes = page.outcomes_of(page_text())
    assert page.render(outcomes) == page_text()
    num_running = page.num_running(outcomes)
    assert num_running >= 24
    newcomers = page.OUTPUT.with_name("tunix.md").read_text(encoding="utf-8")
    assert f"{num_running} of {len(RECIPES)} run" in newcomers


def test_the_table():
    assert [recipe.number for recipe in RECIPES] == list(range(1, 33))
    for recipe in RECIPES:
        assert recipe.runs_here != bool(recipe.elsewhere)
        trainer, rollout = recipe.meshes()
        shapes = [trainer] if rollout is None else [trainer, rollout]
        count = max if recipe.shares_devices else sum
        assert count(fsdp * tp for fsdp, tp in shapes) <= NUM_DEVICES
        # As Tunix's trainer shards rows: a batch of four prompts, two samples each.
        assert 8 % trainer[0] == 0
