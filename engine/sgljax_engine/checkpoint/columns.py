"""The parts of a request that are arrays in a checkpoint, and their inverses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgljax_engine.checkpoint.fields import Fields, float_array, int_array
from sgljax_engine.errors import CheckpointError
from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.types import PromptLogprobs, TopLogprobs

INT_COLUMNS = (
    "prompt_ids",
    "output_ids",
    "token_versions",
    "extra_token_ids",
    "prompt_extra_token_ids",
)
"""The fields of a request's dict that are int32 arrays, or None where they do not apply."""

FLOAT_COLUMNS = (
    "logprobs",
    "scaled_logprobs",
    "processed_logprobs",
    "extra_values",
    "extra_chosen",
    "prompt_logprobs",
    "prompt_extra_values",
    "prompt_extra_chosen",
)
"""Those that are float32 arrays (float64 if that would round one), or None."""


def run_lengths(values: Sequence[int], where: str) -> np.ndarray:
    """[R, 2] (value, how often in a row): weight versions change seldom."""
    array = int_array(values, where)
    starts = np.flatnonzero(np.diff(array, prepend=-1))
    counts = np.diff(starts, append=len(array))
    return np.stack([array[starts], counts], axis=1).astype(np.int32)


def expand_runs(runs: np.ndarray, num_values: int, where: str) -> list[int]:
    """The inverse of `run_lengths`; refuses runs that do not add up to `num_values`."""
    if runs.shape[1] != 2 and runs.size:
        raise CheckpointError(f"{where} must be [R, 2], got {list(runs.shape)}")
    counts = runs[:, 1] if runs.size else np.empty(0, np.int32)
    total = int(counts.sum(dtype=np.int64))
    if total != num_values:
        raise CheckpointError(f"{where} must have {num_values} entries, got {total}")
    return np.repeat(runs[:, 0], counts).tolist() if runs.size else []


def extra_columns(entries: Sequence[TopLogprobs], prefix: str, where: str) -> dict[str, Any]:
    """Three arrays of the positions' log-probs, named after `prefix`; None without positions."""
    names = [f"{prefix}_values", f"{prefix}_token_ids", f"{prefix}_chosen"]
    if not entries:
        return dict.fromkeys(names)
    makers = (float_array, int_array, float_array)
    return {
        name: make([entry[i] for entry in entries], f"{where}: {name}", num_dims=2)
        for i, (name, make) in enumerate(zip(names, makers, strict=True))
    }


def extra_entries(
    fields: Fields, prefix: str, options: LogprobOptions, where: str
) -> list[TopLogprobs]:
    """The inverse of `extra_columns`."""
    if fields.value(f"{prefix}_values") is None:
        return []
    values = fields.floats(f"{prefix}_values", num_dims=2)
    token_ids = fields.ints(f"{prefix}_token_ids", num_dims=2)
    chosen = fields.floats(f"{prefix}_chosen", num_dims=2)
    num_chosen = len(options.token_ids)
    # A vocabulary may be smaller than top_num.
    has_fit = values.shape == token_ids.shape and values.shape[1] <= options.top_num
    if not has_fit or chosen.shape != (len(values), num_chosen):
        raise CheckpointError(
            f"{where}: {prefix}_values, _token_ids and _chosen must be [N, <= {options.top_num}] "
            f"twice and [N, {num_chosen}], got {values.shape}, {token_ids.shape}, {chosen.shape}"
        )
    columns = (values.tolist(), token_ids.tolist(), chosen.tolist())
    return [TopLogprobs(*entry) for entry in zip(*columns, strict=True)]


def read_prompt_logprobs(
    fields: Fields, extras: list[TopLogprobs], options: LogprobOptions
) -> PromptLogprobs | None:
    """From the arrays of a request's dict; the prompt's first token has no log-prob."""
    if fields.value("prompt_logprobs") is None:
        return None
    head = [None] if options.start_len == 0 else []
    logprobs = [*head, *fields.floats("prompt_logprobs").tolist()]
    return PromptLogprobs(logprobs, [*head, *extras] if options.has_extras else [])


def check_prompt_logprobs(
    scored: PromptLogprobs | None, options: LogprobOptions, num_prompt: int, where: str
) -> None:
    """Raises CheckpointError unless they are those that the options ask for."""
    start = options.start_len
    if start >= num_prompt:
        raise CheckpointError(f"{where}: logprob start_len must be < {num_prompt}, got {start}")
    if scored is None:
        return
    num_expected = num_prompt - start if start >= 0 else 0
    num_extras = num_expected if options.has_extras else 0
    if start < 0 or (len(scored.logprobs), len(scored.extras)) != (num_expected, num_extras):
        raise CheckpointError(
            f"{where}: prompt_logprobs must have {num_expected} entries and {num_extras} extras "
            f"for {start=}, got {len(scored.logprobs)} and {len(scored.extras)}"
        )
    for entries in scored:
        for place, entry in enumerate(entries):
            if (entry is None) != (start == place == 0):
                raise CheckpointError(
                    f"{where}: prompt_logprobs must be None for the prompt's first token alone, "
                    f"got {entry!r} at {start + place}"
                )
