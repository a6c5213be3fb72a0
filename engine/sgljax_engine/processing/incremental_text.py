"""Incremental text of one request while its tokens arrive. This module imports no JAX.

The window with a few tokens of context comes from Hugging Face's text-generation-inference and
vLLM's slow detokenizer (prefix and read offset). Those hold text back while it ends in U+FFFD, so
they stall on invalid UTF-8, such as the output of an untrained model; here at most three characters
are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.tokenizer import DEFAULT_DECODE_OPTIONS, DecodeOptions, Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE = 3
"""Maximum bytes of an incomplete UTF-8 character; decoders write one U+FFFD for all or for each."""

_MIN_CONTEXT = 4
"""Number of characters before new text that determine how it is decoded.

Decoders find the next character boundary within three bytes, and strip spaces only at the front.
"""

_MAX_WINDOW = 32
"""Tokens after which the window is cut down to its end."""

_CONTEXT_TOKENS = 8


class StopMatch(NamedTuple):
    """A stop string found in the output.

    Attributes:
        num_tokens: Output tokens up to and including the one that completed the stop string.
        stop_string: The stop string. If a token completes several, the one that ends first in the
            text, and of those the longest.
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

    The cost of decoding a token does not depend on its position.

    Attributes:
        match: The stop string that ends the output, once there is one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: DecodeOptions = DEFAULT_DECODE_OPTIONS,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Starts with no tokens.

        Args:
            tokenizer: Tokenizer that decodes the ids.
            options: Decoding options.
            stop: Strings that end the output.
            include_stop: Keep the stop string in the text.
            min_tokens: A stop string counts only if an output token after this many completes it,
                as in vLLM: with 2, the third token or a later one.

        Raises:
            InvalidRequestError: for an empty stop string or a negative `min_tokens`.
        """
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidRequestError(f"stop must be a list of non-empty strings, got {stop!r}")
        if min_tokens < 0:
            raise InvalidRequestError(f"min_tokens must be >= 0, got {min_tokens}")
        self.match: StopMatch | None = None
        self._decoder = _IncrementalDecoder(tokenizer, options)
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

    def add(self, ids: Sequence[int]) -> None:
        """Takes the next output tokens, without the stop token if one ended the output.

        Ignores tokens after those of `match`.
        """
        if self._is_finished:
            raise RuntimeError("add was called after finish")
        if not self._stop:
            self._num_tokens += len(ids)
            self._text += self._decoder.push(ids)
            return
        for token in ids:
            if self.match is not None:
                return
            self._num_tokens += 1
            pending = self._decoder.pending
            self._append(self._decoder.push([token]), pending)

    def take(self) -> str:
        """The text that has become final since the last call."""
        end = self._start + len(self._text)
        if not self._is_finished and self.match is None and not self._include_stop:
            end -= self._num_possible_stop()
        return self._take_until(end)

    def finish(self) -> str:
        """Ends the output; returns the text not yet returned by `take`. May set `match`."""
        if not self._is_finished and self.match is None:
            pending = self._decoder.pending
            self._append(self._decoder.flush(), pending)
        self._is_finished = True
        return self.take()

    def _append(self, final: str, old_pending: str) -> None:
        """Adds text, and searches for stop strings in the text of the output so far."""
        num_final = self._start + len(self._text)
        new = final + self._decoder.pending
        self._text += final
        if not self._stop:
            return
        if not new.startswith(old_pending):
            self._num_searched = num_final
        visible = self._text + self._decoder.pending
        if self._num_tokens > self._min_tokens:
            self._search(visible)
        else:
            self._min_match_end = self._start + len(visible)
        self._num_searched = self._start + len(visible)

    def _search(self, visible: str) -> None:
        found: list[tuple[int, int, str]] = []
        for stop in self._stop:
            first = max(self._num_searched, self._min_match_end) - len(stop) + 1 - self._start
            begin = visible.find(stop, max(first, 0))
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


class _ByteRun:
    """Consecutive byte tokens, decoded as a whole."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.is_broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def add(self, token: int, byte: int) -> str:
        """The characters that the byte completes. Sets `is_broken` if the run is invalid UTF-8."""
        self.ids.append(token)
        try:
            return self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.is_broken = True
            return ""


