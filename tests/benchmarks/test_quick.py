"""Benchmarks end to end on tiny sizes: that they run, and what they write."""

import json

import pytest

from benchmarks.hardware import step_parts
from benchmarks.interruption import interruptions, sleep_wake
from benchmarks.throughput import (
    delta_net,
    growth,
    hybrid,
    long_tail,
    options,
    over_sampling,
    simulated,
)

QUICK_COMPILE = "that the benchmark runs and what it writes, not its numbers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Tunix
]


def written(main, tmp_path, name, *arguments):
    main(["--quick", "--output-dir", str(tmp_path), *arguments])
    assert "- Machine: " in (tmp_path / f"{name}.md").read_text()
    return json.loads((tmp_path / f"{name}.json").read_text())


@pytest.mark.soak
def test_pauses(tmp_path):
    latencies = written(interruptions.main, tmp_path, "interruptions")["latencies"]
    modes = [(each["mode"], each["max_dispatch_s"]) for each in latencies]
    assert modes == [(mode, s) for s in (1.0, 0.1) for mode in ("retract", "in_place")]
    assert all(len(each["pauses_s"]) == 3 for each in latencies)


@pytest.mark.soak
def test_sleeps_and_saves(tmp_path):
    data = written(sleep_wake.main, tmp_path, "sleep_wake")
    kept, given_up = data["cycles"]
    assert kept["device_bytes"] == given_up["device_bytes"]
    assert kept["host_bytes"] > given_up["host_bytes"]
    assert [each["with_kv"] for each in data["saves"]] == [False, True]


@pytest.mark.soak
def test_parts_of_a_step(tmp_path):
    data = written(step_parts.main, tmp_path, "step_parts_tiny", "--model", "tiny")
    assert 2 <= data["num_rows"] <= 4
    measured = {part["part"]: part["measured_s"] for part in data["parts"]}
    assert list(measured)[::5] == ["projections", "host"]
    assert measured["projections"] > 0


@pytest.mark.soak
def test_growth_with_the_batch(tmp_path):
    data = written(growth.main, tmp_path, "growth", "--series", "batch")
    assert list(data["runs_s"]["batch"]["tiny"]) == ["1", "2"]
    assert "| [growth](growth.md) |" in (tmp_path / "README.md").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["demo", "rl_longtail"])
def test_the_long_tail(tmp_path, name):
    data = written(long_tail.main, tmp_path, f"long_tail_{name}", "--workloads", name)
    assert list(data["runs_s"]) == list(data["simulated_s"]) == ["fcfs", "longest_first"]
    assert all(len(each) == 2 for each in data["runs_s"].values())
    assert data["table"]["rows"] == [1, 4]
    assert [len(each) for each in data["lengths"]] == [8, 8]
    assert all(length > 0 for each in data["lengths"] for length in each)


@pytest.mark.soak
def test_simulated_rollouts(tmp_path):
    for lengths in ("lognormal", "rl_longtail"):  # the second adds to the first
        data = written(
            simulated.main, tmp_path, "simulated", "--lengths", lengths, "--hardware", "cpu"
        )
    assert list(data["found"]) == ["lognormal, cpu", "rl_longtail, cpu"]
    for rows in data["found"].values():
        assert [row["epoch"] for row in rows] == ["first", "later"]
        assert all(row["outcomes"][0]["speed"] == 1 for row in rows)
    assert "in 4 cases" in (tmp_path / "simulated.md").read_text()


@pytest.mark.soak
def test_over_sampling(tmp_path):
    ways = ["plain", "1.25 times, carry, age 1"]
    for seed in ("0", "1"):  # the second adds to the first
        data = written(
            over_sampling.main, tmp_path, "over_sampling", "--seeds", seed, "--ways", *ways
        )
    trained = {way: list(some) for way, some in data["trainings"].items() if some}
    assert trained == {way: ["0", "1"] for way in ways}
    training = data["trainings"]["plain"]["0"]
    assert len(training["rewards"]) == len(training["ends_s"]) == len(training["waits_s"]) == 4
    assert training["ends_s"] == sorted(training["ends_s"])


@pytest.mark.soak
def test_experts(tmp_path):
    data = written(options.main, tmp_path, "moe", "--pairs", "1", "--tables", "moe")
    assert list(data["seconds"]) == ["1 rows", "8 rows", "64 rows"]


@pytest.mark.soak
def test_recurrence(tmp_path):
    data = written(delta_net.main, tmp_path, "delta_net", "--pairs", "1")
    assert set(data["prefill of 32 tokens"]) == {"XLA", "XLA by token", "kernels"}  # not computed


@pytest.mark.soak
def test_hybrids(tmp_path):
    data = written(hybrid.main, tmp_path, "hybrid", "--pairs", "1")
    assert list(data["decode"]) == ["1 rows", "8 rows", "64 rows"]
    # All samples begin with one prompt of 64 tokens, the last of which is no prefill's.
    assert data["prefilled"]["group of 16"] == {"cache off": 16 * 63, "cache on": 63}
    assert data["memory"]["dense"]["states"] == 0 < data["memory"]["hybrid"]["states"]
