"""Which tokens a request may generate next, as its tokens come. Host-only; no JAX.

A guide follows the tokens of one request alone. So retractions, pauses, sleep and weight updates
leave it as it is, and a checkpoint makes it anew from the tokens.

An output may begin with *thoughts*, up to the mark that closes them. They are free, and the grammar
holds for what comes behind; before a grammar they cannot end the output. `max_thinking_tokens`
bounds them: then the mark alone is allowed.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.errors import StructuredOutputError

WORD_BITS = 32

ENDLESS = int(np.iinfo(np.int32).max)
"""Steps of a guide that no longer limits anything."""


class Thoughts(NamedTuple):
    """The marks around thoughts, as text and as token ids; `open` is empty where the prompt has it.

    Tokenizers may put a space before a text. `most` bounds the tokens between the marks; None does
    not.
    """

    open: tuple[int, ...]
    close: tuple[int, ...]
    open_text: bytes
    close_text: bytes
    most: int | None


class Allowed(NamedTuple):
    """What the next tokens may be.

    Attributes:
        words: uint32 [1 + drafts, ceil(vocabulary / 32)], a bit for each token: at the next
            position, and behind each of `drafts`, if those before it are generated.
        drafts: Tokens that the grammar is expected to go on with.
        num_steps: Steps that `words` holds for; `ENDLESS` for ever.
    """

    words: np.ndarray
    drafts: tuple[int, ...] = ()
    num_steps: int = 1


class _Part(enum.Enum):
    OPENING = "opening"
    THOUGHTS = "thoughts"
    ANSWER = "answer"


class Guide:
    """Follows one request. A caller's thread makes it, then the engine thread alone has it.

    Args:
        bytes_of: The bytes of a token.
        encode: The tokens of a text.
        matcher: llguidance's, at the start of the answer's grammar, whose token for the end is the
            vocabulary's size; None for any answer.
        thoughts: None if there are none.
        allowed: uint32 words of the tokens that the request's other settings allow.
        vocab_size: Of the model.
        end_ids: The request's stop tokens.
        max_drafts: Most tokens of `Allowed.drafts`.

    Raises:
        StructuredOutputError: if no token is allowed.
    """

    def __init__(
        self,
        *,
        bytes_of: Callable[[int], bytes | None],
        encode: Callable[[str], Sequence[int]],
        matcher: Any,
        thoughts: Thoughts | None,
        allowed: np.ndarray,
        vocab_size: int,
        end_ids: Sequence[int],
        max_drafts: int = 0,
    ) -> None:
        self._bytes_of = bytes_of
        self._encode = encode
        self._matcher = matcher
        self._thoughts = thoughts
        self._free = self._in_thoughts = allowed
        self._vocab_size, self._end_ids = vocab_size, end_ids
        if matcher is not None:
            self._in_thoughts = allowed.copy()
            for token in end_ids:
                clear_bit(self._in_thoughts, token)
        self._max_drafts = max_drafts
        self._num_taken = 0
        self._num_thought = 0
        self._closing = 0
        self._tail = b""
        self._opened: list[int] = []
        self._part = _Part.ANSWER
        if thoughts is not None:
            self._part = _Part.OPENING if thoughts.open else _Part.THOUGHTS
        self.allowed = self._next()

    def copy(self) -> Guide:
        """A guide in the same state, for another sample."""
        made = copy.copy(self)
        made._matcher = None if self._matcher is None else self._matcher.deep_copy()
        made._opened = list(self._opened)
        return made

    @property
    def is_over(self) -> bool:
        """Whether all tokens are allowed from now on."""
        return self.allowed.num_steps == ENDLESS

    def advance(self, output_ids: Sequence[int]) -> None:
        """Takes the new ones of all tokens so far, and finds what comes next.

        Raises:
            StructuredOutputError: for a token that was not allowed, if no token is allowed, and
                where the grammar takes more work than llguidance does.
        """
        for token in output_ids[self._num_taken :]:
            self._take(token)
            self._num_taken += 1
        self.allowed = self._next()

    # ------------------------------------------------------------------ tokens that came

    def _take(self, token: int) -> None:
        if self._part is _Part.OPENING:
            self._take_opening(token)
        elif self._part is _Part.THOUGHTS:
            self._take_thought(token)
        else:
            self._take_answer([token])

    def _take_opening(self, token: int) -> None:
        thoughts = self._thoughts
        assert thoughts is not None
        self._opened.append(token)
        text = b"".join(map(self._bytes, self._opened)).lstrip(b" ")
        if text.startswith(thoughts.open_text) or tuple(self._opened) == thoughts.open:
            self._part = _Part.THOUGHTS
        elif not thoughts.open_text.startswith(text):
            self._part = _Part.ANSWER
            self._take_answer(self._opened)

    def _take_thought(self, token: int) -> None:
        thoughts = self._thoughts
        assert thoughts is not None
        self._num_thought += 1
        self._closing = _num_matched(thoughts.close, self._closing, token)
        text = self._tail + self._bytes(token)
        before, found, rest = text.partition(thoughts.close_text)
        self._tail = before[-len(thoughts.close_text) :]
        if found or self._closing == len(thoughts.close):
            self._part = _Part.ANSWER
            if rest.strip():
                self._take_answer(self._encode(rest.decode(errors="replace")))

    def _bytes(self, token: int) -> bytes:
        return self._bytes_of(token) or b""

    def _take_answer(self, tokens: Sequence[int]) -> None:
        if self._matcher is not None and not self._matcher.consume_tokens(list(tokens)):
            raise StructuredOutputError(
                f"output token {self._num_taken} does not follow the grammar: "
                f"{_first_line(self._matcher.get_error())}"
            )

    # ------------------------------------------------------------------ tokens to come

    def _next(self) -> Allowed:
        found = self._found()
        if not found.words[0].any():
            raise StructuredOutputError(
                f"no token is allowed after {self._num_taken} output tokens: the grammar and "
                "allowed_token_ids, bad_token_ids or the model's vocabulary have none in common"
            )
        return found

    def _found(self) -> Allowed:
        if self._part is _Part.THOUGHTS:
            return self._next_thought()
        if self._matcher is None:
            return self._next_of_any()
        if self._part is _Part.OPENING:
            return self._next_opening()
        return self._next_answer()

    def _next_of_any(self) -> Allowed:
        """Without a grammar: the answer is free, and so is a beginning that may open thoughts."""
        is_over = self._part is _Part.ANSWER
        return Allowed(self._free[None], num_steps=ENDLESS if is_over else 1)

    def _next_opening(self) -> Allowed:
        """The next token of the mark, or what the answer may go on with."""
        assert self._thoughts is not None
        words = np.zeros_like(self._free)
        matcher = self._matcher.deep_copy()
        if matcher.consume_tokens(self._opened):
            words = self._mask(matcher)
        place = len(self._opened)
        if tuple(self._opened) == self._thoughts.open[:place]:
            set_bit(words, self._thoughts.open[place])
        return Allowed((words & self._free)[None])

    def _next_thought(self) -> Allowed:
        thoughts = self._thoughts
        assert thoughts is not None
        left = ENDLESS if thoughts.most is None else thoughts.most - self._num_thought
        if left > 0:
            # The mark may come at any step, and before an answer without a grammar alone it
            # changes nothing.
            num_steps = left if self._matcher is None else 1
            return Allowed(self._in_thoughts[None], num_steps=num_steps)
        words = np.zeros_like(self._free)
        set_bit(words, thoughts.close[self._closing])
        return Allowed((words & self._free)[None])

    def _next_answer(self) -> Allowed:
        words = [self._mask(self._matcher)]
        drafts: list[int] = []
        if self._max_drafts:
            forced = self._matcher.compute_ff_tokens()[: self._max_drafts]
            drafts = [token for token in forced if token != self._vocab_size]
        for number, token in enumerate(drafts):
            if not self._matcher.consume_token(token):
                raise StructuredOutputError(_first_line(self._matcher.get_error()))
            words.append(self._mask(self._matcher))
            if number + 1 == len(drafts):
                self._matcher.rollback(len(drafts))
        return Allowed(np.stack(words), tuple(drafts))

    def _mask(self, matcher: Any) -> np.ndarray:
        found = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if error := matcher.get_error():
            raise StructuredOutputError(
                f"the grammar fails after {self._num_taken} output tokens: {_first_line(error)}"
            )
        words = found[: len(self._free)] & self._free
        word, bit = divmod(self._vocab_size, WORD_BITS)
        if found[word] >> bit & 1:
            for token in self._end_ids:
                set_bit(words, token)
        return words & self._free


def _num_matched(mark: Sequence[int], matched: int, token: int) -> int:
    """How many tokens of a mark the last tokens are, after `matched` of them and another token."""
    seen = (*mark[:matched], token)
    return next(
        size
        for size in range(min(len(seen), len(mark)), -1, -1)
        if tuple(seen[len(seen) - size :]) == tuple(mark[:size])
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def all_tokens(vocab_size: int) -> np.ndarray:
    """uint32 words with a bit for each token of a vocabulary."""
    words = np.full(-(-vocab_size // WORD_BITS), 0xFFFFFFFF, np.uint32)
    if vocab_size % WORD_BITS:
        words[-1] = (1 << vocab_size % WORD_BITS) - 1
    return words


def set_bit(words: np.ndarray, token: int) -> None:
    words[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)


def clear_bit(words: np.ndarray, token: int) -> None:
    words[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
