"""Host-side data types of the request path. This module imports no JAX.

The words are those of vLLM and SGLang: a `Request` waits, runs, and finishes with a `FinishReason`.
It may be *retracted*: it loses its KV pages and is prefilled again later.
"""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sgljax_engine.errors import EngineError
from sgljax_engine.sampling_params import NO_LOGPROBS, LogprobOptions, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from sgljax_engine.sampling.guide import Guide
    from sgljax_engine.sampling.token_counts import TokenCounts
    from sgljax_engine.speculation.plan import RowVerified, StepDrafts


NO_ADAPTER = -1
"""Adapter slot of requests that use only the base model."""


NO_STATE = -1
"""Slot of the recurrent state of requests that have none."""


class RequestStatus(enum.Enum):
    """State of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended.

    Attributes:
        type: `stop` (a stop token or string), `length` (max_new_tokens), `abort` (by a caller) or
            `error`.
        matched: The stop token id or stop string, for `stop`.
        message: What happened, for `abort` and `error`.
    """

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    message: str = ""

    def to_dict(self, num_output_tokens: int) -> dict[str, Any]:
        """The `meta_info["finish_reason"]` dict; `length` carries the output's length in tokens."""
        if self.type == "length":
            return {"type": "length", "length": num_output_tokens}
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        return {"type": self.type, "message": self.message}


class LogitEdits(NamedTuple):
    """Effect of logit_bias, allowed_token_ids and bad_token_ids on a row's logits.

    Attributes:
        token_ids: int32 [M], without duplicates.
        values: float32 [M], added to their logits; -inf forbids.
        is_allow_list: Whether all other tokens are forbidden.
    """

    token_ids: np.ndarray
    values: np.ndarray
    is_allow_list: bool


class TopLogprobs(NamedTuple):
    """Raw log-probs of further tokens at a position: of softmax(logits).

    Attributes:
        values, token_ids: Log-probs and ids of the top_num most likely tokens, likeliest first.
        chosen: Log-probs of `LogprobOptions.token_ids`, in their order.
    """

    values: list[float]
    token_ids: list[int]
    chosen: list[float]


class PromptLogprobs(NamedTuple):
    """Raw log-probs of the prompt's tokens, from `LogprobOptions.start_len` on.

    Attributes:
        logprobs: One entry per token; None for the first token of the prompt, which has none.
        extras: One entry per token if `LogprobOptions` asks for extras, else empty.
    """

    logprobs: list[float | None]
    extras: list[TopLogprobs | None]


