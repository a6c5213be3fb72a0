"""docs/maxtext.md: what the code says to every model of MaxText's, and what was measured."""

from __future__ import annotations

import re

import pytest

from tests.docs import doc_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
maker = doc_blocks.load_script("make_maxtext_table")


def test_the_page_is_up_to_date():
    text = maker.OUTPUT.read_text(encoding="utf-8")
    assert text == maker.render(text), "run python docs/make_maxtext_table.py"


def test_the_page_has_every_name_once():
    table = maker.OUTPUT.read_text().partition("<!-- models:")[2].partition("<!-- end")[0]
    rows = re.findall(r"^\| (.+) \| (?:yes, `\w+`|no: .+) \|$", table, re.M)
    names = [name.strip("`") for row in rows for name in row.split(", ")]
    assert sorted(names) == sorted(maker.MODELS)
