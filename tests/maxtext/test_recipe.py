"""Tunix's recipes that train MaxText's models, as docs/recipes.md has them."""

from __future__ import annotations

from tests.recipes import page
from tests.recipes.recipes import RECIPES


def test_as_on_the_page():
    numbers = [recipe.number for recipe in RECIPES if recipe.elsewhere == "maxtext"]
    said = page.outcomes_of(page.OUTPUT.read_text(encoding="utf-8"))
    wanted = {13: "runs", 28: "runs"}
    assert page.run_recipes(numbers) == {number: said[number] for number in numbers} == wanted
