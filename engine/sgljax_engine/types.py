"""Host-side nouns of the request path. This module imports no JAX.

The words are those of vLLM and SGLang: a `Request` waits, runs, may be *retracted* (its KV pages
taken away, to be prefilled again later) and finishes with a `FinishReason`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from sgljax_engine.errors import InvalidRequestError, unknown_name_message

MAX_STOP_TOKEN_IDS = 16
"""Stop token ids of one request at most, end-of-sequence ids included (an array's width)."""

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Immutable; `dataclasses.replace` makes a changed copy.

    Attributes:
        n: Samples to draw from the prompt, each an output of its own. >= 1.
        temperature: Divides the logits; 0 means greedy. In [0, 1e6].
        top_k: Keep the k most likely tokens; -1 or None keeps all. -1, None or >= 1.
        top_p: Keep the smallest set of tokens with at least this probability. In (0, 1].
        min_p: Keep tokens at least this fraction as likely as the likeliest. In [0, 1].
        seed: Makes the random draws of this request reproducible; None draws a fresh seed.
            Sample i of n uses a seed derived from (seed, i). In [0, 2**63 - 1].
        max_new_tokens: Tokens to generate at most. >= 1.
        stop_token_ids: Generation stops after any of these; the token is kept in `output_ids`.
        ignore_eos: Do not stop at the model's end-of-sequence tokens (`stop_token_ids` still stop).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int | None = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Checks every field; raises InvalidRequestError naming field, value and limit."""
        ids = self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            raise InvalidRequestError(f"stop_token_ids must be a list of integers, got {ids!r}")
        # Checked values are stored as Python numbers, whatever array scalars they came as.
        checked: dict[str, Any] = {
            "n": _check_int("n", self.n, low=1),
            "temperature": _check_number(
                "temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE
            ),
            "top_p": _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True),
            "min_p": _check_number("min_p", self.min_p, low=0.0, high=1.0),
            "max_new_tokens": _check_int("max_new_tokens", self.max_new_tokens, low=1),
            "stop_token_ids": tuple(_check_int("stop_token_ids", i, low=0) for i in ids),
        }
        if self.top_k is not None and self.top_k != -1:
            note = " (or -1 or None for all)"
            checked["top_k"] = _check_int("top_k", self.top_k, low=1, note=note)
        if self.seed is not None:
            checked["seed"] = _check_int("seed", self.seed, low=0, high=MAX_SEED)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Builds from a dict; an unknown key raises InvalidRequestError with the nearest one."""
        if not isinstance(fields, Mapping):
            raise InvalidRequestError(
                f"sampling_params must be a dict or SamplingParams, got {type(fields).__name__}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for key in fields:
            if key not in known:
                raise InvalidRequestError(unknown_name_message("sampling field", str(key), known))
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """All fields as a dict that `from_dict` accepts."""
        return dataclasses.asdict(self)


def _check_int(
    name: str, value: object, *, low: int, high: int | None = None, note: str = ""
) -> int:
    limit = f">= {low}" if high is None else f"between {low} and {high}"
    try:
        if isinstance(value, bool):  # an int in Python, but never a count
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(
            f"{name} must be an integer {limit}{note}, got {value!r}"
        ) from None
    if number < low or (high is not None and number > high):
        raise InvalidRequestError(f"{name} must be {limit}{note}, got {value!r}")
    return number


def _check_number(
    name: str, value: object, *, low: float, high: float, low_open: bool = False
) -> float:
    limit = f"in {'(' if low_open else '['}{low:g}, {high:g}]"
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidRequestError(f"{name} must be a number {limit}, got {value!r}") from None
    below = number <= low if low_open else number < low
    if math.isnan(number) or below or number > high:
        raise InvalidRequestError(f"{name} must be {limit}, got {value!r}")
    return number


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended.

    Attributes:
        type: `stop` (a stop token), `length` (max_new_tokens), `abort` (asked for) or `error`.
        matched: The stop token id, for `stop`.
        message: What happened, for `abort` and `error`.
    """

    type: Literal["stop", "length", "abort", "error"]
    matched: int | None = None
    message: str = ""

    def to_dict(self, num_output_tokens: int) -> dict[str, Any]:
        """The `meta_info["finish_reason"]` dict; `length` carries the output's length in tokens."""
        if self.type == "length":
            return {"type": "length", "length": num_output_tokens}
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        return {"type": self.type, "message": self.message}


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Owned and changed by the engine thread alone.

    `num_computed` counts the tokens whose K and V are in `pages`. The newest token is never
    among them: it is the next decode step's input. A request whose `num_computed` is smaller
    than `kv_len` has to be prefilled (for the first time, or again after a retraction).
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    prompt_key: int = 0
    arrival: int = 0
    arrival_s: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    scaled_logprobs: list[float] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    num_cache_misses: int = 0
    weight_version: int = -1
    finish: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def kv_len(self) -> int:
        """Tokens that must be in the KV cache before a decode step: all but the newest."""
        return self.num_tokens - 1

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.params.max_new_tokens - len(self.output_ids)

    @property
    def last_token(self) -> int:
        """The newest token, the next decode step's input."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output together."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        head = self.prompt_ids[start:] if start < num_prompt else []
        return head + self.output_ids[max(start - num_prompt, 0) : end - num_prompt]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a request, to be written into `pages`.

    The pages are those that the request had when the chunk was planned; it may decode in a copy
    of the last one.
    """

    request: Request
    start: int
    num_tokens: int
    pages: tuple[int, ...]


