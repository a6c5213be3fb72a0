"""The timeline of GRPO steps, read back: by protobuf alone, and by Perfetto's trace processor."""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter
from typing import Any

import pytest
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster

from sgljax_engine import Engine, InvalidConfigError
from tests import trace_processor
from tests.adapter import agentic_parts
from tests.adapter.grpo_parts import NUM_STEPS, grpo_config, list_batches, make_parts, reward
from tests.geometry import SMALL
from tests.perfetto_reader import read_trace
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.observability.perfetto_file import Slice, lanes
from tunix_sgljax.observability.timeline import Timeline, TrainSpans, record_timeline

# Warnings of Tunix itself and of what it uses, while it trains.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose every step is recorded, with a pause in each: the file and the counters."""
    path = tmp_path_factory.mktemp("timeline") / "run.pftrace"
    timeline = Timeline()
    parts = make_parts(rollout_engine=functools.partial(SglJaxRollout, **SMALL))
    cluster: Any = RLCluster(**parts.arguments, perf_config=timeline.perf_config)

    def pausing_reward(prompts, completions, **more):
        cluster.rollout.engine.pause_generation("retract")
        cluster.rollout.engine.continue_generation()
        return reward(prompts, completions, **more)

    with record_timeline(path, cluster, timeline=timeline):
        GRPOLearner(cluster, grpo_config(), pausing_reward).train(list_batches())
    counters = cluster.rollout.engine.get_internal_state().counters
    cluster.rollout.close()
    return types.SimpleNamespace(path=path, counters=counters)


def test_file_is_sound_and_has_every_slice(trained):
    trace = read_trace(trained.path)
    assert {"engine", "detokenizer", "weight updates", "trainer: MainThread"} <= set(trace.threads)
    counts = Counter((s.track, s.name) for s in trace.slices)
    counters = trained.counters
    decodes, prefills = trace.named("decode", "engine"), trace.named("prefill", "engine")
    assert sum(s.args["rows"] for s in decodes) == counters.num_decode_rows
    assert sum(s.args["tokens"] for s in decodes) == counters.num_output_tokens
    assert all(1 <= s.args["steps"] <= SMALL["decode_steps"] for s in decodes)
    assert sum(s.args["tokens"] for s in prefills) == counters.num_prefill_tokens
    assert counts["generation", "pause"] == counters.num_pauses == NUM_STEPS
    assert counts["engine", "swap weights"] == counters.num_weight_updates == NUM_STEPS
    assert counts["detokenizer", "detokenize"] == counters.num_finished
    for name in ("weight_sync", "update_params", "train"):
        assert counts["trainer: MainThread", name] == NUM_STEPS
    assert len(trace.named("tokenize")) == NUM_STEPS
    for name in ("generate", "rollout", "reference_inference"):
        assert len([s for s in trace.named(name) if s.track.startswith("trainer: T")]) == NUM_STEPS
    assert [s.args["weight_version"] for s in trace.named("swap weights")] == [1, 2]


def test_one_clock(trained):
    """What happens within something else on another thread, or after it, does so in the file."""
    trace = read_trace(trained.path)

    def spans(name, track=None) -> list[Any]:
        return [(s.begin_ns, s.end_ns) for s in trace.named(name, track)]

    def within(inner, outer):
        return outer[0] <= inner[0] <= inner[1] <= outer[1]

    generates, trains = spans("generate"), spans("train")
    pauses, syncs = spans("pause"), spans("update_params")
    for decode in spans("decode", "engine") + spans("prefill", "engine"):
        assert sum(within(decode, generate) for generate in generates) == 1
    for parts in zip(generates, pauses, trains, syncs, spans("swap weights"), strict=True):
        generate, pause, train, sync, swap = parts
        assert generate[1] <= pause[0] < pause[1] <= train[0] < train[1] <= sync[0]
        assert within(swap, sync)
    for made, sync in zip(spans("prepare weights"), syncs, strict=True):
        assert within(made, sync)
    nested = {(s.track, s.name): s.depth for s in trace.slices}
    assert nested["trainer: MainThread", "weight_sync"] == 0
    assert nested["trainer: MainThread", "update_params"] == 1
    assert nested["trainer: MainThread", "peft_train"] == 1  # Tunix's span, in our hook's


