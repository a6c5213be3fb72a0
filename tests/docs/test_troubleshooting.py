"""docs/troubleshooting.md: each message there is what the code says, produced for real.

So are those that the page leaves out because they say themselves what to do: plain_messages.md.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import sgljax_engine
from sgljax_engine import EngineError
from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL
from tests.docs import config_errors, request_errors
from tests.docs.error_cases import Parts

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
PLAIN = Path(__file__).with_name("plain_messages.md")
PRODUCERS = config_errors.PRODUCERS | request_errors.PRODUCERS
_ENTRY = re.compile(r"^<!-- error: (\w+) -->\n\n```text\n(.+?)\n```$", re.MULTILINE | re.DOTALL)


def entries(*pages: Path) -> dict[str, str]:
    """The messages of pages by name."""
    return dict(entry for page in pages for entry in _ENTRY.findall(page.read_text("utf-8")))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("troubleshooting")
        yield Parts(ref.make_tunix_qwen3(MODEL), folder, stack)


def public_text(error: EngineError) -> str:
    """The message behind the name of the error's class, or of its nearest public base."""
    names = (cls.__name__ for cls in type(error).__mro__)
    name = next(name for name in names if name in sgljax_engine.__all__)
    return f"{name}: {error}"


def test_every_entry_has_a_producer_and_every_producer_an_entry():
    assert not config_errors.PRODUCERS.keys() & request_errors.PRODUCERS.keys()
    assert not entries(PAGE).keys() & entries(PLAIN).keys()
    assert entries(PAGE, PLAIN).keys() == PRODUCERS.keys()


@pytest.mark.parametrize("page", [PAGE, PLAIN], ids=lambda page: page.stem)
def test_no_message_is_outside_an_entry(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("```text") == len(_ENTRY.findall(text)) == len(entries(page))


@pytest.mark.parametrize("name", PRODUCERS)
def test_message(parts, name):
    expected = entries(PAGE, PLAIN)[name]
    words = expected.split("...")
    assert len("".join(words).partition(": ")[2]) >= 15, "the pattern matches almost anything"
    with pytest.raises(EngineError) as caught:
        PRODUCERS[name](parts)
    pattern = ".*".join(re.escape(word) for word in words)
    assert re.fullmatch(pattern, public_text(caught.value), re.DOTALL), public_text(caught.value)


@pytest.mark.parametrize("error", sorted(n for n in sgljax_engine.__all__ if n.endswith("Error")))
def test_every_public_error_is_on_the_page(error):
    """Their base class stands for all of them."""
    if error != "EngineError":
        assert any(message.startswith(f"{error}: ") for message in entries(PAGE).values())
