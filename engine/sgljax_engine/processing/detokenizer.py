"""The text of a request's output: all at once, or piece by piece with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from sgljax_engine.processing.incremental_text import TextStream
from sgljax_engine.processing.tokenizer import DecodeOptions, Tokenizer, decode_options
from sgljax_engine.types import FinishReason, Request

_CONTEXT_TOKENS = 8
"""Prompt tokens that are decoded before an output, if they have text."""


class Detokenizer:
    """Decodes with a tokenizer; without one all text is empty. For one thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, request: Request, finish: FinishReason) -> str:
        """The text of a finished request; empty for one without text."""
        tokenizer, options = self._tokenizer, decode_options(request.params)
        if tokenizer is None or not request.params.detokenize:
            return ""
        ids = request.output_ids[: num_text_tokens(request, finish)]
        context = _context(tokenizer, request, options) if ids else []
        if not context:
            return tokenizer.decode(ids, options)
        before, whole = (tokenizer.decode(part, options) for part in (context, [*context, *ids]))
        if whole.startswith(before):
            return whole[len(before) :]
        stream = TextStream(tokenizer, options, context=context)
        stream.add(ids)
        return stream.finish()

    def stream(self, request: Request) -> TextStream | None:
        """The text stream of a running request; None for one without text."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        options = decode_options(params)
        return TextStream(
            self._tokenizer,
            options,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_new_tokens,
            reasoning_tags=params.reasoning_tags,
            context=_context(self._tokenizer, request, options),
        )


def _context(tokenizer: Tokenizer, request: Request, options: DecodeOptions) -> Sequence[int]:
    """The last tokens of the prompt that the output's text depends on; empty if on none."""
    if not request.params.decode_behind_prompt:
        return []
    ids, known = request.prompt_ids, tokenizer.byte_run_ids
    count = _CONTEXT_TOKENS
    # Tokens that the text leaves out are no context, and a run of bytes is decoded as a whole.
    while count < len(ids) and (
        ids[-count] in known or not tokenizer.decode(ids[-count:], options)
    ):
        count *= 2
    return ids[-count:]


def num_text_tokens(request: Request, finish: FinishReason) -> int:
    """Number of output tokens in the text: all but the stop token, unless it is to be included."""
    if request.only_prefills:
        return 0
    has_stop_token = finish.type == "stop" and not isinstance(finish.matched, str)
    is_left_out = has_stop_token and not request.params.include_stop_str_in_output
    return len(request.output_ids) - is_left_out
