"""Scores given tokens, for `Engine.score` and for prompt log-probs. Engine thread only.

Sequences with equal prefixes share blocks, but not with recurrent states, which pass from each
block to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from sgljax_engine.errors import NonFiniteLogitsError
from sgljax_engine.runner.batches.batch import grow_buckets
from sgljax_engine.runner.batches.packing import PackedScores, pack_scores
from sgljax_engine.runner.batches.sampling import build_logprob_batch
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.programs.score import ScoreOutput
from sgljax_engine.runner.results import extras_at
from sgljax_engine.types import NO_ADAPTER, PromptLogprobs, Request


class Scorer:
    def __init__(
        self,
        run: Callable[[ProgramCall], ScoreOutput],
        *,
        token_buckets: Sequence[int],
        token_block: int,
        max_len: int,
        vocab_size: int,
        has_adapters: bool = False,
        shares: bool = True,
    ) -> None:
        self._has_adapters = has_adapters
        self._shares = shares
        self._run = run
        self._block = token_block
        self._table_width = -(-max_len // token_block)
        self._vocab_size = vocab_size
        self._max_tokens = token_buckets[-1]
        longest = self._table_width * token_block
        more = grow_buckets(2 * self._max_tokens, 2, longest) if longest > self._max_tokens else ()
        self._buckets = (*token_buckets, *more)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        temperature: float,
        adapter: int = NO_ADAPTER,
    ) -> list[np.ndarray]:
        """Log-probs of each sequence's tokens from its start on, one float32 array per sequence.

        NaN where the logits are NaN or infinite.
        """
        results: list[np.ndarray] = []
        for packed in self._pack(sequences, starts):
            call = self._call(packed, temperature, adapter=adapter)
            logprobs = np.asarray(self._run(call).logprobs)
            results.extend(logprobs[slots] for slots in packed.slots)
        return results

    def score_prompt(self, request: Request) -> PromptLogprobs:
        """The prompt log-probs that a request asks for."""
        ids, options = request.prompt_ids, request.logprob_options
        # The first token has no predecessor.
        head = [None] if options.start_len == 0 else []
        (packed,) = self._pack([ids], [max(options.start_len, 1)])
        batch = build_logprob_batch([request], 1, self._vocab_size)
        scores = jax.device_get(self._run(self._call(packed, 1.0, batch, request.adapter)))
        (slots,) = packed.slots
        found = scores.logprobs[slots]
        if np.isnan(found).any():
            place = int(np.argmax(np.isnan(found))) + max(options.start_len, 1)
            raise NonFiniteLogitsError(
                f"request {request.rid} failed: the logits for token {place} of its prompt are "
                "NaN or infinite"
            )
        logprobs: list[float | None] = [*head, *found.tolist()]
        if scores.extras is None:
            return PromptLogprobs(logprobs, [])
        more = [extras_at(scores.extras, (slot,), options) for slot in slots]
        return PromptLogprobs(logprobs, [*head, *more])

    def warm_calls(self) -> Iterator[ProgramCall]:
        for size in self._buckets:
            (packed,) = self._pack([[0]], [1], [size])
            yield self._call(packed, 1.0)

    def _pack(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        buckets: Sequence[int] | None = None,
    ) -> Iterator[PackedScores]:
        return pack_scores(
            sequences,
            starts,
            buckets=self._buckets if buckets is None else buckets,
            max_tokens=self._max_tokens,
            block=self._block,
            table_width=self._table_width,
            shares=self._shares,
        )

    def _call(
        self,
        packed: PackedScores,
        temperature: float,
        extras: object = None,
        adapter: int = NO_ADAPTER,
    ) -> ProgramCall:
        slot = np.int32(adapter) if self._has_adapters else None
        return ProgramCall("score", (packed.batch, np.float32(temperature), extras, slot))
