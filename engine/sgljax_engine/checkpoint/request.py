from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from sgljax_engine.checkpoint.scalars import check_scalars
from sgljax_engine.errors import CheckpointError
from sgljax_engine.sampling_params import NO_LOGPROBS, LogprobOptions, SamplingParams
from sgljax_engine.types import (
    FinishReason,
    LogitEdits,
    PromptLogprobs,
    Request,
    RequestStatus,
    TopLogprobs,
    prompt_key,
)

FRESH = frozenset(
    {
        # They follow from others.
        "stop_ids",
        "edits",
        "guide",
        "prompt_key",
        # The engine that it is submitted to gives them.
        "call",
        "engine",
        "arrival",
        "arrival_s",
        # They belong to a request that runs.
        "adapter",
        "pages",
        "state_slot",
        "seen",
        "num_computed",
        "routed",
        "draft_sources",
        # A stream is answered as a whole, since its reader is gone.
        "is_streaming",
    }
)
"""Fields of `Request` that are made anew when it continues; a checkpoint keeps all others."""

_PER_TOKEN = (
    "output_ids",
    "logprobs",
    "scaled_logprobs",
    "processed_logprobs",
    "extra_logprobs",
    "sampling_masks",
    "token_versions",
)
_DTYPES: dict[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "output_ids": np.int32,
    "token_versions": np.int32,
    "logprobs": np.float32,
    "scaled_logprobs": np.float32,
    "processed_logprobs": np.float32,
}
"""The lists that are stored as arrays. Log-probs were float32 before they were Python numbers."""

