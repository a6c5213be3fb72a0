"""Makes the guides of an engine's requests. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from sgljax_engine.errors import InvalidRequestError, StructuredOutputError
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.processing.vocabulary import Vocabulary, grammar_of
from sgljax_engine.sampling.guide import (
    Guide,
    Thoughts,
    all_tokens,
    clear_bit,
    set_bit,
)
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.types import LogitEdits


class Guides:
    """Makes guides; the vocabulary is mapped when the first grammar comes.

    `eos_ids` are those of model and tokenizer. `max_drafts`: see `Guide`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int], max_drafts: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._max_drafts = max_drafts
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def make(
        self,
        params: SamplingParams,
        stop_ids: Sequence[int],
        edits: LogitEdits | None,
        output_ids: Sequence[int] = (),
    ) -> Guide:
        """The guide of a request, whose parameters ask for one, behind its tokens so far.

        Raises:
            InvalidRequestError: for what cannot be guided, with the reason.
        """
        outputs = params.structured_outputs
        name = "max_thinking_tokens" if outputs is None else "structured_outputs"
        if self._tokenizer is None:
            raise InvalidRequestError(f"{name} needs a tokenizer, and the engine has none")
        matcher = None
        if outputs is not None:
            if not stop_ids:
                raise InvalidRequestError(
                    f"{name} ends with a stop token, and the request has none: stop_token_ids=[], "
                    f"ignore_eos={params.ignore_eos}"
                )
            grammar = grammar_of(outputs, behind_thoughts=params.reasoning_tags is not None)
            matcher = self._mapped(self._tokenizer).matcher(grammar)
        try:
            guide = Guide(
                bytes_of=self._tokenizer.token_bytes,
                encode=self._tokenizer.encode_rendered,
                matcher=matcher,
                thoughts=self._thoughts(self._tokenizer, params),
                allowed=self._allowed(edits),
                vocab_size=self._vocab_size,
                end_ids=stop_ids,
                max_drafts=self._max_drafts,
            )
            if output_ids:
                guide.advance(output_ids)
        except StructuredOutputError as error:
            raise InvalidRequestError(f"{name}: {error}") from None
        return guide

    def _mapped(self, tokenizer: Tokenizer) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary

    def _thoughts(self, tokenizer: Tokenizer, params: SamplingParams) -> Thoughts | None:
        if params.reasoning_tags is None:
            return None
        open_text, close_text = params.reasoning_tags
        opens, closes = (tuple(tokenizer.encode_rendered(tag)) for tag in params.reasoning_tags)
        for token in (*opens, *closes):
            if token >= self._vocab_size:
                raise InvalidRequestError(
                    f"reasoning_tags={params.reasoning_tags} must be tokens of the model, got "
                    f"{token}"
                )
        return Thoughts(
            opens, closes, open_text.encode(), close_text.encode(), params.max_thinking_tokens
        )

    def _allowed(self, edits: LogitEdits | None) -> np.ndarray:
        """Words of the tokens that biases and allow lists leave."""
        words = all_tokens(self._vocab_size)
        if edits is None:
            return words
        if edits.is_allow_list:
            words = np.zeros_like(words)
        values: Any = zip(edits.token_ids.tolist(), edits.values.tolist(), strict=True)
        for token, value in values:
            (clear_bit if value == -np.inf else set_bit)(words, token)
        return words
