"""What tokenizers answer to the texts of the cases, and short digests of the answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.folders.tokenizer_cases import TEXTS

Encode = Callable[[str, bool], list[int]]
Decode = Callable[[list[int], bool], str]

INNER = ("ids", "text", "full_text")
"""Fields of an answer that BOS and EOS are no part of."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One text's answer.

    Attributes:
        whole: Ids with BOS and EOS.
        ids: Ids without.
        text: The text of the ids, special tokens left out.
        full_text: The text of the ids with special tokens.
    """

    whole: list[int]
    ids: list[int]
    text: str
    full_text: str


def answer(encode: Encode, decode: Decode, text: str) -> Answer:
    """What a tokenizer makes of a text; its functions take whether special tokens count."""
    ids = encode(text, False)
    return Answer(encode(text, True), ids, decode(ids, True), decode(ids, False))


def of_file(path: Path) -> list[Answer]:
    """Answers of `tokenizers` on a tokenizer.json itself."""
    tokenizer = Tokenizer.from_file(str(path))
    return [
        answer(
            lambda each, special: tokenizer.encode(each, add_special_tokens=special).ids,
            lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip),
            text,
        )
        for text in TEXTS
    ]


def of_transformers(tokenizer: Any) -> list[Answer]:
    """Answers of a transformers tokenizer, without its clean-up of spaces."""
    return [
        answer(
            lambda each, special: tokenizer.encode(each, add_special_tokens=special),
            lambda ids, skip: tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            ),
            text,
        )
        for text in TEXTS
    ]


def digest(answers: list[Answer], fields: tuple[str, ...]) -> str:
    """Eight hexadecimal digits that stand for these fields of all answers.

    Releases of `tokenizers` differ in the spaces that they decode beside added tokens, so texts
    with what may be one count by their ids alone.
    """
    values = [
        [getattr(each, field) for field in fields if "text" not in field or "<" not in text]
        for text, each in zip(TEXTS, answers, strict=True)
    ]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
