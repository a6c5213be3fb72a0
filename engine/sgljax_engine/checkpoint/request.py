"""What a checkpoint keeps of one request."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from sgljax_engine.checkpoint.columns import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    check_prompt_logprobs,
    expand_runs,
    extra_columns,
    extra_entries,
    read_prompt_logprobs,
    run_lengths,
)
from sgljax_engine.checkpoint.fields import Fields, float_array, int_array
from sgljax_engine.checkpoint.request_fields import (
    non_default,
    read_finish,
    read_params,
    read_status,
)
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

_COUNTS = ("call", "seed", "num_cached", "num_retractions", "num_cache_misses")
_SECONDS = ("age_s", "first_token_s")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """One request at the moment of a checkpoint. What follows from `params` is not kept.

    Attributes:
        rid, group, prompt_ids, params, seed, logprob_options, is_streaming, lora: As of `Request`.
        call: Requests that were submitted together share it.
        status: FINISHED if and only if there is a `finish` or an `error`.
        finish: Why it ended.
        error: What it failed with, if its caller gets an exception.
        output_ids, logprobs, scaled_logprobs, processed_logprobs, token_versions: One entry a
            token.
        extra_logprobs: One entry a token if `logprob_options` asks for them, else empty.
        prompt_logprobs: None before the prompt was scored.
        num_cached, num_retractions, num_cache_misses: As of `Request`.
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
    is_streaming: bool = False
    lora: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish: FinishReason | None = None
    error: str | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    scaled_logprobs: list[float] = dataclasses.field(default_factory=list)
    processed_logprobs: list[float] = dataclasses.field(default_factory=list)
    extra_logprobs: list[TopLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    token_versions: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    num_retractions: int = 0
    num_cache_misses: int = 0
    age_s: float = 0.0
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        """Raises CheckpointError when fields contradict one another."""
        given = {name: getattr(self, name) for name in (*_COUNTS, *_SECONDS)}
        fields = Fields(given, f"request {self.rid!r}", given)
        for name in _COUNTS:
            fields.count(name)
        for name in _SECONDS:
            fields.optional_number(name)
        self._check_lists()
        check_prompt_logprobs(
            self.prompt_logprobs, self.logprob_options, len(self.prompt_ids), fields.where
        )

    def _check_lists(self) -> None:
        num_tokens = len(self.output_ids)
        num_extras = num_tokens if self.logprob_options.has_extras else 0
        for name, entries, num_expected in (
            ("logprobs", self.logprobs, num_tokens),
            ("scaled_logprobs", self.scaled_logprobs, num_tokens),
            ("processed_logprobs", self.processed_logprobs, num_tokens),
            ("token_versions", self.token_versions, num_tokens),
            ("extra_logprobs", self.extra_logprobs, num_extras),
        ):
            if len(entries) != num_expected:
                raise self._error(f"{name} must have {num_expected} entries, got {len(entries)}")
        if not self.rid:
            raise self._error("rid must not be empty")
        if not self.prompt_ids:
            raise self._error("prompt_ids must hold a token")
        if num_tokens > self.params.max_new_tokens:
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
        """What a request was when it had `num_tokens` output tokens.

        Lists of a request only grow, so it may be changed meanwhile by the engine thread; the
        three counters are those of now.

        Args:
            request: Anyone's.
            call: Which call submitted it.
            num_tokens: Output tokens to keep; the request has at least as many.
            now_s: By `time.perf_counter`, as `request.arrival_s` is.
            status: As of then.
            prompt_logprobs: As of then.
            finish: As of then.
            error: What it failed with.
        """
        first = request.time_to_first_token_s if num_tokens else None
        return cls(
            rid=request.rid,
            group=request.group,
            call=call,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            logprob_options=request.logprob_options,
            is_streaming=request.is_streaming,
            lora=request.lora,
            status=status,
            finish=finish,
            error=error,
            output_ids=request.output_ids[:num_tokens],
            logprobs=request.logprobs[:num_tokens],
            scaled_logprobs=request.scaled_logprobs[:num_tokens],
            processed_logprobs=request.processed_logprobs[:num_tokens],
            extra_logprobs=request.extra_logprobs[:num_tokens],
            prompt_logprobs=prompt_logprobs,
            token_versions=request.token_versions[:num_tokens].tolist(),
            num_cached=request.num_cached,
            num_retractions=request.num_retractions,
            num_cache_misses=request.num_cache_misses,
            age_s=max(now_s - request.arrival_s, 0.0),
            first_token_s=None if first is None else max(first, 0.0),
        )

    def to_request(
        self, stop_ids: tuple[int, ...], edits: LogitEdits | None, now_s: float
    ) -> Request:
        """A new request that goes on from here: it waits, without pages, or is finished.

        Args:
            stop_ids: Follow from `params` and the model.
            edits: Follow from `params`.
            now_s: By `time.perf_counter`; the request was submitted `age_s` before.
        """
        is_finished = self.status is RequestStatus.FINISHED
        arrival_s = now_s - self.age_s
        first = self.first_token_s
        return Request(
            rid=self.rid,
            prompt_ids=list(self.prompt_ids),
            params=self.params,
            seed=self.seed,
            stop_ids=stop_ids,
            edits=edits,
            logprob_options=self.logprob_options,
            is_streaming=self.is_streaming,
            lora=self.lora,
            group=self.group,
            prompt_key=prompt_key(self.prompt_ids, self.lora),
            arrival_s=arrival_s,
            first_token_s=None if first is None else arrival_s + first,
            status=RequestStatus.FINISHED if is_finished else RequestStatus.WAITING,
            output_ids=list(self.output_ids),
            logprobs=list(self.logprobs),
            scaled_logprobs=list(self.scaled_logprobs),
            processed_logprobs=list(self.processed_logprobs),
            extra_logprobs=list(self.extra_logprobs),
            prompt_logprobs=self.prompt_logprobs,
            num_cached=self.num_cached,
            num_retractions=self.num_retractions,
            num_cache_misses=self.num_cache_misses,
            token_versions=array("i", self.token_versions),
            finish=self.finish,
        )

    # ------------------------------------------------------------------ from and to dicts

    def to_dict(self) -> dict[str, Any]:
        """JSON but for `columns.INT_COLUMNS` and `FLOAT_COLUMNS`, which are arrays or None.

        `token_versions` becomes [R, 2] (version, tokens of it in a row).
        """
        where, scored = f"request {self.rid!r}", self.prompt_logprobs
        fields: dict[str, Any] = {
            "rid": self.rid,
            "group": self.group,
            "call": self.call,
            "seed": self.seed,
            "is_streaming": self.is_streaming,
            "lora": self.lora,
            "status": self.status.value,
            "params": non_default(self.params),
            "logprob_options": non_default(self.logprob_options),
            "finish": None if self.finish is None else dataclasses.asdict(self.finish),
            "error": self.error,
            "num_cached": self.num_cached,
            "num_retractions": self.num_retractions,
            "num_cache_misses": self.num_cache_misses,
            "age_s": self.age_s,
            "first_token_s": self.first_token_s,
            "prompt_ids": int_array(self.prompt_ids, f"{where}: prompt_ids"),
            "output_ids": int_array(self.output_ids, f"{where}: output_ids"),
            "token_versions": run_lengths(self.token_versions, f"{where}: token_versions"),
            "prompt_logprobs": None,
        }
        for name in ("logprobs", "scaled_logprobs", "processed_logprobs"):
            fields[name] = float_array(getattr(self, name), f"{where}: {name}")
        fields |= extra_columns(self.extra_logprobs, "extra", where)
        extras: list[TopLogprobs] = []
        if scored is not None:
            known = [entry for entry in scored.logprobs if entry is not None]
            fields["prompt_logprobs"] = float_array(known, f"{where}: prompt_logprobs")
            extras = [entry for entry in scored.extras if entry is not None]
        return fields | extra_columns(extras, "prompt_extra", where)

    @classmethod
    def from_dict(cls, given: object) -> RequestCheckpoint:
        """The inverse of `to_dict`; arrays may be lists. Raises CheckpointError."""
        rid = given.get("rid") if isinstance(given, dict) else None
        where = f"request {rid!r}"
        fields = Fields(given, where, _NAMES)
        params = read_params(SamplingParams, fields, "params")
        options = read_params(LogprobOptions, fields, "logprob_options")
        output_ids = fields.ints("output_ids").tolist()
        runs = fields.ints("token_versions", num_dims=2)
        extras = extra_entries(fields, "prompt_extra", options, where)
        return cls(
            rid=fields.text("rid"),
            group=fields.text("group"),
            call=fields.count("call"),
            prompt_ids=fields.ints("prompt_ids").tolist(),
            params=params,
            seed=fields.count("seed"),
            logprob_options=options,
            is_streaming=fields.flag("is_streaming"),
            lora=fields.optional_text("lora"),
            status=read_status(fields),
            finish=read_finish(fields),
            error=fields.optional_text("error"),
            output_ids=output_ids,
            logprobs=fields.floats("logprobs").tolist(),
            scaled_logprobs=fields.floats("scaled_logprobs").tolist(),
            processed_logprobs=fields.floats("processed_logprobs").tolist(),
            extra_logprobs=extra_entries(fields, "extra", options, where),
            prompt_logprobs=read_prompt_logprobs(fields, extras, options),
            token_versions=expand_runs(runs, len(output_ids), f"{where}.token_versions"),
            num_cached=fields.count("num_cached"),
            num_retractions=fields.count("num_retractions"),
            num_cache_misses=fields.count("num_cache_misses"),
            age_s=fields.number("age_s"),
            first_token_s=fields.optional_number("first_token_s"),
        )


_NAMES = {field.name for field in dataclasses.fields(RequestCheckpoint)} - {"extra_logprobs"}
_NAMES |= {*INT_COLUMNS, *FLOAT_COLUMNS}
