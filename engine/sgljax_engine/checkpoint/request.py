"""A request in a checkpoint."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from sgljax_engine.checkpoint.codecs import (
    COUNT,
    FLAG,
    FLOATS,
    IDS,
    NUMBER,
    OPTIONAL_NUMBER,
    OPTIONAL_TEXT,
    PER_TOKEN,
    TEXT,
    check_numbers,
    codecs,
    from_dict,
    notes,
    to_dict,
)
from sgljax_engine.checkpoint.columns import EXTRAS, SCORED, VERSIONS, check_prompt_logprobs
from sgljax_engine.checkpoint.request_fields import FINISH, OPTIONS, PARAMS, STATUS
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
        "prompt_key",
        # The engine that it is submitted to gives them.
        "call",
        "engine",
        "arrival",
        "arrival_s",
        # They are of a request that runs.
        "adapter",
        "pages",
        "state_slot",
        "seen",
        "num_computed",
        "routed",
        "text",
        "draft_sources",
    }
)
"""Fields of `Request` that are made anew when it continues; a checkpoint keeps all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """A request at the moment of a checkpoint, without fields that follow from `params`.

    Attributes:
        rid, group, prompt_ids, params, seed, logprob_options, is_streaming, lora: As in `Request`.
        call: Number of the call; requests that were submitted together share it.
        status: FINISHED if and only if there is a `finish` or an `error`.
        finish: Why it ended.
        error: The error that it failed with, if its caller gets an exception.
        output_ids, logprobs, scaled_logprobs, processed_logprobs, token_versions: One entry a
            token.
        extra_logprobs: One entry a token if `logprob_options` asks for them, else empty.
        prompt_logprobs: None before the prompt was scored.
        num_cached, num_retractions, num_cache_misses: As in `Request`.
        age_s: Seconds since it was submitted.
        first_token_s: Seconds from submission to its first token; None before.
    """

    rid: Annotated[str, TEXT]
    group: Annotated[str, TEXT]
    call: Annotated[int, COUNT]
    prompt_ids: Annotated[list[int], IDS]
    params: Annotated[SamplingParams, PARAMS]
    seed: Annotated[int, COUNT]
    logprob_options: Annotated[LogprobOptions, OPTIONS] = NO_LOGPROBS
    is_streaming: Annotated[bool, FLAG] = False
    lora: Annotated[str | None, OPTIONAL_TEXT] = None
    status: Annotated[RequestStatus, STATUS] = RequestStatus.WAITING
    finish: Annotated[FinishReason | None, FINISH] = None
    error: Annotated[str | None, OPTIONAL_TEXT] = None
    output_ids: Annotated[list[int], IDS, PER_TOKEN] = field(default_factory=list)
    logprobs: Annotated[list[float], FLOATS, PER_TOKEN] = field(default_factory=list)
    scaled_logprobs: Annotated[list[float], FLOATS, PER_TOKEN] = field(default_factory=list)
    processed_logprobs: Annotated[list[float], FLOATS, PER_TOKEN] = field(default_factory=list)
    extra_logprobs: Annotated[list[TopLogprobs], EXTRAS, PER_TOKEN] = field(default_factory=list)
    prompt_logprobs: Annotated[PromptLogprobs | None, SCORED] = None
    token_versions: Annotated[list[int], VERSIONS, PER_TOKEN] = field(default_factory=list)
    num_cached: Annotated[int, COUNT] = 0
    num_retractions: Annotated[int, COUNT] = 0
    num_cache_misses: Annotated[int, COUNT] = 0
    age_s: Annotated[float, NUMBER] = 0.0
    first_token_s: Annotated[float | None, OPTIONAL_NUMBER] = None

    def __post_init__(self) -> None:
        """Raises CheckpointError when fields contradict one another."""
        where = f"request {self.rid!r}"
        check_numbers(self, where)
        self._check_lists()
        check_prompt_logprobs(
            self.prompt_logprobs, self.logprob_options, len(self.prompt_ids), where
        )

    def _check_lists(self) -> None:
        num_tokens = len(self.output_ids)
        num_extras = num_tokens if self.logprob_options.has_extras else 0
        for name in _PER_TOKEN:
            num_entries = len(getattr(self, name))
            num_expected = num_extras if name == "extra_logprobs" else num_tokens
            if num_entries != num_expected:
                raise self._error(f"{name} must have {num_expected} entries, got {num_entries}")
        if not self.rid:
            raise self._error("rid must not be empty")
        if not self.prompt_ids:
            raise self._error("prompt_ids must hold a token")
        limit = self.params.max_new_tokens
        if limit is None:  # requests get one when they are made
            raise self._error("params.max_new_tokens must be a number, got None")
        # A request that only prefills generates a token, which it does not report.
        if num_tokens > max(1, limit):
            raise self._error(f"{num_tokens} tokens exceed {self.params.max_new_tokens=}")
        has_ended = self.finish is not None or self.error is not None
        if has_ended != (self.status is RequestStatus.FINISHED):
            raise self._error(
                f"status {self.status.value!r} contradicts {self.finish=} and {self.error=}"
            )

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"request {self.rid!r}: {message}")

    # ------------------------------------------------------------------ from and to requests

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        call: int,
        num_tokens: int,
        now_s: float,
        status: RequestStatus,
        prompt_logprobs: PromptLogprobs | None = None,
        finish: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestCheckpoint:
        """The request at the time when it had `num_tokens` output tokens.

        Lists of a request only grow, so the engine thread may go on with it; the three counters are
        the current ones.

        Args:
            request: A request of any engine.
            call: Number of the call that submitted it.
            num_tokens: Output tokens to keep; the request has at least as many.
            now_s: By `time.perf_counter`, as `request.arrival_s` is.
            status: Its status then.
            prompt_logprobs: Its prompt's log-probs then.
            finish: Its finish reason then.
            error: What it failed with.
        """
        first = request.time_to_first_token_s if num_tokens else None
        given: dict[str, Any] = {
            "call": call,
            "status": status,
            "prompt_logprobs": prompt_logprobs,
            "finish": finish,
            "error": error,
            "age_s": max(now_s - request.arrival_s, 0.0),
            "first_token_s": None if first is None else max(first, 0.0),
        }
        for name in codecs(cls).keys() - given.keys():
            value = getattr(request, name)
            given[name] = list(value[:num_tokens]) if name in _PER_TOKEN else value
        return cls(**given)

    def to_request(
        self, stop_ids: tuple[int, ...], edits: LogitEdits | None, now_s: float
    ) -> Request:
        """A new request that continues this one: waiting, without pages; or finished.

        Args:
            stop_ids: Follow from `params` and the model.
            edits: Follow from `params`.
            now_s: By `time.perf_counter`; the request was submitted `age_s` before.
        """
        kept: dict[str, Any] = {}
        for name in {each.name for each in fields(Request)} - FRESH:
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

    # ------------------------------------------------------------------ from and to dicts

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON, except for the entries with dtypes (`codecs.entries`): arrays or None."""
        return to_dict(self, f"request {self.rid!r}")

    @classmethod
    def from_dict(cls, given: object) -> RequestCheckpoint:
        """The inverse of `to_dict`; arrays may be lists. Raises CheckpointError."""
        rid = given.get("rid") if isinstance(given, dict) else None
        return from_dict(cls, given, f"request {rid!r}")


_PER_TOKEN = tuple(
    name for name, note in notes(RequestCheckpoint, str).items() if note == PER_TOKEN
)