_EXTRAS = {"values": np.float32, "token_ids": np.int32, "chosen": np.float32}
"""Arrays [N, count] for a list of N `TopLogprobs`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """A request at the moment of a checkpoint, without fields that follow from `params`.

    Attributes:
        rid, group, prompt_ids, params, seed, logprob_options, lora: As in `Request`.
        call: Number of the call; requests that were submitted together share it.
        status: FINISHED if and only if there is a `finish` or an `error`.
        finish: Why it ended.
        error: The error that it failed with, if its caller gets an exception.
        output_ids, logprobs, scaled_logprobs, processed_logprobs, token_versions: One entry a
            token; log-probs are float32.
        extra_logprobs: One entry a token if `logprob_options` asks for them, else empty.
        sampling_masks: One array of C ints a token if `params` ask for them, else empty.
        prompt_logprobs: None before the prompt was scored.
        num_cached, num_retractions, num_cache_misses: As in `Request`.
        age_s: Seconds since it was submitted.
        first_token_s: Seconds from submission to its first token; None before.
    """

    rid: str
    group: str
    call: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    logprob_options: LogprobOptions = NO_LOGPROBS
    lora: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish: FinishReason | None = None
    error: str | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    scaled_logprobs: list[float] = dataclasses.field(default_factory=list)
    processed_logprobs: list[float] = dataclasses.field(default_factory=list)
    extra_logprobs: list[TopLogprobs] = dataclasses.field(default_factory=list)
    sampling_masks: list[Sequence[int]] = dataclasses.field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    token_versions: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    num_retractions: int = 0
    num_cache_misses: int = 0
    age_s: float = 0.0
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        check_scalars(self, f"request {self.rid!r}")
        num_tokens, limit = len(self.output_ids), self.params.max_new_tokens
        has_extras = self.logprob_options.has_extras
        on_request = {
            "extra_logprobs": has_extras,
            "sampling_masks": self.params.return_sampling_mask,
        }
        for name in _PER_TOKEN:
            num_expected = num_tokens if on_request.get(name, True) else 0
            self._check_length(name, getattr(self, name), num_expected)
        if not self.rid or not self.prompt_ids:
            raise self._error("rid and prompt_ids must not be empty")
        if limit is None:  # requests get one when they are made
            raise self._error("params.max_new_tokens must be a number, got None")
        # A request that only prefills generates a token, which it does not report.
        if num_tokens > max(1, limit):
            raise self._error(f"{num_tokens} tokens exceed {self.params.max_new_tokens=}")
        has_ended = self.finish is not None or self.error is not None
        if has_ended != (self.status is RequestStatus.FINISHED):
            raise self._error(f"{self.status} contradicts {self.finish=} and {self.error=}")
        if self.prompt_logprobs is not None:
            num_scored = len(self.prompt_ids) - self.logprob_options.start_len
            self._check_length("prompt_logprobs", self.prompt_logprobs.logprobs, num_scored)
            num_extras = num_scored if has_extras else 0
            self._check_length("prompt_logprobs.extras", self.prompt_logprobs.extras, num_extras)

    def _check_length(self, name: str, values: Sequence[Any], num_expected: int) -> None:
        if len(values) != num_expected:
            raise self._error(f"{name} must have {num_expected} entries, got {len(values)}")

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"request {self.rid!r}: {message}")

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        num_tokens: int,
        now_s: float,
        status: RequestStatus,
        prompt_logprobs: PromptLogprobs | None = None,
        finish: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestCheckpoint:
        """The request at the time when it had `num_tokens` output tokens.

        `status` and the arguments behind it are those of that time. Lists of a request only grow,
        so the engine thread may go on with it; the three counters are the current ones. `now_s` is
        a reading of `time.perf_counter`, as `request.arrival_s` is.
        """
        first = request.time_to_first_token_s if num_tokens else None
        given: dict[str, Any] = {
            "status": status,
            "prompt_logprobs": prompt_logprobs,
            "finish": finish,
            "error": error,
            "age_s": max(now_s - request.arrival_s, 0.0),
            "first_token_s": None if first is None else max(first, 0.0),
        }
        for field in dataclasses.fields(cls):
            if field.name not in given:
                value = getattr(request, field.name)
                given[field.name] = list(value[:num_tokens]) if field.name in _PER_TOKEN else value
        return cls(**given)

    def to_request(
        self, stop_ids: tuple[int, ...], edits: LogitEdits | None, now_s: float
    ) -> Request:
        """A new request that continues this one: waiting, without pages; or finished.

        `stop_ids` and `edits` follow from `params` and the model. The request was submitted `age_s`
        before `now_s`, a reading of `time.perf_counter`.
        """
        kept: dict[str, Any] = {}
        for name in {each.name for each in dataclasses.fields(Request)} - FRESH:
            value = getattr(self, name)
            kept[name] = list(value) if isinstance(value, list) else value
        arrival_s, first = now_s - self.age_s, self.first_token_s
        is_finished = self.status is RequestStatus.FINISHED
        kept |= {
            "first_token_s": None if first is None else arrival_s + first,
            "status": RequestStatus.FINISHED if is_finished else RequestStatus.WAITING,
            "token_versions": array("i", self.token_versions),
        }
        return Request(
            stop_ids=stop_ids,
            edits=edits,
            prompt_key=prompt_key(self.prompt_ids, self.lora),
            arrival_s=arrival_s,
            **kept,
        )

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON and, for what has an entry a token, arrays of int32 or float32.

        Raises:
            CheckpointError: when a token or a version does not fit int32.
        """
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        scored: PromptLogprobs | None = found.pop("prompt_logprobs")
        found |= {
            "params": _non_default(self.params),
            "logprob_options": _non_default(self.logprob_options),
            "status": self.status.value,
            "finish": None if self.finish is None else dataclasses.asdict(self.finish),
        }
        try:
            found |= {name: np.asarray(found[name], dtype) for name, dtype in _DTYPES.items()}
        except OverflowError as error:
            raise self._error(f"a token or a version is no int32: {error}") from error
        found |= _extra_arrays("extra_logprobs", found.pop("extra_logprobs"))
        masks = found.pop("sampling_masks")
        if masks:
            found |= {f"sampling_masks.{part}": array for part, array in _to_csr(masks).items()}
        if scored is not None:  # the prompt's first token has none
            known = [each for each in scored.logprobs if each is not None]
            found["prompt_logprobs"] = np.asarray(known, np.float32)
            extras = [each for each in scored.extras if each is not None]
            found |= _extra_arrays("prompt_extras", extras)
        return found

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> RequestCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        try:
            fields = dict(given)
            options = LogprobOptions(**fields["logprob_options"])
            fields |= {
                name: _pop_array(fields, name, kind).tolist() for name, kind in _DTYPES.items()
            }
            extras = _pop_extras(fields, "prompt_extras")
            if "prompt_logprobs" in fields:
                head = [None] if options.start_len == 0 else []
                known = _pop_array(fields, "prompt_logprobs", np.float32).tolist()
                extras = [*head, *extras] if options.has_extras else []
                fields["prompt_logprobs"] = PromptLogprobs([*head, *known], extras)
            finish = fields["finish"]
            fields |= {
                "params": SamplingParams(**fields["params"]),
                "logprob_options": options,
                "status": RequestStatus(fields["status"]),
                "finish": None if finish is None else FinishReason(**finish),
                "extra_logprobs": _pop_extras(fields, "extra_logprobs"),
                "sampling_masks": _pop_masks(fields),
            }
            return cls(**fields)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            rid = given.get("rid") if isinstance(given, dict) else None
            raise CheckpointError(f"request {rid!r} is none: {error!r}") from error


