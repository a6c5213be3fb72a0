"""The pictures of the documentation are those that its script draws."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagrams")
    runpy.run_path(str(DOCS / "make_diagrams.py"))["main"](["--output", str(folder)])
    return folder


def paths(file: Path) -> list[str]:
    """The outlines of a picture in order, whatever program wrote the file."""
    found = [element.get("d") for element in ET.parse(file).iter() if element.get("d")]
    return [path for path in found if path is not None]


def test_the_pictures_are_up_to_date(drawn):
    names = sorted(path.name for path in drawn.iterdir())
    assert len(names) == 7
    for name in names:
        assert paths(DOCS / "images" / name) == paths(drawn / name), f"draw {name} again"


def test_every_picture_is_shown(drawn):
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for path in drawn.iterdir():
        assert f"(images/{path.name})" in pages


@pytest.mark.slow
def test_the_rows_of_a_step_are_up_to_date(tmp_path):
    """The simulator's times are the same on every machine."""
    script = runpy.run_path(str(DOCS / "make_long_tail_plot.py"))
    script["main"].__globals__["IMAGE"] = tmp_path / "long_tail.svg"
    script["main"]()
    drawn = paths(tmp_path / "long_tail.svg")
    assert drawn == paths(DOCS / "images/long_tail.svg"), "draw long_tail.svg again"
