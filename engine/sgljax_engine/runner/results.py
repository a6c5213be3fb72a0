"""From what a dispatch leaves on the device to what each request gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sgljax_engine.errors import EngineError
from sgljax_engine.runner.programs.decode import DecodeOutput
from sgljax_engine.sampling.logprobs import ExtraLogprobs
from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.speculation.plan import RowVerified
from sgljax_engine.types import Request, RowOutput, StepOutput, StepTimes, TopLogprobs


class PendingDecode(NamedTuple):
    """A decode dispatch that may still run; `order` has the index in the plan of each row."""

    result: DecodeOutput
    rows: Sequence[Request]
    order: Sequence[int]

    def wait(self) -> list[RowOutput]:
        """Waits for the tokens; one entry for each of `SchedulerOutput.decode`, in its order."""
        result = jax.device_get(self.result)
        by_row = row_outputs(result, self.rows)
        outputs = list(by_row)
        for index, output in zip(self.order, by_row, strict=True):
            outputs[index] = output
        return outputs

    def num_draft_steps(self) -> int | None:
        """Forward passes with drafts; None without. Waits too."""
        drafts = self.result.drafts
        return None if drafts is None else int(jax.device_get(drafts.num_steps))


class PendingStep(NamedTuple):
    """A dispatch that may still run; `decode` is None if it only prefills.

    `wait_for_pages` waits for what only writes pages: prefills that queue up on the device could
    not be paused. Other fields are as of `StepOutput` and `StepTimes`.
    """

    decode: PendingDecode | None
    wait_for_pages: Callable[[], None]
    weight_version: int
    num_cache_misses: int
    failures: Mapping[str, EngineError]
    started_s: float
    scored_s: float
    prefilled_s: float

    def wait(self) -> StepOutput:
        rows: list[RowOutput] = []
        num_draft_steps = None
        if self.decode is None:
            self.wait_for_pages()
        else:
            rows, num_draft_steps = self.decode.wait(), self.decode.num_draft_steps()
        decoded_s = time.perf_counter()
        return StepOutput(
            rows,
            self.weight_version,
            self.num_cache_misses,
            failures=self.failures,
            times=StepTimes(self.started_s, self.scored_s, self.prefilled_s, decoded_s),
            num_draft_steps=num_draft_steps,
        )


def row_outputs(result: DecodeOutput, rows: Sequence[Request]) -> list[RowOutput]:
    """Takes host arrays apart. Row i of them belongs to `rows[i]`; rows behind are padding.

    A last token whose log-prob is NaN is no token: its row is not finite.
    """
    counts = result.num_tokens[: len(rows)]
    last = result.logprobs[np.maximum(counts - 1, 0), np.arange(len(rows))]
    finite = ~(np.isnan(last) & (counts > 0))
    stopped = (result.stopped[: len(rows)] & finite).tolist()
    counts = (counts - ~finite).tolist()
    most = max(counts)
    # Whole arrays become lists at once: indexing them row by row costs more than all the rest.
    columns = [
        array[:most, : len(rows)].T.tolist()
        for array in (
            result.token_ids,
            result.logprobs,
            result.scaled_logprobs,
            result.processed_logprobs,
        )
    ]
    return [
        RowOutput(
            ids[:count],
            raw[:count],
            scaled[:count],
            processed[:count],
            stopped[row],
            _row_extras(result.extras, row, count, rows[row].logprob_options),
            drafts,
            bool(finite[row]),
        )
        for row, (count, drafts, ids, raw, scaled, processed) in enumerate(
            zip(counts, _row_drafts(result, counts), *columns, strict=True)
        )
    ]


def _row_drafts(result: DecodeOutput, counts: Sequence[int]) -> Sequence[RowVerified | None]:
    """The results of each row's drafts; None without."""
    if result.drafts is None:
        return [None] * len(counts)
    columns = (result.drafts.sources.T.tolist(), result.drafts.num_drafted.T.tolist())
    places = zip(counts, *columns, strict=False)  # padding rows behind
    return [RowVerified(sources[:count], drafted) for count, sources, drafted in places]


def _row_extras(
    extras: ExtraLogprobs | None, row: int, count: int, options: LogprobOptions
) -> Sequence[TopLogprobs]:
    if extras is None or not options.has_extras:
        return ()
    return [extras_at(extras, (step, row), options) for step in range(count)]


def extras_at(
    extras: ExtraLogprobs, index: tuple[int, ...], options: LogprobOptions
) -> TopLogprobs:
    """Log-probs that a request asked for, at one index of arrays on the host."""
    return TopLogprobs(
        values=extras.values[index][: options.top_num].tolist(),
        token_ids=extras.token_ids[index][: options.top_num].tolist(),
        chosen=extras.chosen[index][: len(options.token_ids)].tolist(),
    )
