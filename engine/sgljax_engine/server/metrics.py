"""The engine's counters for Prometheus; names follow vLLM's, with a prefix of their own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgljax_engine import EngineState
from sgljax_engine.server.context import ServerContext

PREFIX = "sgljax:"


def metrics_text(state: EngineState, context: ServerContext) -> tuple[bytes, str]:
    """The exposition of a state, and its media type."""
    registry = CollectorRegistry()
    registry.register(_State(state, context))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _State(Collector):
    def __init__(self, state: EngineState, context: ServerContext) -> None:
        self._state = state
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Gauges, then totals."""
        state, counters = self._state, self._state.counters
        used = 1 - state.available_kv_tokens / state.total_kv_tokens
        gauges = {
            "num_requests_running": ("Requests that hold KV pages.", state.running_batch_size),
            "num_requests_waiting": ("Requests that wait.", state.waiting_queue_size),
            "num_open_samples": ("Samples of HTTP requests.", self._context.generation.num_open),
            "kv_cache_usage_perc": ("Part of the KV pages in use, in [0, 1].", used),
            "weight_version": ("Version of the serving weights.", state.weight_version),
            "is_paused": ("1 while generation is paused.", int(state.is_paused)),
            "is_sleeping": ("1 while weights or KV cache sleep.", int(state.is_sleeping)),
        }
        totals = {
            "requests": ("Requests that were added.", counters.num_requests),
            "request_success": ("Requests that ended.", counters.num_finished),
            "requests_aborted": ("Requests that were aborted.", counters.num_aborted),
            "prompt_tokens": ("Tokens prefilled.", counters.num_prefill_tokens),
            "prefix_cache_hits": ("Tokens from the prefix cache.", counters.num_cached_tokens),
            "generation_tokens": ("Tokens generated.", counters.num_output_tokens),
            "spec_decode_num_draft_tokens": ("Draft tokens verified.", counters.num_draft_tokens),
            "spec_decode_num_accepted_tokens": (
                "Draft tokens that were right.",
                counters.num_accepted_tokens,
            ),
            "num_preemptions": ("Requests that lost their pages.", counters.num_retractions),
            "weight_updates": ("Weight updates.", counters.num_weight_updates),
            "pauses": ("Pauses of generation.", counters.num_pauses),
            "pause_seconds": ("Seconds of pauses.", counters.pause_s),
            "sleeps": ("Times asleep.", counters.num_sleeps),
            "failed_steps": ("Steps that failed.", counters.num_failed_steps),
            "nonfinite_requests": (
                "Requests that failed since their logits were NaN or infinite.",
                counters.num_nonfinite_requests,
            ),
            "prefill_seconds": ("Seconds of prefill.", counters.prefill_s),
            "decode_seconds": ("Seconds of decode.", counters.decode_s),
        }
        labels = {"model_name": self._context.config.model_name}
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
            gauge.add_metric(list(labels.values()), value)
            yield gauge
        for name, (text, value) in totals.items():
            total = CounterMetricFamily(PREFIX + name, text, labels=list(labels))
            total.add_metric(list(labels.values()), value)
            yield total
        sums = {
            "time_to_first_token_seconds": (
                "Seconds to the first token.",
                counters.num_first_tokens,
                counters.time_to_first_token_s,
            ),
            "e2e_request_latency_seconds": (
                "Seconds to the end.",
                counters.num_finished,
                counters.e2e_latency_s,
            ),
        }
        for name, (text, count, seconds) in sums.items():
            family = Metric(PREFIX + name, text, "summary")
            family.add_sample(f"{PREFIX}{name}_count", labels, count)
            family.add_sample(f"{PREFIX}{name}_sum", labels, seconds)
            yield family
