"""Refuses texts of too many tokens without tokenizing all of them. Host-only; no JAX."""

from __future__ import annotations

from sgljax_engine.checks import check_text
from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 256
"""More than the longest entry of any vocabulary that is known."""

_PIECE_CHARS = 1 << 14
_CUT_TOKENS = 64
"""Tokens that a cut through a word may add, at most."""


def check_length(tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    """Refuses a text of more tokens than allowed, after as few of them as it takes to know.

    A text that is only a little too long passes; it is found by its ids.
    """
    check_text(text)
    limit = max_tokens * MAX_CHARS_PER_TOKEN
    if len(text) > limit:
        raise InvalidRequestError(
            f"the text has {len(text)} characters, the limit is {limit}: {MAX_CHARS_PER_TOKEN} "
            f"for each of {max_tokens} tokens"
        )
    if len(text) <= _PIECE_CHARS:
        return
    count = 0
    for start in range(0, len(text), _PIECE_CHARS):
        end = min(start + _PIECE_CHARS, len(text))
        count += max(0, len(tokenizer.encode_rendered(text[start:end])) - _CUT_TOKENS)
        if count > max_tokens:
            raise InvalidRequestError(
                f"the text has more than {max_tokens} tokens in the first {end} of its "
                f"{len(text)} characters; the limit is {max_tokens} tokens"
            )