class PageCopy(NamedTuple):
    """A page's keys and values, to be copied into another page."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the device does next: prefill chunks, page copies, then up to `num_steps` of decode.

    Attributes:
        prefill: Chunks that fit the token budget; each request at most once.
        copies: Pages to copy, all sources read before any target is written.
        decode: Requests to decode; their prefill is complete or completes in `prefill`.
        step_limits: For each decode row, the steps that its pages and max_new_tokens allow.
        num_steps: Decode steps in this dispatch.
        retracted: Requests that lost their pages while this was decided.
        started: Requests that got pages, for the first time or again.
        yield_on_finish: End the dispatch early when a row finishes, since others wait for room.
    """

    prefill: list[PrefillChunk]
    copies: list[PageCopy]
    decode: list[Request]
    step_limits: list[int]
    num_steps: int
    retracted: list[Request]
    started: list[Request]
    yield_on_finish: bool = False

    @property
    def is_empty(self) -> bool:
        """True when there is nothing for the device to do."""
        return not self.prefill and not self.copies and not self.decode


@dataclasses.dataclass(frozen=True, slots=True)
class RowOutput:
    """What one decode row produced in one dispatch; lists of equal length, one entry a token."""

    token_ids: list[int]
    logprobs: list[float]
    scaled_logprobs: list[float]
    stopped: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """What a dispatch produced: a `RowOutput` for each of `SchedulerOutput.decode`, in order."""

    rows: list[RowOutput]
    num_cache_misses: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, as handed to callers. All fields are host values.

    Attributes:
        rid: The request's id.
        text: The output as text, without the stop token; empty when no tokenizer is set.
        output_ids: Generated token ids, the stop token included.
        logprobs: log softmax(logits)[token] for each output token (the raw log-prob).
        scaled_logprobs: log softmax(logits / temperature)[token], equal to `logprobs` at
            temperature 1 and when greedy. It is what Tunix recomputes on the trainer's side.
        finish: Why it ended.
        num_prompt_tokens: Tokens in the prompt.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        num_cache_misses: Programs compiled while it ran.
        e2e_latency_s: Seconds from the call to the last token.
        num_retractions: Times it lost its pages and was prefilled again.
        weight_version: The weights that produced its last token.
    """

    rid: str
    text: str
    output_ids: list[int]
    logprobs: list[float]
    scaled_logprobs: list[float]
    finish: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_cache_misses: int
    e2e_latency_s: float
    num_retractions: int
    weight_version: int

    def to_dict(self, *, return_logprob: bool = False) -> dict[str, Any]:
        """The dict that `Engine.generate` returns.

        With `return_logprob`, `meta_info["output_token_logprobs"]` holds a
        `(logprob, token_id, None)` triple for each output token, as SGLang does.
        """
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish.to_dict(len(self.output_ids)),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.num_cached_tokens,
            "cache_miss_count": self.num_cache_misses,
            "e2e_latency": self.e2e_latency_s,
        }
        if return_logprob:
            triples = zip(self.logprobs, self.output_ids, strict=True)
            meta["output_token_logprobs"] = [(lp, token, None) for lp, token in triples]
        return {"text": self.text, "output_ids": list(self.output_ids), "meta_info": meta}
