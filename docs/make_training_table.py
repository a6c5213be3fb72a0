"""Writes the lists of keys in docs/training.md from the schema of configs and its docstrings.

    python docs/make_training_table.py

A test compares the file with `render()`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix_sgljax.training.loading import field_types, section_of, type_name
from tunix_sgljax.training.schema import TrainConfig

OUTPUT = Path(__file__).with_name("training.md")
_BEGIN, _END = "<!-- fields: made by docs/make_training_table.py -->\n", "<!-- end of fields -->\n"


def render(text: str) -> str:
    """The text of docs/training.md with its lists made anew."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + "\n" + "\n".join(_lists()) + "\n" + _END + tail


def _lists(
    kind: type = TrainConfig, prefix: str = "", described: list[type] | None = None
) -> Iterator[str]:
    described = [] if described is None else described
    docs, hints = attribute_docs(kind), field_types(kind)
    rows, sections = [], []
    for field in dataclasses.fields(kind):
        section = section_of(hints[field.name])
        if section is None:
            kind_of = type_name(hints[field.name]).removesuffix(" or null")
            rows.append(f"- `{field.name}` ({_default(field, kind_of)}): {docs[field.name]}")
        else:
            sections.append((section, f"{prefix}{field.name}."))
    if rows:
        yield f"### {prefix.removesuffix('.') or 'The whole run'}\n"
        yield "\n".join(rows) + "\n"
    for section, below in sections:
        if section not in described:
            described.append(section)
            yield from _lists(section, below, described)


def attribute_docs(kind: type) -> dict[str, str]:
    """What a class's docstring says about each of its attributes."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(words.split())
        for name, words in zip(entries[::2], entries[1::2], strict=True)
    }


def _default(field: dataclasses.Field[Any], kind: str) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return f"{kind}, required"
    if value is None or value == {}:
        return kind
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
