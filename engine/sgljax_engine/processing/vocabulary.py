"""A tokenizer as llguidance sees it, and compiled grammars over it. Any thread."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.tokenizer import Tokenizer

_MAX_GRAMMARS = 64
"""Compiled grammars that are kept: those used last."""


class Vocabulary:
    """Makes matchers of grammars over the tokens of an engine.

    Tokens are what `Tokenizer.token_bytes` says, so every tokenizer that tells its tokens' bytes
    serves. A model's tokens beyond the tokenizer's are never allowed. The end of an output is a
    token behind all others, `vocab_size`: requests differ in their end tokens, and it takes about
    a second to read 150,000 tokens. `eos_ids` are no text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, Any] = OrderedDict()
        self._guidance = load_llguidance()
        names = set(tokenizer.special_tokens)
        tokens, special = [], []
        for token in range(vocab_size):
            text = tokenizer.token_bytes(token) or b""
            tokens.append(text)
            if token in eos_ids or (names and text.decode(errors="replace") in names):
                special.append(token)
        if not any(tokens):
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer that tells the bytes of its tokens, and "
                f"{type(tokenizer).__name__} does not"
            )
        wrapper = self._guidance.TokenizerWrapper(_Tokens(tokenizer, tokens, special))
        self._tokenizer = self._guidance.LLTokenizer(wrapper)

    def matcher(self, grammar: str) -> Any:
        """A new `LLMatcher` at the start of a grammar.

        Raises:
            InvalidRequestError: if the grammar does not compile, with the reason.
        """
        with self._lock:
            found = self._grammars.get(grammar)
            if found is not None:
                self._grammars.move_to_end(grammar)
                return found.deep_copy()
        made = self._guidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if made.is_error():
            raise InvalidRequestError(f"structured_outputs does not compile: {made.get_error()}")
        with self._lock:
            self._grammars[grammar] = made
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
            return made.deep_copy()


_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}
"""Enough to indent by; without a bound, a weak model may go on with white space to its end."""


def load_llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequestError(
            "structured_outputs needs llguidance: pip install 'tunix-sgljax[guided]'"
        ) from None
    return llguidance


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance tries bytes first
            raise TypeError("text must be a string")
        return self._tokenizer.encode_rendered(text)


def grammar_of(outputs: Mapping[str, Any], *, behind_thoughts: bool = False) -> str:
    """The grammar, as llguidance takes it, of checked `structured_outputs`.

    Behind thoughts, models begin JSON on a new line.
    """
    llguidance = load_llguidance()
    (kind, value), *_ = outputs.items()
    matcher = llguidance.LLMatcher
    if kind in ("json", "json_object"):
        schema = value if kind == "json" else {"type": "object"}
        if behind_thoughts:
            value = lark_json(schema)
            return matcher.grammar_from_lark(f"start: /\\n{{0,2}}/ value\nvalue: {value}")
        return matcher.grammar_from_json_schema(schema, overrides=_JSON)
    if kind == "regex":
        return matcher.grammar_from_regex(value)
    if kind == "choice":
        return matcher.grammar_from_lark(f"start: {lark_choice(value)}")
    if "::=" in value:  # GBNF, as SGLang's ebnf
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            value = any_to_lark(value)
        except Exception as error:
            raise InvalidRequestError(
                f"structured_outputs['grammar'] is not GBNF: {error}"
            ) from None
    return matcher.grammar_from_lark(value)


def lark_json(schema: Mapping[str, Any]) -> str:
    """The body of a rule in Lark for JSON under a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": _JSON})


def lark_choice(texts: Iterable[str]) -> str:
    """The body of a rule in Lark for one of some texts."""
    return " | ".join(map(json.dumps, texts))
