"""Codecs of the log-probs and weight versions of a request, and what they must fulfil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sgljax_engine.checkpoint.codecs import FLOAT, INT, Codec
from sgljax_engine.checkpoint.fields import Fields, float_array, int_array
from sgljax_engine.errors import CheckpointError
from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.types import PromptLogprobs, TopLogprobs


class _Versions(Codec):
    """[R, 2] (version, output tokens of it in a row): they change seldom."""

    def entries(self, name: str) -> dict[str, tuple[str, ...]]:
        return {name: INT}

    def write(self, name: str, value: Sequence[int], where: str) -> dict[str, Any]:
        array = int_array(value, f"{where}: {name}")
        starts = np.flatnonzero(np.diff(array, prepend=-1))
        counts = np.diff(starts, append=len(array))
        return {name: np.stack([array[starts], counts], axis=1).astype(np.int32)}

    def read(self, name: str, fields: Fields, known: Mapping[str, Any]) -> list[int]:
        """Refuses runs that do not add up to the output tokens."""
        where, num_tokens = f"{fields.where}.{name}", len(known["output_ids"])
        runs = fields.ints(name, num_dims=2)
        if not runs.size:
            runs = runs.reshape(0, 2)
        if runs.shape[1] != 2:
            raise CheckpointError(f"{where} must be [R, 2], got {list(runs.shape)}")
        total = int(runs[:, 1].sum(dtype=np.int64))
        if total != num_tokens:
            raise CheckpointError(f"{where} must have {num_tokens} entries, got {total}")
        return np.repeat(runs[:, 0], runs[:, 1]).tolist()


class _Extras(Codec):
    """The log-probs of a list of positions: three arrays, or None without positions."""

    def __init__(self, prefix: str) -> None:
        """The arrays are named after `prefix`."""
        kinds = {"values": FLOAT, "token_ids": INT, "chosen": FLOAT}
        self._dtypes = {f"{prefix}_{end}": dtypes for end, dtypes in kinds.items()}

    def entries(self, name: str) -> dict[str, tuple[str, ...]]:
        return self._dtypes

    def write(self, name: str, value: Sequence[TopLogprobs], where: str) -> dict[str, Any]:
        if not value:
            return dict.fromkeys(self._dtypes)
        columns = zip(*value, strict=True)
        arrays: dict[str, Any] = {}
        for (entry, dtypes), column in zip(self._dtypes.items(), columns, strict=True):
            make = int_array if dtypes is INT else float_array
            arrays[entry] = make(column, f"{where}: {entry}", num_dims=2)
        return arrays

    def read(self, name: str, fields: Fields, known: Mapping[str, Any]) -> list[TopLogprobs]:
        options: LogprobOptions = known["logprob_options"]
        names = list(self._dtypes)
        if fields.value(names[0]) is None:
            return []
        values = fields.floats(names[0], num_dims=2)
        token_ids = fields.ints(names[1], num_dims=2)
        chosen = fields.floats(names[2], num_dims=2)
        num_chosen = len(options.token_ids)
        # A vocabulary may be smaller than top_num.
        has_fit = values.shape == token_ids.shape and values.shape[1] <= options.top_num
        if not has_fit or chosen.shape != (len(values), num_chosen):
            raise CheckpointError(
                f"{fields.where}: {', '.join(names)} must be [N, <= {options.top_num}] twice and "
                f"[N, {num_chosen}], got {values.shape}, {token_ids.shape}, {chosen.shape}"
            )
        columns = (values.tolist(), token_ids.tolist(), chosen.tolist())
        return [TopLogprobs(*entry) for entry in zip(*columns, strict=True)]


class _Scored(Codec):
    """The log-probs of a prompt: one array, and its `_Extras`; its first token has none."""

    _EXTRAS = _Extras("prompt_extra")

    def entries(self, name: str) -> dict[str, tuple[str, ...]]:
        return {name: FLOAT} | self._EXTRAS.entries(name)

    def write(self, name: str, value: PromptLogprobs | None, where: str) -> dict[str, Any]:
        if value is None:
            return dict.fromkeys(self.entries(name))
        logprobs = [each for each in value.logprobs if each is not None]
        extras = [each for each in value.extras if each is not None]
        array = float_array(logprobs, f"{where}: {name}")
        return {name: array} | self._EXTRAS.write(name, extras, where)

    def read(self, name: str, fields: Fields, known: Mapping[str, Any]) -> PromptLogprobs | None:
        extras = self._EXTRAS.read(name, fields, known)
        if fields.value(name) is None:
            return None
        options: LogprobOptions = known["logprob_options"]
        head = [None] if options.start_len == 0 else []
        logprobs = [*head, *fields.floats(name).tolist()]
        return PromptLogprobs(logprobs, [*head, *extras] if options.has_extras else [])


VERSIONS = _Versions()
EXTRAS = _Extras("extra")
SCORED = _Scored()


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
        for index, entry in enumerate(entries):
            if (entry is None) != (start == index == 0):
                raise CheckpointError(
                    f"{where}: prompt_logprobs must be None for the prompt's first token alone, "
                    f"got {entry!r} at {start + index}"
                )
