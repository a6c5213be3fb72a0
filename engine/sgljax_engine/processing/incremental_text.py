from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.incremental_decoder import BehindPrompt, IncrementalDecoder
from sgljax_engine.processing.tokenizer import DEFAULT_DECODE_OPTIONS, DecodeOptions, Tokenizer


class StopMatch(NamedTuple):
    """A stop string found in the output, and the output tokens up to its end.

    If a token completes several, it is the one that ends first in the text, and of those the
    longest.
    """

    num_tokens: int
    stop_string: str


class TextStream:
    """Turns the output tokens of one request into text. Not thread-safe.

    The results of all calls of `take` and of `finish` add up to the decoded text of all ids, cut at
    a stop string. The text does not depend on how ids were grouped into calls of `add`.

    A character is final once no further token can change it: an incomplete UTF-8 sequence at the
    end waits for its other bytes, and a possible start of a stop string waits until that is
    decided. With a tokenizer that has `byte_run_ids`, a run of byte tokens waits for its end or its
    first invalid byte, because one such byte turns the whole run into U+FFFD.

    A stop string counts only if an output token after `min_tokens` completes it, as in vLLM: with
    2, the third token or a later one. With `reasoning_tags` stop strings count behind the thoughts
    alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: DecodeOptions = DEFAULT_DECODE_OPTIONS,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        reasoning_tags: tuple[str, str] | None = None,
        context: Sequence[int] = (),
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidRequestError(f"stop must be a list of non-empty strings, got {stop!r}")
        if min_tokens < 0:
            raise InvalidRequestError(f"min_tokens must be >= 0, got {min_tokens}")
        self.match: StopMatch | None = None
        self._decoder = IncrementalDecoder(tokenizer, options)
        self._stop = tuple(stop)
        self._max_overlap = max(map(len, self._stop), default=1) - 1
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._is_finished = False
        # Positions count characters of the whole text; `_text` begins at `_start`.
        self._text = ""
        self._start = 0
        self._num_taken = 0
        self._num_searched = 0
        self._min_match_end = 0
        self._thoughts = None
        if stop and reasoning_tags is not None:
            self._thoughts = _Thoughts(*reasoning_tags)
        self._behind = BehindPrompt(self._decoder, context) if context else None

    def add(self, ids: Sequence[int]) -> None:
        """Takes the next output tokens, without the stop token if one ended the output.

        Ignores tokens after those of `match`.
        """
        if self._is_finished:
            raise RuntimeError("add was called after finish")
        if not self._stop:
            self._num_tokens += len(ids)
            self._text += self._new(self._decoder.push(ids))
            return
        for token in ids:
            if self.match is not None:
                return
            self._num_tokens += 1
            pending = self._pending()
            self._append(self._new(self._decoder.push([token])), pending)

    def take(self) -> str:
        """The text that has become final since the last call."""
        end = self._start + len(self._text)
        if not self._is_finished and self._thoughts is not None and not self._thoughts.is_decided:
            return ""
        if not self._is_finished and self.match is None and not self._include_stop:
            end -= self._num_possible_stop()
        return self._take_until(end)

    def finish(self) -> str:
        """Ends the output; returns the text not yet returned by `take`. May set `match`."""
        if not self._is_finished and self.match is None:
            pending = self._pending()
            if self._thoughts is not None:
                self._thoughts.finish()
            self._append(self._new(self._decoder.flush(), is_end=True), pending)
        self._is_finished = True
        return self.take()

    def _new(self, final: str, *, is_end: bool = False) -> str:
        return final if self._behind is None else self._behind.take(final, is_end=is_end)

    def _pending(self) -> str:
        pending = self._decoder.pending
        return pending if self._behind is None else self._behind.peek(pending)

    def _append(self, final: str, old_pending: str) -> None:
        """Adds text, and searches for stop strings in the text of the output so far."""
        num_final = self._start + len(self._text)
        new = final + self._pending()
        self._text += final
        if not self._stop:
            return
        if not new.startswith(old_pending):
            self._num_searched = num_final
        visible = self._text + self._pending()
        thoughts = self._thoughts
        if thoughts is not None:
            thoughts.feed(final)
        if self._num_tokens <= self._min_tokens:
            self._min_match_end = self._start + len(visible)
        elif thoughts is None or thoughts.end is not None:
            self._search(visible)
        if thoughts is None or thoughts.is_decided:
            self._num_searched = self._start + len(visible)

    def _search(self, visible: str) -> None:
        found: list[tuple[int, int, str]] = []
        lowest = 0 if self._thoughts is None else (self._thoughts.end or 0)
        for stop in self._stop:
            first = max(self._num_searched, self._min_match_end) - len(stop) + 1
            begin = visible.find(stop, max(first, lowest, self._start) - self._start)
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if found:
            end, begin, stop = min(found)
            self.match = StopMatch(self._num_tokens, stop)
            self._text = visible[: end if self._include_stop else begin]

    def _num_possible_stop(self) -> int:
        """Number of characters at the end that may begin a stop string."""
        for length in range(min(self._max_overlap, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def _take_until(self, end: int) -> str:
        text = self._text[self._num_taken - self._start : end - self._start]
        self._num_taken += len(text)
        # Taken text is kept only as far as a stop string may reach back.
        keep_from = min(self._num_taken, self._start + len(self._text) - self._max_overlap)
        if keep_from > self._start:
            self._text = self._text[keep_from - self._start :]
            self._start = keep_from
        return text


class _Thoughts:
    """Finds where the thoughts at the start of a text end.

    `end` counts characters up to and with the closing mark: 0 where there are no thoughts, None
    while they go on or that is open.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self.end: int | None = None
        self._opening, self._closing = opening, closing
        self._is_inside = not opening
        self._num_passed = 0
        self._held = ""

    @property
    def is_decided(self) -> bool:
        return self._is_inside or self.end is not None

    def finish(self) -> None:
        if not self.is_decided:
            self.end = 0

    def feed(self, text: str) -> None:
        if self.end is not None:
            return
        self._held += text
        if not self._is_inside:
            start = self._held.lstrip()
            if start.startswith(self._opening):
                self._is_inside = True
            elif not self._opening.startswith(start):
                self.end = 0
        if self._is_inside:
            place = self._held.find(self._closing)
            if place >= 0:
                self.end = self._num_passed + place + len(self._closing)
                return
            passed = max(0, len(self._held) - len(self._closing) + 1)
            self._num_passed += passed
            self._held = self._held[passed:]
