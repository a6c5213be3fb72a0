"""docs/troubleshooting.md: each message there is what the code says.

Most come from the functions that check, called directly, some from an engine: error_table.py. So do
those that the page leaves out because they say themselves what to do: plain_messages.txt.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import sgljax_engine
from sgljax_engine import EngineError
from tests.docs.error_table import TABLE, Parts

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
PLAIN = Path(__file__).with_name("plain_messages.txt")
_ENTRY = re.compile(r"^<!-- error: (\w+) -->\n\n```text\n(.+?)\n```$", re.MULTILINE | re.DOTALL)


def on_the_page() -> dict[str, str]:
    """The messages of the page by name."""
    return dict(_ENTRY.findall(PAGE.read_text("utf-8")))


def plain() -> dict[str, str]:
    """Those that it leaves out, a line each."""
    lines = PLAIN.read_text("utf-8").splitlines()
    return {name: message for name, _, message in (line.partition(": ") for line in lines)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Parts(tmp_path_factory.mktemp("troubleshooting"), stack)


def public_text(error: EngineError) -> str:
    """The message behind the name of the error's class, or of its nearest public base."""
    names = (cls.__name__ for cls in type(error).__mro__)
    name = next(name for name in names if name in sgljax_engine.__all__)
    return f"{name}: {error}"


def test_every_message_has_a_row_and_every_row_a_message():
    names = [row.name for row in TABLE]
    assert sorted(names) == sorted([*on_the_page(), *plain()])


def test_no_message_is_outside_an_entry():
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```text") == len(_ENTRY.findall(text)) == len(on_the_page())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_message(parts, row):
    expected = (on_the_page() | plain())[row.name]
    words = expected.split("...")
    assert len("".join(words).partition(": ")[2]) >= 15, "the pattern matches almost anything"
    with pytest.raises(row.error) as caught:
        row.make(parts)
    text = public_text(caught.value)
    pattern = ".*".join(re.escape(word) for word in words)
    assert re.fullmatch(pattern, text, re.DOTALL), text
    assert text.startswith(f"{row.error.__name__}: ")


@pytest.mark.parametrize("error", sorted(n for n in sgljax_engine.__all__ if n.endswith("Error")))
def test_every_public_error_is_on_the_page(error):
    """Their base class stands for all of them."""
    if error != "EngineError":
        assert any(message.startswith(f"{error}: ") for message in on_the_page().values())
