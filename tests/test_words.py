"""The words of the sources: docstrings that name their subject, and one word for each thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "tunix_sgljax", "benchmarks", "examples", "tests", "tools")

RIDDLE = re.compile(r"\s*(Of|As of|By|See)\b")
"""A docstring that begins so does not name its subject."""

MAYBE_RIDDLE = re.compile(r"(\"\"\"|'''|\"|')" + RIDDLE.pattern)

WORDS = {
    "meeting": "transaction",
    "meetings": "transactions",
    "class Question": "a command with an answer",
    "class Kept": "HostCopies",
    "class Books": "Stats, or ExpectedState in tests",
    "class Answers": "OutputProcessor",
    "class Calls": "RequestGroups",
    "def disturb": "apply_pause_mode",
    "Disturber": "Interrupter",
    "Sleeper": "SleepManager",
    "Saver": "CheckpointWriter",
    "class Made": "PreparedWeights",
    "class Updater": "WeightUpdater",
    "begun": "started",
    "twin": "a request with the same prompt",
    "twins": "requests with the same prompt",
    "narrow_linear": "small_batch_linear",
    "machine code of our own": "JIT-compiled CPU kernels",
    "company": "batch mates; batch-invariant for in any company",
    "row_attention": "contiguous_attention",
    "weights that serve": "serving weights",
    "def walk": "throttle",
}
"""Words with two meanings or none, as whole words, and what to write instead."""


def sources() -> Iterator[tuple[str, str]]:
    """Each source file but this one, by its path from the root."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def riddles(source: str) -> list[int]:
    """Lines of docstrings, attributes' included, that begin with a word of `RIDDLE`."""
    return [
        statement.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(body := getattr(node, "body", None), list)  # a lambda's is an expression
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        and RIDDLE.match(statement.value.value)
    ]


def misused(source: str) -> list[tuple[int, str, str]]:
    """Line, word and replacement of each word of `WORDS`."""
    return [
        (source.count("\n", 0, found.start()) + 1, word, instead)
        for word, instead in WORDS.items()
        if word in source  # much faster than the pattern
        for found in re.finditer(rf"\b{word}\b", source)
    ]


def test_docstrings_name_their_subject():
    # Few files can have one, so the others need not be parsed, which would take seconds.
    found = [
        f"{path}:{line}"
        for path, source in sources()
        if MAYBE_RIDDLE.search(source)
        for line in riddles(source)
    ]
    assert not found, "begin with what it is, not with Of, As of, By or See"


def test_one_word_for_each_thing():
    found = [
        f"{path}:{line}: {word!r}, write {instead}"
        for path, source in sources()
        for line, word, instead in misused(source)
    ]
    assert not found, "see WORDS"


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a module."""',
        'def f():\n    """See `g`."""',
        "class A:\n    r'''\n    By name.\n    '''",
        'class A:\n    x: int = 1\n    """As of now."""',
        'if True:\n    x = 1\n    """Of x."""',
    ],
)
def test_riddles_are_found(source):
    assert MAYBE_RIDDLE.search(source)
    assert len(riddles(source)) == 1


@pytest.mark.parametrize(
    "source", ['"""Office hours."""', 'x = "Of"', 'def f():\n    """Bytes of a page. See `g`."""']
)
def test_others_are_not(source):
    assert not riddles(source)


def test_words_are_found():
    assert misused("x = 1\nclass Sleeper: ...") == [(2, "Sleeper", "SleepManager")]