def test_counters_follow_the_dispatches(trained):
    trace = read_trace(trained.path)
    assert set(trace.counters) == {
        "running requests",
        "waiting requests",
        "free KV tokens",
        "weight version",
        "output tokens/s",
    }
    num = trained.counters.num_dispatches
    rates = trace.counters.pop("output tokens/s")
    assert [len(points) for points in trace.counters.values()] == [num] * 4
    assert len(rates) == num - 1
    assert all(rate > 0 for _, rate in rates)
    assert max(value for _, value in trace.counters["running requests"]) == 8
    assert sorted({value for _, value in trace.counters["weight version"]}) == [0, 1]


def test_perfettos_trace_processor_reads_it(trained):
    """Its own parser and SQL tables, with no error and nothing lost."""
    queries = [
        "SELECT thread.name AS thread, slice.name AS name, count(*) AS num, "
        "min(slice.dur) AS shortest FROM slice JOIN thread_track ON slice.track_id = "
        "thread_track.id JOIN thread USING (utid) GROUP BY 1, 2",
        "SELECT track.name AS track, slice.name AS name, count(*) AS num FROM slice "
        "JOIN track ON slice.track_id = track.id WHERE track.type != 'thread_track' GROUP BY 1, 2",
        "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')",
        "SELECT track.name AS name, count(*) AS num FROM counter JOIN track "
        "ON counter.track_id = track.id GROUP BY 1",
        "SELECT slice.name AS name, args.string_value AS value FROM slice JOIN args USING "
        "(arg_set_id) WHERE args.key = 'debug.mode' AND slice.name = 'pause'",
        "SELECT count(*) AS num FROM slice WHERE dur < 0",
    ]
    shell = trace_processor.find_shell()
    if shell is not None:
        tables = trace_processor.query_shell(shell, trained.path, queries)
    else:
        folder = trace_processor.fetch_wasm()
        if isinstance(folder, str):
            pytest.skip(f"no trace_processor_shell, and {folder}")
        tables = trace_processor.query_wasm(folder, trained.path, queries)
    threads, tracks, problems, counters, modes, unfinished = tables
    trace = read_trace(trained.path)
    expected = Counter((s.track, s.name) for s in trace.slices if s.track in trace.threads)
    assert {(row["thread"], row["name"]): row["num"] for row in threads} == expected
    assert {("engine", "prefill"), ("engine", "decode"), ("trainer: MainThread", "train")} <= set(
        expected
    )
    assert ("generation", "pause", NUM_STEPS) in [tuple(row.values()) for row in tracks]
    assert problems == []
    assert {row["name"]: row["num"] for row in counters} == {
        name: len(points) for name, points in trace.counters.items()
    }
    assert [row["value"] for row in modes] == ["retract"] * NUM_STEPS
    assert unfinished == [{"num": 0}]


# ------------------------------------------------------------------ other ways to record


@pytest.mark.slow
@pytest.mark.parametrize("has_tracer", [pytest.param(False, marks=pytest.mark.soak), True])
def test_chosen_steps(tmp_path, has_tracer):
    """The second step alone: one rollout, one training, one sync."""
    path = tmp_path / "step.pftrace"
    parts = make_parts(rollout_engine=functools.partial(SglJaxRollout, **SMALL))
    timeline = Timeline()
    perf_config = timeline.perf_config if has_tracer else None
    cluster: Any = RLCluster(**parts.arguments, perf_config=perf_config)
    timeline.record_steps(cluster, path, first_step=1)
    GRPOLearner(cluster, grpo_config(), reward).train(list_batches())
    assert not timeline.is_recording
    cluster.rollout.close()
    trace = read_trace(path)
    for name in ("generate", "train", "update_params", "swap weights"):
        assert len(trace.named(name)) == 1, name
    assert {s.args["weight_version"] for s in trace.named("decode")} == {1}
    threads = [s for s in trace.named("reference_inference") if s.track in trace.threads]
    assert len(threads) == has_tracer
    with pytest.raises(InvalidConfigError, match="first_step must be >= 2, the step of now"):
        timeline.record_steps(cluster, path, first_step=1)


