"""Counters of what the engine did. Written by the engine thread, copied out for callers."""

from __future__ import annotations

import dataclasses

from sgljax_engine.io_struct import PauseMode, SleepTag


@dataclasses.dataclass(kw_only=True, slots=True)
class EngineCounters:
    """Totals since the engine started.

    Attributes:
        num_requests: Requests added.
        num_finished: Requests that ended, whatever the reason.
        num_prefill_tokens: Tokens prefilled, again after retractions included.
        num_cached_tokens: Tokens that requests took from the prefix cache instead.
        num_page_copies: Shared pages that were copied for a request to write behind.
        num_output_tokens: Tokens generated.
        num_dispatches: Scheduler steps that ran something on the device.
        used_kv_tokens: Tokens that pages in use held at each dispatch, added up: over
            `num_dispatches` and `EngineState.total_kv_tokens` it is the mean use of the KV cache.
        num_decode_rows: Rows of all decode dispatches together.
        max_decode_batch: Rows of the largest one.
        num_retractions: Times a running request lost its pages.
        num_aborted: Requests that ended with finish reason `abort`.
        num_pauses: Times that generation was paused.
        pause_s: Seconds that it was, from the call on; in an `EngineState` the pause of now too.
        num_weight_updates: Weight swaps.
        num_sleeps: Times that the engine went to sleep.
        num_failed_steps: Steps that raised.
        num_first_tokens: Requests that got their first token.
        time_to_first_token_s: Seconds from the call to the first token, of all of those together.
        e2e_latency_s: Seconds from the call to the end, of all `num_finished` together.
        prefill_s, decode_s: Seconds the engine thread spent dispatching prefill and in decode.
        update_s: Seconds that the engine thread spent on new weights; it decodes while they are
            made elsewhere.
        sleep_s, wake_s: Seconds that it spent going to sleep and waking up.
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
    num_retractions: int = 0
    num_aborted: int = 0
    num_pauses: int = 0
    pause_s: float = 0.0
    num_weight_updates: int = 0
    num_sleeps: int = 0
    num_failed_steps: int = 0
    num_first_tokens: int = 0
    time_to_first_token_s: float = 0.0
    e2e_latency_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    update_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """What an engine took when it started, and why.

    Bytes are those of all devices along the mesh axis "tp" together, copies included: norms are on
    each of them, and kv heads on several where "tp" is larger than their number.

    Attributes:
        weights_bytes: Of the weights; twice as much while an update makes new ones.
        kv_bytes: Of the KV pages.
        contiguous_kv_bytes: Of the copies that decode attention on CPUs reads; 0 if it reads pages.
        kv_tokens: Tokens that the pages hold.
        page_size: Tokens in a page.
        rule: What decided on `kv_tokens`: "num_kv_tokens", "mem_fraction_static", or
            "max_running_requests x max_model_len", which was affordable.
        free_bytes: Memory that was free once the weights were there, of all devices that a weight
            is spread over, or of the host for CPUs; None when the devices do not say.
    """

    weights_bytes: int
    kv_bytes: int
    contiguous_kv_bytes: int
    kv_tokens: int
    page_size: int
    rule: str
    free_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """One consistent look at the engine, taken between two dispatches.

    Attributes:
        running_batch_size: Requests that hold KV pages.
        waiting_queue_size: Requests that wait for room, or for generation to continue.
        num_prefilling: Running requests whose prompt is not prefilled to its end.
        running_rids, waiting_rids: Their ids, oldest first.
        pause_mode: How generation was paused; None while it is not.
        asleep: What the engine has not on its devices, since it sleeps; empty while it is awake.
        host_bytes: Of the copies on the host that it sleeps with.
        has_weights: Whether weights are there to generate with. Not while they sleep, nor after
            they were given up, by `sleep(level=2)` or a failed update with donate=True, until an
            update succeeds.
        available_kv_tokens: Tokens that free pages hold, and cached ones that may be evicted.
        cached_kv_tokens: Tokens that the prefix cache's pages hold, in use or not: the size of
            its tree.
        total_kv_tokens: Tokens that all pages hold.
        is_kv_allocated: Whether the pages take memory; not between `release_kv_cache` and the next
            dispatch, nor while they sleep.
        weight_version: 0 for the first weights, one more with every update.
        adapters: Names of the adapters that are loaded.
        new_token_ratio: See `SchedulerConfig.init_new_token_ratio`.
        forward_ct_decode: Decode dispatches since the start or the last flush.
        num_compiles: Device programs made ready so far; compiled, unless an equal engine of the
            process had them.
        compile_s: Seconds spent compiling them.
        memory: What the engine took at its start.
        counters: Totals.
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
    is_kv_allocated: bool
    weight_version: int
    adapters: tuple[str, ...]
    new_token_ratio: float
    forward_ct_decode: int
    num_compiles: int
    compile_s: float
    memory: MemoryReport
    counters: EngineCounters

    @property
    def is_paused(self) -> bool:
        """Whether generation waits for `continue_generation`."""
        return self.pause_mode is not None

    @property
    def is_sleeping(self) -> bool:
        """Whether generation waits for `wake_up`."""
        return bool(self.asleep)
