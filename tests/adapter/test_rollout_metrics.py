"""Rollout metrics beside the learner's own, read back from TensorBoard's event files."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.sft.metrics_logger import MetricsLoggerOptions

from sgljax_engine import EngineCounters, InvalidConfigError, NonFiniteLogitsError
from tests import tunix_reference as ref
from tests.adapter.grpo_parts import (
    MODEL,
    NUM_GENERATIONS,
    NUM_STEPS,
    PROMPTS_PER_STEP,
    grpo_config,
    list_batches,
    make_parts,
    reward,
)
from tests.adapter.helpers import tokens_of
from tests.event_files import read_scalars
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.observability.observers import RolloutTotals
from tunix_sgljax.observability.rollout_metrics import METRICS, log_rollout_metrics, step_metrics

ENGINE = functools.partial(SglJaxRollout, **SMALL)

OF_DRAFTS = {
    "acceptance_length",
    "draft_acceptance",
    "accepted_history",
    "accepted_siblings",
    "accepted_ngram",
}
ALWAYS = tuple(name for name in METRICS if name not in OF_DRAFTS)

# Warnings of Tunix itself and of what it uses, while it trains.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def log_to(parts: Any, folder: Path) -> None:
    """Has Tunix log to TensorBoard."""
    options = MetricsLoggerOptions(log_dir=str(folder), flush_every_n_steps=1)
    parts.arguments["cluster_config"].training_config.metrics_logging_options = options


def check_steps(scalars, counters, *, names=ALWAYS):
    """Every metric is there for every step, beside the learner's, and adds up to the totals."""
    steps = [step for step, _ in scalars["rewards/train/score/mean"]]
    assert steps == list(range(NUM_STEPS))
    for name in names:
        assert [step for step, _ in scalars[f"rollout/train/{name}"]] == steps, name

    def values(name):
        return [value for _, value in scalars[f"rollout/train/{name}"]]

    assert sum(values("requests")) == counters.num_finished
    assert sum(values("output_tokens")) == counters.num_output_tokens
    assert sum(values("prefill_tokens")) == counters.num_prefill_tokens
    assert sum(values("decode_s")) == pytest.approx(counters.decode_s, rel=1e-5)
    assert sum(values("update_s")) == pytest.approx(counters.update_s, rel=1e-5)
    assert values("weight_version") == list(range(1, NUM_STEPS + 1))
    for tokens, seconds, rate in zip(
        values("output_tokens"), values("seconds"), values("tokens_per_s"), strict=True
    ):
        assert rate == pytest.approx(tokens / seconds, rel=1e-5)
    assert all(0 < value <= 1 for value in values("kv_use"))
    assert all(
        sync > update for sync, update in zip(values("sync_s"), values("update_s"), strict=True)
    )


@pytest.mark.slow
def test_grpo(tmp_path):
    """With a pause in each step; prompts are shared by groups, so three of four are cache hits."""
    parts = make_parts(rollout_engine=ENGINE)
    log_to(parts, tmp_path)
    cluster: Any = RLCluster(**parts.arguments)
    log_rollout_metrics(cluster)

    def pausing_reward(prompts, completions, **more):
        cluster.rollout.engine.pause_generation("retract")
        cluster.rollout.engine.continue_generation()
        return reward(prompts, completions, **more)

    GRPOLearner(cluster, grpo_config(), pausing_reward).train(list_batches())
    counters = cluster.rollout.engine.get_internal_state().counters
    cluster.rollout.close()
    scalars = read_scalars(tmp_path)
    check_steps(scalars, counters)
    of = {name: [v for _, v in scalars[f"rollout/train/{name}"]] for name in ALWAYS}
    assert of["requests"] == [PROMPTS_PER_STEP * NUM_GENERATIONS] * NUM_STEPS
    assert of["cache_hit_rate"] == [0.75] * NUM_STEPS
    assert of["pauses"] == [1.0] * NUM_STEPS
    assert sum(of["pause_s"]) == pytest.approx(counters.pause_s, rel=1e-5)
    assert counters.pause_s > 0
    assert of["aborted"] == of["failed_steps"] == of["retractions"] == [0.0] * NUM_STEPS
    assert "actor/train/loss" in scalars


def test_stop_and_other_rollouts():
    cluster: Any = RLCluster(**make_parts(rollout_engine=ENGINE).arguments)
    observers = cluster.rollout.observers
    before = list(observers.on_updated)
    metrics = log_rollout_metrics(cluster)
    assert len(observers.on_updated) == len(before) + 1
    metrics.stop()
    metrics.stop()
    assert observers.on_updated == before
    cluster.rollout.close()
    vanilla: Any = RLCluster(**make_parts(rollout_engine="vanilla").arguments)
    with pytest.raises(InvalidConfigError, match="needs a cluster whose rollout is a SglJaxRollo"):
        log_rollout_metrics(vanilla)


def test_metrics_without_a_value_are_left_out():
    """Rates of a step in which nothing was generated, which are no zeros."""
    nothing = RolloutTotals(0.0, 0.0, EngineCounters(), 1000, 3)
    values = step_metrics(nothing, nothing)
    rates = {"tokens_per_s", "cache_hit_rate", "kv_use", "idle_rows"}
    rates |= {"time_to_first_token_s", "latency_s"}
    assert set(METRICS) - set(values) == rates | OF_DRAFTS
    assert values.pop("weight_version") == 3
    assert set(values.values()) == {0.0}
    counters = dataclasses.replace(
        EngineCounters(), num_dispatches=2, used_kv_tokens=500, num_output_tokens=30
    )
    values = step_metrics(nothing, RolloutTotals(2.0, 0.5, counters, 1000, 4))
    assert values["kv_use"] == 0.25
    assert values["tokens_per_s"] == 15.0
    assert (values["sync_s"], values["seconds"]) == (0.5, 2.0)


def test_metrics_of_drafts():
    nothing = RolloutTotals(0.0, 0.0, EngineCounters(), 1000, 3)
    counters = dataclasses.replace(
        EngineCounters(),
        num_verify_steps=5,
        num_verify_rows=10,
        num_verified_tokens=25,
        num_drafted_history=30,
        num_accepted_history=12,
        num_drafted_ngram=10,
        num_accepted_ngram=4,
    )
    values = step_metrics(nothing, RolloutTotals(2.0, 0.5, counters, 1000, 4))
    assert {name: values[name] for name in OF_DRAFTS} == {
        "acceptance_length": 2.5,
        "draft_acceptance": 0.4,
        "accepted_history": 12,
        "accepted_siblings": 0,
        "accepted_ngram": 4,
    }


def test_a_rollout_whose_logits_overflow(make_rollout):
    """Its caller gets the error, and the step's metrics the number of requests."""
    model = ref.make_tunix_qwen3(MODEL)
    mlp = model.layers[0].mlp
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.kernel.value = projection.kernel.value * 1e20
    rollout = make_rollout(model)
    before = rollout.observers.totals()
    with pytest.raises(NonFiniteLogitsError, match="at output token 0: its logits are NaN"):
        tokens_of(rollout, [[5, 6, 7], [8, 9]])
    assert rollout.engine.get_internal_state().running_batch_size == 0
    values = step_metrics(before, rollout.observers.totals())
    assert values["nonfinite_requests"] == 2.0
    assert values["failed_steps"] == 0.0


def test_the_documentation_has_every_metric():
    text = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.about} |" in rows
