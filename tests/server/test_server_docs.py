"""docs/server.md names every route, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgljax_engine.server import create_app
from tests.engine.interrupts import make_engine

PAGE = Path(__file__).parents[2] / "docs/server.md"


@pytest.fixture(scope="module")
def routes():
    with make_engine() as engine:
        return set(create_app(engine).openapi()["paths"])


def rows() -> list[tuple[set[str], str]]:
    """Routes and status of each line of the tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `/")]
    cells = [line.split("|") for line in lines]
    return [(set(re.findall(r"/[a-z0-9_/{}]+", cell[1])), cell[2].strip()) for cell in cells]


def test_every_route_is_in_a_table(routes):
    listed = {route for names, status in rows() if status.startswith("yes") for route in names}
    assert listed == routes


def test_what_is_said_to_be_missing_is(routes):
    missing = {route for names, status in rows() if status.startswith("no") for route in names}
    assert missing
    assert not missing & routes