def prompt_key(prompt_ids: Sequence[int], lora: str | None) -> int:
    """A hash: equal for prompts with the same keys and values, nearly always unequal for others."""
    return hash((lora, *prompt_ids))


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Only the engine thread may change it.

    `num_computed` counts the tokens whose K and V are in `pages`. The newest token is never
    among them: it is the next decode step's input. A request whose `num_computed` is smaller
    than `kv_len` has to be prefilled (for the first time, or again after a retraction).

    `group` is the caller's id of the prompt, and `rid` the id of one of its n samples; `call` is
    the same for all requests that were submitted together. `engine` is the index of the engine
    that has it, in a group of several. `arrival_s` and `first_token_s` are
    readings of `time.perf_counter`: when the caller submitted it, and at the end of the dispatch
    that produced its first token. `token_versions` holds the weight version that sampled each
    output token. `lora` names the request's adapter, None for the base model alone; `adapter` is
    the slot that the engine thread found for it. `seen` is created when a batch first needs it,
    only for rows with penalties. `pages` is an array of C ints, which numpy copies into a page
    table without a loop. `routed` holds the experts of its first tokens, as far as they were read:
    [tokens, num_layers, k] of `MoEConfig.id_dtype`, never changed in place. `state_slot` holds its
    recurrent state after `num_computed` tokens while it runs, for models that have one.
    `draft_sources` says who drafted each output token: 0 for nobody, else 1 plus an index in
    `config.DRAFTERS`. `sampling_masks` has the tokens that each output token was drawn from, if
    `params` ask for them. `guide` says which tokens its grammar or the bound of its thoughts
    allows next; None for all.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    edits: LogitEdits | None = None
    guide: Guide | None = None
    logprob_options: LogprobOptions = NO_LOGPROBS
    is_streaming: bool = False
    lora: str | None = None
    adapter: int = NO_ADAPTER
    group: str = ""
    call: int = 0
    engine: int = 0
    prompt_key: int = 0
    arrival: int = 0
    arrival_s: float = 0.0
    first_token_s: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    scaled_logprobs: list[float] = dataclasses.field(default_factory=list)
    processed_logprobs: list[float] = dataclasses.field(default_factory=list)
    extra_logprobs: list[TopLogprobs] = dataclasses.field(default_factory=list)
    sampling_masks: list[array[int]] = dataclasses.field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    pages: array[int] = dataclasses.field(default_factory=lambda: array("i"))
    state_slot: int = NO_STATE
    seen: TokenCounts | None = None
    routed: np.ndarray | None = None
    draft_sources: array[int] = dataclasses.field(default_factory=lambda: array("b"))
    num_computed: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    num_cache_misses: int = 0
    token_versions: array[int] = dataclasses.field(default_factory=lambda: array("i"))
    finish: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def kv_len(self) -> int:
        """Tokens that must be in the KV cache before a decode step: all but the newest."""
        return len(self.prompt_ids) + len(self.output_ids) - 1

    @property
    def num_remaining(self) -> int:
        """Number of tokens that the request may still generate."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def max_new_tokens(self) -> int:
        """Number of tokens that the request may generate in all.

        A request that only prefills also generates one token, and does not report it. Params
        without a maximum get one when the request is made.
        """
        return max(1, self.params.max_new_tokens or 0)

    @property
    def only_prefills(self) -> bool:
        """Whether the request reports no output."""
        return self.params.max_new_tokens == 0

    @property
    def is_watched(self) -> bool:
        """Whether the text is needed before the request finishes."""
        return self.is_streaming or bool(self.params.stop)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the prompt has to be scored before the request starts."""
        return self.logprob_options.start_len >= 0 and self.prompt_logprobs is None

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from submission to the end of the dispatch with its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

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
    """Tokens [start, start + num_tokens) of a request, to be prefilled into `pages`.

    These are the pages that the request had when the chunk was planned; it may decode into a copy
    of the last page. Keys of the first `num_shared` tokens of the request are in shared pages
    already, where nobody writes: tokens before that are computed for their recurrent state alone.
    """

    request: Request
    start: int
    num_tokens: int
    pages: tuple[int, ...]
    num_shared: int = 0


class PageCopy(NamedTuple):
    """A page's keys and values, to be copied into another page."""

    source: int
    target: int


class StateCopy(NamedTuple):
    """A slot's recurrent state, to be copied into another slot."""

    source: int
    target: int


