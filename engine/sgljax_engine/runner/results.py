"""From what a dispatch leaves on the device to what each request gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sgljax_engine.errors import EngineError
from sgljax_engine.runner.programs.decode import DecodeOutput
from sgljax_engine.runner.programs.verify import Verified
from sgljax_engine.sampling.logprobs import ExtraLogprobs
from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.speculation.plan import RowVerified
from sgljax_engine.types import Request, RowOutput, StepOutput, StepTimes, TopLogprobs


class PendingDecode(NamedTuple):
    """A decode dispatch that may still run.

    Attributes:
        result: Arrays of the device: a `DecodeOutput`, or a `Verified` with drafts.
        rows: The requests in the order of the device's rows.
        order: For each row, the index of its request in `SchedulerOutput.decode`.
    """

    result: Any
    rows: Sequence[Request]
    order: Sequence[int]

    def wait(self) -> list[RowOutput]:
        """Waits for the tokens; one entry for each of `SchedulerOutput.decode`, in its order."""
        result = jax.device_get(self.result)
        is_verified = isinstance(result, Verified)
        by_row = (_verified_rows if is_verified else row_outputs)(result, self.rows)
        outputs = list(by_row)
        for index, output in zip(self.order, by_row, strict=True):
            outputs[index] = output
        return outputs

    def passes(self) -> tuple[int, ...] | None:
        """Forward passes for each width of a step, as in `StepOutput.passes`; waits too."""
        if not isinstance(self.result, Verified):
            return None
        return tuple(jax.device_get(self.result.num_steps).tolist())


class PendingStep(NamedTuple):
    """A dispatch that may still run.

    Attributes:
        decode: Its decode rows; None if it only prefills.
        wait_for_pages: Waits for what only writes pages. Prefills that queue up on the device
            could not be paused.
        weight_version, num_cache_misses, failures: As of `StepOutput`.
        started_s, scored_s, prefilled_s: As of `StepTimes`.
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
        """Waits for the device; raises what failed there."""
        rows: list[RowOutput] = []
        passes = None
        if self.decode is None:
            self.wait_for_pages()
        else:
            rows, passes = self.decode.wait(), self.decode.passes()
        decoded_s = time.perf_counter()
        return StepOutput(
            rows,
            self.weight_version,
            self.num_cache_misses,
            failures=self.failures,
            times=StepTimes(self.started_s, self.scored_s, self.prefilled_s, decoded_s),
            passes=passes,
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
            is_finite=bool(finite[row]),
        )
        for row, (count, ids, raw, scaled, processed) in enumerate(
            zip(counts, *columns, strict=True)
        )
    ]


def _verified_rows(result: Verified, rows: Sequence[Request]) -> list[RowOutput]:
    """The result of `row_outputs`, with the results of drafts."""
    outputs = row_outputs(result.output, rows)
    columns = (x.T.tolist() for x in (result.sources, result.num_drafted, result.num_right))
    places = zip(outputs, *columns, result.acceptance.tolist(), strict=False)  # padding rows behind
    return [
        row._replace(drafts=RowVerified(sources[: len(row.token_ids)], *facts))
        for row, sources, *facts in places
    ]


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
