"""Metrics of the rollout in each step, logged through Tunix's metrics logger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from tunix.rl import rl_cluster as tunix_cluster

from tunix_sgljax.in_flight.wrapping import require_sgljax_rollout
from tunix_sgljax.observability.observers import RolloutObservers, RolloutTotals

PREFIX = "rollout"


class Metric(NamedTuple):
    """One metric: its description for the documentation, and its value of a step, if it has one."""

    about: str
    value: Callable[[RolloutTotals], float | None]
    reduce: Callable[[Any], Any]


def _ratio(about: str, parts: Callable[[RolloutTotals], tuple[float, float]]) -> Metric:
    """A part and the whole, without a value where that is 0."""

    def value(totals: RolloutTotals) -> float | None:
        part, whole = parts(totals)
        return part / whole if whole > 0 else None

    return Metric(about, value, np.mean)


def _total(about: str, counter: str) -> Metric:
    return Metric(about, lambda t: getattr(t.counters, counter), np.sum)


def _if_drafting(about: str, counter: str) -> Metric:
    """The same, without a value in a step that verified no drafts."""
    total = _total(about, counter).value
    return Metric(about, lambda t: total(t) if t.counters.num_verify_steps else None, np.sum)


METRICS: Mapping[str, Metric] = {
    "tokens_per_s": _ratio(
        "output tokens over `seconds`", lambda t: (t.counters.num_output_tokens, t.busy_s)
    ),
    "seconds": Metric(
        "seconds in which a `generate` call was under way and did not rest for the trainer",
        lambda t: t.busy_s,
        np.sum,
    ),
    "requests": _total("requests that ended, whatever the reason", "num_finished"),
    "output_tokens": _total("tokens generated", "num_output_tokens"),
    "prefill_tokens": _total(
        "tokens prefilled, again after retractions included", "num_prefill_tokens"
    ),
    "cache_hit_rate": _ratio(
        "tokens taken from the prefix cache, of those and the ones prefilled",
        lambda t: (
            t.counters.num_cached_tokens,
            t.counters.num_cached_tokens + t.counters.num_prefill_tokens,
        ),
    ),
    "kv_use": _ratio(
        "KV pages in use, of all, mean over the dispatches",
        lambda t: (t.counters.used_kv_tokens, t.counters.num_dispatches * t.total_kv_tokens),
    ),
    "idle_rows": _ratio(
        "rows of `max_running_requests` without a request, share of their time in dispatches",
        lambda t: (t.counters.idle_row_s, t.counters.row_s + t.counters.idle_row_s),
    ),
    "tail_s": _total("seconds with idle rows while no request waited", "tail_s"),
    "retractions": _total("times that a running request lost its pages", "num_retractions"),
    "aborted": _total("requests that were aborted", "num_aborted"),
    "failed_steps": _total("device steps that failed", "num_failed_steps"),
    "nonfinite_requests": _total(
        "requests that failed since their logits were NaN or infinite", "num_nonfinite_requests"
    ),
    "time_to_first_token_s": _ratio(
        "seconds from the call to a request's first token, mean",
        lambda t: (t.counters.time_to_first_token_s, t.counters.num_first_tokens),
    ),
    "latency_s": _ratio(
        "seconds from the call to a request's end, mean",
        lambda t: (t.counters.e2e_latency_s, t.counters.num_finished),
    ),
    "prefill_s": _total("seconds that the engine thread spent dispatching prefill", "prefill_s"),
    "decode_s": _total(
        "seconds that it spent in decode, waiting for the prefill before it included", "decode_s"
    ),
    "pauses": _total("times that generation was paused", "num_pauses"),
    "pause_s": _total("seconds that it was paused", "pause_s"),
    "sync_s": Metric(
        "seconds that the weight sync took, on the trainer's thread", lambda t: t.sync_s, np.sum
    ),
    "update_s": _total("seconds of it that the engine could not generate", "update_s"),
    "acceptance_length": Metric(
        "tokens that a row got from a step that may verify drafts, mean",
        lambda t: t.counters.acceptance_length or None,
        np.mean,
    ),
    "draft_acceptance": _ratio(
        "draft tokens that were right, of those verified",
        lambda t: (t.counters.num_accepted_tokens, t.counters.num_draft_tokens),
    ),
    "accepted_history": _if_drafting(
        "right draft tokens from earlier answers", "num_accepted_history"
    ),
    "accepted_siblings": _if_drafting(
        "right draft tokens from other samples of the group", "num_accepted_siblings"
    ),
    "accepted_ngram": _if_drafting(
        "right draft tokens from the request's own", "num_accepted_ngram"
    ),
    "weight_version": Metric(
        "weight version after the step's sync", lambda t: t.weight_version, np.max
    ),
}
"""Metrics by their names after "rollout/"."""


def log_rollout_metrics(cluster: tunix_cluster.RLCluster) -> RolloutMetrics:
    """Logs the rollout's metrics with each step of a cluster's learner, from now on.

    They go into the cluster's own buffer, and so to all of Tunix's loggers: TensorBoard, Weights &
    Biases, an external logger. A step lasts from the end of the previous weight sync to the end of
    its own, including rollouts of evaluations in between.

    Returns:
        The logging object; `stop` ends it.

    Raises:
        InvalidConfigError: for another rollout.
    """
    rollout = require_sgljax_rollout(cluster, "log_rollout_metrics")
    return RolloutMetrics(rollout.observers, cluster)


class RolloutMetrics:
    def __init__(self, observers: RolloutObservers, cluster: tunix_cluster.RLCluster) -> None:
        self._observers = observers
        self._cluster = cluster
        self._before = observers.totals()
        observers.on_updated.append(self._log)

    def stop(self) -> None:
        if self._log in self._observers.on_updated:
            self._observers.on_updated.remove(self._log)

    def _log(self) -> None:
        """Called at the end of a step's weight sync; Tunix counts the step after this."""
        before, self._before = self._before, self._observers.totals()
        # Not `buffer_metrics`, which uses the newest step's buffer: agentic learners have started
        # the next step by now.
        self._cluster.buffer_metrics_async(
            {
                f"{PREFIX}/{name}": (value, METRICS[name].reduce)
                for name, value in step_metrics(before, self._before).items()
            },
            mode=tunix_cluster.Mode.TRAIN,
            step=self._cluster.global_steps,
        )


def step_metrics(before: RolloutTotals, now: RolloutTotals) -> dict[str, float]:
    """The metrics of the time between two totals, without those that have no value."""
    step = now.since(before)
    values = {name: metric.value(step) for name, metric in METRICS.items()}
    return {name: float(value) for name, value in values.items() if value is not None}
