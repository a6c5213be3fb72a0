"""What SmolLM2's goldens are about: 40 prompts, a text, and strings for its tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "smollm2"
LICENCE = Path(__file__).parents[2] / "LICENSE"
NUM_GREEDY = 24
NUM_LONG = 1_000
NUM_STRINGS = 4_000
STRINGS_PER_DIGEST = 100

_PIECES = (
    *(
        "the",
        " quick",
        "Brown ",
        "foxes",
        "'s",
        "'t",
        " don't",
        "WE'LL",
        "na\u00efve",
        "stra\u00dfe",
    ),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b", "\u2028"),
    *(
        "0",
        "7",
        "42",
        " 1999",
        "  3",
        "3.14",
        "1,000",
        "-5",
        "\u00b2",
        "\u00bd",
        "\u0663",
        "\u2167",
        "1e-5",
    ),
    *(
        ".",
        ",",
        "!",
        "?!",
        "...",
        "\u2026",
        "--",
        "\u2014",
        "(",
        ")",
        "[[",
        "}}",
        '"',
        "\u201c",
        "\u201d",
        "`",
        "```",
    ),
    *(
        "def f(x):",
        "    return x",
        "#include",
        "<div>",
        "</p>",
        "&amp;",
        "=>",
        "!==",
        "::",
        "a_b",
        "\\n",
    ),
    *(
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1",
        "\u4f60\u597d\u4e16\u754c",
        "\u3053\u3093\u306b\u3061\u306f",
        "\u30ab\u30bf\u30ab\u30ca",
    ),
    *(
        "\uc548\ub155",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u05e9\u05dc\u05d5\u05dd",
        "\u0928\u092e\u0938\u094d\u0924\u0947",
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        "e\u0301",
        "\u1ea1\u0302",
    ),
    *(
        "\U0001f600",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f44d\U0001f3fd",
        "\U0001f1eb\U0001f1f7",
        "\u2764\ufe0f",
        "\U00020000",
        "\x00",
        "\x7f",
        "\ufeff",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<repo_name>", "<file_sep>"),
)


class Prompt(NamedTuple):
    """A prompt: messages of a chat, or a text to continue, of which the first tokens count."""

    name: str
    messages: list[dict[str, str]] | None
    text: str | None
    num_tokens: int | None = None


def prompts() -> list[Prompt]:
    """The 40 prompts of prompts.json, and with long contexts."""
    stored = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    summary = f"{perplexity_text()}\n\nSummarise this text in one sentence."
    return [
        *(Prompt(one["name"], one.get("messages"), one.get("text")) for one in stored),
        Prompt("long_text", None, LICENCE.read_text(encoding="utf-8"), NUM_LONG),
        Prompt("long_chat", [{"role": "user", "content": summary}], None),
    ]


def perplexity_text() -> str:
    """The text whose perplexity is known."""
    return (FOLDER / "text.txt").read_text(encoding="utf-8").strip()


def tokenizer_strings() -> list[str]:
    """Strings of many scripts, spaces, digits and special tokens; the same in every Python."""
    rng = random.Random(0)  # of which only `random` is the same for ever

    def pick(number: int) -> int:
        return int(rng.random() * number)

    def code_point() -> str:
        return chr(pick(0xD800) if rng.random() < 0.9 else 0x10000 + pick(0x20000))

    def piece() -> str:
        return _PIECES[pick(len(_PIECES))] if rng.random() < 0.95 else code_point()

    return ["".join(piece() for _ in range(1 + pick(16))) for _ in range(NUM_STRINGS)]


def digest(ids: Sequence[int]) -> str:
    """A short digest of token ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def string_digests(encode: Callable[[str], Sequence[int]]) -> Iterator[str]:
    """A digest for every hundred of the tokenizer's strings, each of which ends with -1."""
    strings = tokenizer_strings()
    for start in range(0, len(strings), STRINGS_PER_DIGEST):
        block = strings[start : start + STRINGS_PER_DIGEST]
        yield digest([token for string in block for token in (*encode(string), -1)])
