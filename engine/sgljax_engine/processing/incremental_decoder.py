"""Decodes the tokens of one output while they arrive. This module imports no JAX.

The window with a few tokens of context comes from Hugging Face's text-generation-inference and
vLLM's slow detokenizer (prefix and read offset). Those hold text back while it ends in U+FFFD, so
they stall on invalid UTF-8, such as the output of an untrained model; here at most three characters
are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sgljax_engine.processing.tokenizer import DecodeOptions, Tokenizer

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


class IncrementalDecoder:
    """Decodes a window at the end of the output.

    `pending` is text after the final text; later tokens may change it. Only byte runs have such
    text.
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
        if self._bytes:
            return "".join([self._push_token(int(token)) for token in ids])
        self._window.extend(map(int, ids))
        return self._advance()

    def flush(self) -> str:
        self._end_run()
        return self._decode(self._window)[self._num_final :]

    def open_text(self) -> str:
        run = [] if self._run is None or self._run.is_broken else self._run.ids
        return self._decode(self._window + run)[self._num_final :]

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


class BehindPrompt:
    """Takes the prompt's part off the text that a decoder gives for prompt and output together.

    A character whose bytes began in the prompt is the output's, if the output completes it.
    """

    def __init__(self, decoder: IncrementalDecoder, context: Sequence[int]) -> None:
        decoder.push(context)
        self._open = decoder.open_text()  # the prompt's, unless the output changes it
        self._held = ""
        self._is_decided = not self._open

    def take(self, final: str, *, is_end: bool) -> str:
        """The output's part of new final text."""
        if self._is_decided:
            return final
        self._held += final
        if len(self._held) < len(self._open) and self._open.startswith(self._held):
            if not is_end:
                return ""
            self._held = ""
        self._is_decided = True
        return self._held.removeprefix(self._open)

    def peek(self, pending: str) -> str:
        """The output's part of text that is not final."""
        return pending if self._is_decided else pending.removeprefix(self._open)