def _non_default(params: SamplingParams | LogprobOptions) -> dict[str, Any]:
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    defaults = {field.name: field.default for field in dataclasses.fields(params)}
    return {k: v for k, v in given.items() if repr(v) != repr(defaults[k])}  # -0.0 is not 0.0


def _pop_array(
    fields: dict[str, Any], name: str, dtype: type[np.generic], ndim: int = 1
) -> np.ndarray:
    """Removes an array, which must have this dtype."""
    found = fields.pop(name)
    if not isinstance(found, np.ndarray) or found.dtype != dtype or found.ndim != ndim:
        raise TypeError(f"{name} must be an array of {dtype.__name__} in {ndim} dimensions")
    return found


def _extra_arrays(name: str, entries: Sequence[TopLogprobs]) -> dict[str, np.ndarray]:
    if not entries:
        return {}
    columns = zip(*entries, strict=True)
    return {
        f"{name}.{part}": np.asarray(column, dtype)
        for (part, dtype), column in zip(_EXTRAS.items(), columns, strict=True)
    }


def _to_csr(masks: Sequence[np.ndarray | Sequence[int]]) -> dict[str, np.ndarray]:
    """Masks as vLLM's two arrays: token i has `token_ids[offsets[i] : offsets[i + 1]]`.

    Returns:
        `token_ids` int32 [N] and `offsets` int32 [len(masks) + 1].
    """
    offsets = np.cumsum([0, *map(len, masks)], dtype=np.int32)
    return {"token_ids": np.concatenate(masks), "offsets": offsets}


def _pop_masks(fields: dict[str, Any]) -> list[Sequence[int]]:
    """Removes the arrays of `_to_csr`, and returns the masks."""
    if "sampling_masks.offsets" not in fields:
        return []
    ids, offsets = (
        _pop_array(fields, f"sampling_masks.{part}", np.int32) for part in ("token_ids", "offsets")
    )
    if not (len(offsets) and offsets[0] == 0 and offsets[-1] == len(ids)):
        raise ValueError("sampling_masks.offsets must go from 0 to the number of token_ids")
    return [array("i", each.tobytes()) for each in np.split(ids, offsets[1:-1])]


def _pop_extras(fields: dict[str, Any], name: str) -> list[Any]:
    """Removes the arrays of `_extra_arrays`, and returns their entries."""
    if f"{name}.values" not in fields:
        return []
    columns = [
        _pop_array(fields, f"{name}.{part}", kind, 2).tolist() for part, kind in _EXTRAS.items()
    ]
    return [TopLogprobs(*each) for each in zip(*columns, strict=True)]