@pytest.mark.slow
def test_agentic_steps_while_episodes_are_in_flight(tmp_path):
    path = tmp_path / "agentic.pftrace"
    cluster = agentic_parts.make_cluster(num_steps=2)
    with record_timeline(path, cluster):
        agentic_parts.train(agentic_parts.make_learner(cluster), 2)
    cluster.rollout.close()
    trace = read_trace(path)
    assert len(trace.named("train")) == len(trace.named("update_params")) == 2
    num_episodes = 2 * agentic_parts.PER_STEP * agentic_parts.GROUP
    assert len(trace.named("generate")) >= num_episodes
    assert all(s.end_ns is not None for s in trace.named("decode"))


def test_the_agentic_learner_refuses_tunixs_tracer():
    cluster = agentic_parts.make_cluster(num_steps=1)
    cluster.perf_config = Timeline().perf_config
    with pytest.raises(InvalidConfigError, match="tracer fails episodes that are in flight"):
        agentic_parts.make_learner(cluster)
    agentic_parts.make_learner(cluster, weight_updates="drain")
    cluster.rollout.close()


def test_an_engine_alone(tmp_path, rollout):
    path = tmp_path / "engine.pftrace"
    engine: Engine = rollout.engine
    with record_timeline(path, engine):
        engine.generate(None, {"temperature": 0, "max_new_tokens": 4}, [1, 2, 3])
    trace = read_trace(path)
    assert trace.named("decode")
    assert all(not thread.startswith("trainer") for thread in trace.threads)


def test_an_engine_that_is_not_built_yet(tmp_path, make_rollout):
    rollout = make_rollout()
    with record_timeline(tmp_path / "late.pftrace", rollout):
        rollout.generate(["1 2 3"], rollout.rollout_config)
    trace = read_trace(tmp_path / "late.pftrace")
    assert len(trace.named("generate")) == 1
    assert trace.named("decode")


def test_a_block_that_fails(tmp_path, rollout, make_rollout):
    """Its file is written, and its error goes first."""
    assert rollout.engine
    for target, is_written in ((rollout, True), (make_rollout(), False)):
        path = tmp_path / f"{is_written}.pftrace"
        with pytest.raises(KeyError), record_timeline(path, target):
            raise KeyError("x")
        assert path.exists() == is_written


def test_misuse_is_refused(tmp_path, rollout):
    timeline = Timeline()
    with pytest.raises(InvalidConfigError, match="nothing to save"):
        timeline.save(tmp_path / "none.pftrace")
    assert rollout.engine
    timeline.start(rollout)
    with pytest.raises(InvalidConfigError, match="records already"):
        timeline.start(rollout)
    timeline.stop()
    timeline.stop()
    with pytest.raises(InvalidConfigError, match="no such folder to write a timeline to"):
        timeline.save(tmp_path / "no" / "such.pftrace")
    assert rollout.observers.on_span == []


def test_hooks_that_were_there_are_called_too():
    calls: list[Any] = []
    trainer = types.SimpleNamespace(train_steps=3)
    hooks = None
    for name in ("outer", "inner"):
        hooks = TrainSpans(name, calls.append, hooks)
    assert hooks is not None
    hooks.on_train_start(trainer)
    hooks.on_train_step_start(trainer)
    hooks.on_train_step_end(trainer, 1, 0.5)
    hooks.on_eval_step_start(trainer)
    hooks.on_eval_step_end(trainer, 0.5)
    hooks.on_train_end(trainer)
    assert [(span.name, span.args) for span in calls] == [
        ("outer", {"train_steps": 3}),
        ("inner", {"train_steps": 3}),
    ]


# ------------------------------------------------------------------ lanes


def test_lanes_hold_what_nests():
    slices = [
        Slice("b", 1.0, 3.0, {}),
        Slice("a", 0.0, 4.0, {}),
        Slice("c", 2.0, 5.0, {}),  # overlaps a and b
        Slice("d", 3.0, 4.0, {}),
        Slice("e", 4.0, 4.0, {}),  # an instant where others end
    ]
    names = [[s.name for s in lane] for lane in lanes(slices)]
    assert names == [["a", "b", "d", "e"], ["c"]]
    for lane in lanes(slices):
        for one, two in itertools.combinations(lane, 2):
            assert two.begin_s >= one.end_s or two.end_s <= one.end_s
