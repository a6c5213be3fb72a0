from __future__ import annotations

import dataclasses

from sgljax_engine.io_struct import PauseMode, SleepTag


@dataclasses.dataclass(kw_only=True, slots=True)
class EngineCounters:
    """Totals since the engine started.

    Attributes:
        num_requests: Requests added.
        num_finished: Requests that ended, for any reason.
        num_prefill_tokens: Tokens prefilled, including repeats after retractions.
        num_cached_tokens: Tokens that requests took from the prefix cache instead.
        num_page_copies: Shared pages that were copied so that a request could extend them.
        num_output_tokens: Tokens generated.
        num_dispatches: Scheduler steps that ran a program on the device.
        used_kv_tokens: Tokens of the pages in use, summed over dispatches and multiplied by the
            number of engines. Divided by `num_dispatches` and `EngineState.total_kv_tokens` it is
            the mean use of the KV cache.
        num_decode_rows: Rows of all decode dispatches together.
        max_decode_batch: Rows of the largest decode dispatch.
        row_s, idle_row_s: Seconds of dispatches times their decode rows, and times the rows of
            `max_running_requests` that had no request.
        tail_s: Seconds of dispatches with idle rows while no request waited.
        num_retractions: Times a running request lost its pages.
        num_aborted: Requests that ended with finish reason `abort`.
        num_pauses: Times that generation was paused.
        pause_s: Seconds of pauses, from the call on; an `EngineState` includes the current pause.
        num_weight_updates: Weight swaps.
        num_sleeps: Times that the engine went to sleep.
        num_failed_steps: Steps that raised.
        num_nonfinite_requests: Requests, and sequences to score, whose logits were NaN or infinite.
        num_first_tokens: Requests that got their first token.
        time_to_first_token_s: Seconds from the call to the first token, summed over those requests.
        e2e_latency_s: Seconds from the call to the end, summed over all `num_finished`.
        prefill_s, decode_s: Seconds that the engine thread spent on dispatching prefill, and on
            decode.
        update_s: Seconds that the engine thread spent on new weights; it decodes while another
            thread makes them.
        sleep_s, wake_s: Seconds spent going to sleep and waking up.
        num_verify_steps: Forward passes of dispatches that may verify drafts.
        num_verify_rows: Rows of these passes that generated tokens, all passes together.
        num_verified_tokens: Tokens that these dispatches generated; they are output tokens too.
        num_drafted_history, num_drafted_siblings, num_drafted_ngram: Draft tokens that were
            verified, by drafter.
        num_accepted_history, num_accepted_siblings, num_accepted_ngram: Draft tokens that were
            right, by drafter.
    """

    num_requests: int = 0
    num_finished: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_page_copies: int = 0
    num_output_tokens: int = 0
    num_dispatches: int = 0
    used_kv_tokens: int = 0
    num_decode_rows: int = 0
    max_decode_batch: int = 0
    row_s: float = 0.0
    idle_row_s: float = 0.0
    tail_s: float = 0.0
    num_retractions: int = 0
    num_aborted: int = 0
    num_pauses: int = 0
    pause_s: float = 0.0
    num_weight_updates: int = 0
    num_sleeps: int = 0
    num_failed_steps: int = 0
    num_nonfinite_requests: int = 0
    num_first_tokens: int = 0
    time_to_first_token_s: float = 0.0
    e2e_latency_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    update_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    num_verify_steps: int = 0
    num_verify_rows: int = 0
    num_verified_tokens: int = 0
    num_drafted_history: int = 0
    num_drafted_siblings: int = 0
    num_drafted_ngram: int = 0
    num_accepted_history: int = 0
    num_accepted_siblings: int = 0
    num_accepted_ngram: int = 0

    def since(self, before: EngineCounters) -> EngineCounters:
        """The growth of each counter since an earlier copy."""
        names = [field.name for field in dataclasses.fields(self)]
        return EngineCounters(**{n: getattr(self, n) - getattr(before, n) for n in names})

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were verified."""
        return self.num_drafted_history + self.num_drafted_siblings + self.num_drafted_ngram

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were right."""
        return self.num_accepted_history + self.num_accepted_siblings + self.num_accepted_ngram

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a row in a step of dispatches with drafts; 0 without such dispatches."""
        rows = self.num_verify_rows
        return self.num_verified_tokens / rows if rows else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory that an engine took when it started, and why.

    Bytes are totals over all devices, copies included: each device has the norms, several have the
    same kv heads if there are more devices than heads, and each engine of a group has all weights.

    Attributes:
        weights_bytes: Bytes of the weights; doubled while an update makes new ones.
        kv_bytes: Bytes of the KV pages.
        kv_tokens: Tokens that the pages hold.
        kv_dtype: Name of the dtype of keys and values in pages; `kv_bytes` has the scales of int8.
        page_size: Tokens in a page.
        window_kv_tokens: Tokens that the window pages of sliding layers hold; 0 if these layers
            have the same pages as the others.
        saved_window_bytes: Additional bytes for as many tokens without window pages.
        state_bytes: Bytes of recurrent states: of their slots, and of the rows of a decode
            dispatch, which works on copies.
        state_slots: Slots of recurrent states, of running requests and of cached prefixes; 0 for
            models without.
        rule: The rule that set `kv_tokens`: "num_kv_tokens", "mem_fraction_static", or
            "max_running_requests x max_model_len" if that fits.
        free_bytes: Free memory after the weights were loaded, on all devices, or on the host for
            CPUs; None if the devices do not report it.
        program_bytes: Bytes that programs need beside all this. 0 on CPUs, and if pages leave half
            of the free memory, since the compiler is not asked then.
        num_engines: Engines that share the devices: the data-parallel size.
        tp_size: Devices of each engine.
    """

    weights_bytes: int
    kv_bytes: int
    kv_tokens: int
    page_size: int
    rule: str
    free_bytes: int | None
    program_bytes: int = 0
    num_engines: int = 1
    tp_size: int = 1
    window_kv_tokens: int = 0
    saved_window_bytes: int = 0
    state_bytes: int = 0
    state_slots: int = 0
    kv_dtype: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """A consistent snapshot of the engine, taken between two dispatches.

    Each engine of a group is read between two dispatches of its own, so not all at one moment. By
    then all of them have done the same commands, and each request is counted once.

    The properties have SGLang's names.

    Attributes:
        running_batch_size: Requests that hold KV pages.
        waiting_queue_size: Requests that wait for room, or for generation to continue.
        num_prefilling: Running requests whose prompt is not fully prefilled.
        running_rids, waiting_rids: Ids of running and waiting requests, oldest first.
        pause_mode: Mode of the current pause; None while generation is not paused.
        asleep: Parts that sleep, and are not on the devices; empty while the engine is awake.
        host_bytes: Bytes of the host copies that a sleeping engine keeps.
        has_weights: Whether weights are available. False while they sleep, and after
            `sleep(level=2)` or a failed update with donate=True dropped them, until an update
            succeeds.
        available_kv_tokens: Tokens that free pages and evictable cached pages hold.
        cached_kv_tokens: Tokens in the prefix cache's pages, in use or not, with pages of reset
            trees that requests still hold.
        total_kv_tokens: Tokens that all pages hold.
        held_window_tokens: Tokens of the window pages that running requests need; 0 without window
            pages.
        free_state_slots: Slots of recurrent states that requests could get; 0 for models without.
        kept_states: Recurrent states that the prefix cache keeps; requests could get most of their
            slots.
        is_kv_allocated: Whether the pages are allocated; False between `release_kv_cache` and the
            next dispatch, and while they sleep.
        weight_version: Version of the serving weights: 0 at first, incremented by every update.
        adapters: Names of the adapters that are loaded.
        new_token_ratio: See `SchedulerConfig.init_new_token_ratio`.
        init_new_token_ratio: Its value after a flush.
        forward_ct_decode: Decode dispatches since the start or the last flush.
        num_compiles: Device programs prepared so far: compiled, or taken from an equal engine of
            the process.
        compile_s: Seconds spent compiling them.
        memory: Memory that the engine took at its start.
        counters: Totals.
        engines: The states of the engines of a group, each taken between two of its dispatches;
            empty for a single engine.
    """

    running_batch_size: int
    waiting_queue_size: int
    num_prefilling: int
    running_rids: tuple[str, ...]
    waiting_rids: tuple[str, ...]
    pause_mode: PauseMode | None
    asleep: tuple[SleepTag, ...]
    host_bytes: int
    has_weights: bool
    available_kv_tokens: int
    cached_kv_tokens: int
    total_kv_tokens: int
    held_window_tokens: int
    free_state_slots: int
    kept_states: int
    is_kv_allocated: bool
    weight_version: int
    adapters: tuple[str, ...]
    new_token_ratio: float
    init_new_token_ratio: float
    forward_ct_decode: int
    num_compiles: int
    compile_s: float
    memory: MemoryReport
    counters: EngineCounters
    engines: tuple[EngineState, ...] = ()

    @property
    def tree_cache_size(self) -> int:
        """Tokens in the tree of the prefix cache."""
        return self.cached_kv_tokens

    @property
    def req_to_token_pool_used(self) -> int:
        """Requests that have a row in the page table."""
        return self.running_batch_size

    @property
    def cur_batch_is_none(self) -> bool:
        """Whether no started request is left for the next dispatch."""
        return self.running_batch_size == 0

    @property
    def last_batch_is_none(self) -> bool:
        """Whether the last dispatch left no request unfinished."""
        return self.running_batch_size == 0

    @property
    def chunked_req_is_none(self) -> bool:
        """Whether no prompt is partly prefilled."""
        return self.num_prefilling == 0

    @property
    def is_paused(self) -> bool:
        """Whether generation waits for `continue_generation`."""
        return self.pause_mode is not None

    @property
    def is_sleeping(self) -> bool:
        """Whether generation waits for `wake_up`."""
        return bool(self.asleep)
