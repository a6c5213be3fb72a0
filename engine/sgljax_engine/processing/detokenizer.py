"""The text of a request's output: all at once, or piece by piece with stop strings."""

from __future__ import annotations

from sgljax_engine.processing.incremental_text import TextStream
from sgljax_engine.processing.tokenizer import Tokenizer, decode_options
from sgljax_engine.types import FinishReason, Request


class Detokenizer:
    """Decodes with a tokenizer. For one thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Keeps the tokenizer.

        Args:
            tokenizer: None leaves all text empty.
        """
        self._tokenizer = tokenizer

    def text(self, request: Request, finish: FinishReason) -> str:
        """The text of a finished request; empty if it wants none."""
        if self._tokenizer is None or not request.params.detokenize:
            return ""
        ids = request.output_ids[: num_text_tokens(request, finish)]
        return self._tokenizer.decode(ids, decode_options(request.params))

    def stream(self, request: Request) -> TextStream | None:
        """The text of a request while it runs; None if it wants none."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return TextStream(
            self._tokenizer,
            decode_options(params),
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_new_tokens,
        )


def num_text_tokens(request: Request, finish: FinishReason) -> int:
    """The output tokens that are text: without the stop token, unless it is to be included."""
    has_stop_token = finish.type == "stop" and not isinstance(finish.matched, str)
    is_left_out = has_stop_token and not request.params.include_stop_str_in_output
    return len(request.output_ids) - is_left_out
