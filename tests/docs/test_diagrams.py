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
    assert len(names) == 6
    for name in names:
        assert paths(DOCS / "images" / name) == paths(drawn / name), f"draw {name} again"


def test_every_picture_is_shown(drawn):
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for path in drawn.iterdir():
        assert f"(images/{path.name})" in pages
