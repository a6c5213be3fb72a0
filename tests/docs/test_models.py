"""docs/models.md: what the code says to every model that Tunix lists."""

from __future__ import annotations

import re

from tunix.models import registry

from tests.docs import doc_blocks

maker = doc_blocks.load_script("make_models_table")


def test_the_page_is_up_to_date():
    text = maker.OUTPUT.read_text(encoding="utf-8")
    assert text == maker.render(text), "run python docs/make_models_table.py"


def test_the_page_has_every_name_once():
    text = maker.OUTPUT.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`\S+`(?:, `\S+`)*) \| [\d,]+ \| .*\|$",
        text,
        re.MULTILINE,
    )
    names = [str(model.model_name) for model in registry.MODEL_CATALOG]
    assert sorted(name.strip("`") for row in rows for name in row.split(", ")) == sorted(names)
