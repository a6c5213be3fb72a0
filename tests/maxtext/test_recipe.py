"""Tunix's recipe that trains MaxText's model, as docs/recipes.md has it."""

from __future__ import annotations

from tests.recipes import page
from tests.recipes.recipes import RECIPES


def test_as_on_the_page():
    numbers = [recipe.number for recipe in RECIPES if recipe.elsewhere == "maxtext"]
    said = page.outcomes_of(page.OUTPUT.read_text(encoding="utf-8"))
    assert page.run_recipes(numbers) == {number: said[number] for number in numbers} == {13: "runs"}