class StateCopies(NamedTuple):
    """Copies of a dispatch: before its prefill, and between prefill and decode.

    No slot is a source and a target of copies at one time.
    """

    early: list[StateCopy]
    late: list[StateCopy]

    def at(self, *, is_late: bool) -> list[StateCopy]:
        """The copies of one time."""
        return self.late if is_late else self.early


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of a dispatch: prefill chunks, page copies, then up to `num_steps` decode steps.

    Attributes:
        prefill: Chunks that fit the token budget; each request at most once.
        copies: Pages to copy behind the prefill; all sources are read before any target is written.
        decode: Requests to decode; their prefill is complete or completes in `prefill`.
        step_limits: For each decode row, the tokens that its pages and max_new_tokens allow.
        num_steps: Decode steps in this dispatch.
        retracted: Requests that lost their pages while this was planned.
        started: Requests that got pages, for the first time or again.
        prefill_tokens: Tokens of `prefill`, in whole blocks.
        max_finished: End the dispatch once this many rows have finished, since other requests wait
            for room. None if no request waits: then the dispatch ends once the remaining rows fit a
            smaller program.
        window_pages: int32, the window page of each page or -1, see `cache.window`; changes after
            the dispatch. None without such pages.
        early_copies: Pages to copy before the prefill, as `copies`.
        states: Recurrent states to copy; None for models without.
        drafts: Draft sources of the decode rows; then each of the `num_steps` forward passes may
            give several tokens. None decodes token by token.
    """

    prefill: list[PrefillChunk]
    copies: list[PageCopy]
    decode: list[Request]
    step_limits: list[int]
    num_steps: int
    retracted: list[Request]
    started: list[Request]
    prefill_tokens: int = 0
    max_finished: int | None = None
    window_pages: np.ndarray | None = None
    drafts: StepDrafts | None = None
    early_copies: Sequence[PageCopy] = ()
    states: StateCopies | None = None

    @property
    def touched(self) -> list[Request]:
        """The requests that the dispatch works on, each once."""
        touched = [*self.decode, *(chunk.request for chunk in self.prefill), *self.started]
        return list({request.rid: request for request in touched}.values())

    @property
    def is_empty(self) -> bool:
        """True when there is nothing for the device to do."""
        return not self.prefill and not self.copies and not self.decode


class RowOutput(NamedTuple):
    """Results of one decode row in one dispatch: lists with one entry per token.

    `extra_logprobs` and `sampling_masks` are empty for rows that asked for none. `drafts` has the
    results of its drafts; None if the dispatch had none. `is_finite` is False if no further token
    could be drawn, see `errors.NonFiniteLogitsError`.
    """

    token_ids: list[int]
    logprobs: list[float]
    scaled_logprobs: list[float]
    processed_logprobs: list[float]
    stopped: bool
    extra_logprobs: Sequence[TopLogprobs] = ()
    drafts: RowVerified | None = None
    is_finite: bool = True
    sampling_masks: Sequence[array[int]] = ()


class StepTimes(NamedTuple):
    """Readings of `time.perf_counter` in one dispatch: its start, and the end of each part."""

    started_s: float
    scored_s: float
    prefilled_s: float
    decoded_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a dispatch.

    Attributes:
        rows: A `RowOutput` for each of `SchedulerOutput.decode`, in order.
        weight_version: Version of the weights that it used.
        num_cache_misses: Number of programs that it compiled.
        failures: Errors of requests whose prompt could not be scored, by id.
        times: When its parts ended; every dispatch sets it. A scheduler alone needs no times.
        num_draft_steps: Forward passes of a dispatch with drafts; None without.
    """

    rows: list[RowOutput]
    weight_version: int = 0
    num_cache_misses: int = 0
    failures: Mapping[str, EngineError] = dataclasses.field(default_factory=dict)
    times: StepTimes | None = None
    num_draft_steps: int | None = None

    @property
    def num_steps(self) -> int:
        """Decode steps, which are forward passes."""
        if self.num_draft_steps is not None:
            return self.num_draft_steps
        return max((len(row.token_ids) for row in self.rows), default=0)

    @property
    def dispatch_s(self) -> float | None:
        """Seconds from the first program to the end of the last, if they can predict a dispatch.

        None if the dispatch compiled, or was not timed.
        """
        if self.times is None or self.num_cache_misses:
            return None
        return self.times.decoded_s - self.times.scored_s


class StepChanges(NamedTuple):
    """Changes by a dispatch that callers wait for.

    Attributes:
        finished: Requests that the dispatch finished.
        progressed: Requests that decoded in it, finished ones among them.
        failures: Those of `StepOutput`, and of rows that are not finite; their requests are
            finished.
    """

    finished: list[Request]
    progressed: list[Request]
    failures: Mapping[str, EngineError]