class _IncrementalDecoder:
    """Decodes a window at the end of the output.

    Attributes:
        pending: Text after the final text, valid for the tokens so far; later tokens may change it.
            Only byte runs have such text.
    """

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self.pending = ""
        self._tokenizer = tokenizer
        self._options = options
        self._bytes = tokenizer.byte_run_ids
        self._bytes_to_ids = {byte: token for token, byte in self._bytes.items()}
        self._max_held = 0 if self._bytes else _MAX_INCOMPLETE
        self._window: list[int] = []
        self._num_final = 0  # in characters of the window's text
        self._cut_at = _MAX_WINDOW
        self._run: _ByteRun | None = None
        self._skipped: dict[int, bool] = {}

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that becomes final."""
        if self._bytes:
            return "".join([self._push_token(int(token)) for token in ids])
        self._window.extend(map(int, ids))
        return self._advance()

    def flush(self) -> str:
        """The remaining text when no more tokens come."""
        self._end_run()
        return self._decode(self._window)[self._num_final :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._options)

    def _advance(self) -> str:
        text = self._decode(self._window)
        num_final = max(self._num_final, len(text) - self._num_incomplete(text))
        final = text[self._num_final : num_final]
        self._num_final = num_final
        if len(self._window) >= self._cut_at:
            self._cut_window(text)
        return final

    def _num_incomplete(self, text: str) -> int:
        """Number of characters at the end that bytes of the next tokens may replace."""
        end = text[-self._max_held :] if self._max_held else ""
        return len(end) - len(end.rstrip(_REPLACEMENT))

    def _cut_window(self, text: str) -> None:
        """Cuts the window to its end, if that gives the same text.

        If the end alone has too little text (skipped tokens, spaces that a decoder strips), the
        start of the window stays as its context.
        """
        num_open = len(text) - self._num_final
        num_checked = num_open + _MIN_CONTEXT
        head, tail = self._window[:_CONTEXT_TOKENS], self._window[-_CONTEXT_TOKENS:]
        half = self._window[len(self._window) // 2 :]
        for context, end in (([], tail), (head, tail), ([], half)):
            shorter = self._decode(context + end)
            num_new = len(shorter) - (len(self._decode(context)) if context else 0)
            is_same_end = num_new >= num_checked and shorter[-num_checked:] == text[-num_checked:]
            if is_same_end or (context and shorter == text and self._is_middle_empty()):
                self._window = context + end
                self._num_final = len(shorter) - num_open
                break
        self._cut_at = len(self._window) + _MAX_WINDOW

    def _is_middle_empty(self) -> bool:
        # Twice, since decoders may leave out the space after the last word.
        middle = self._window[_CONTEXT_TOKENS:-_CONTEXT_TOKENS]
        return not self._decode(middle + middle)

    def _push_token(self, token: int) -> str:
        byte = self._bytes.get(token)
        if byte is not None:
            return self._push_byte(token, byte)
        if self._run is not None and self._is_skipped(token):
            return ""
        self._end_run()
        self._window.append(token)
        return self._advance()

    def _push_byte(self, token: int, byte: int) -> str:
        if self._run is None:
            self._run = _ByteRun()
        run = self._run
        if run.is_broken:
            return _REPLACEMENT
        complete = run.add(token, byte)
        if run.is_broken:
            return self._break_run(run)
        if complete and self._num_final == 0 and not self.pending:
            # The very first text, before which decoders may strip a space.
            self.pending = self._decode(self._window + run.ids)
        else:
            self.pending += complete
        return ""

    def _break_run(self, run: _ByteRun) -> str:
        """Replaces an invalid run by one invalid byte; it stays invalid whatever follows."""
        self.pending = ""
        text = self._decode(self._window + run.ids)
        final = text[self._num_final :]
        self._window.append(self._bytes_to_ids[0xFF])
        self._num_final = len(text) - len(run.ids) + 1
        return final

    def _end_run(self) -> None:
        if self._run is not None and not self._run.is_broken:
            self._window.extend(self._run.ids)
        self._run = None
        self.pending = ""

    def _is_skipped(self, token: int) -> bool:
        """Whether a byte run continues over the token, as over skipped special tokens."""
        if token not in self._skipped:
            lead, *rest = (self._bytes_to_ids[byte] for byte in "\u00e9".encode())
            self._skipped[token] = self._decode([lead, token, *rest]) == "\u00e9"
        return self._skipped[token]
