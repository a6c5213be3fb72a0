"""Benchmarks end to end on tiny sizes: that they run, and what they write."""

import json

import pytest

from benchmarks.exactness import rounding
from benchmarks.hardware import shared_bytes
from benchmarks.interruption import interruptions
from benchmarks.throughput import (
    hybrid,
    long_tail,
    over_sampling,
    sampling_masks,
    sampling_table,
    shared_prompts,
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
def test_the_long_tail(tmp_path):
    data = written(long_tail.main, tmp_path, "long_tail")
    assert "| [long_tail](long_tail.md) |" in (tmp_path / "README.md").read_text()
    assert list(data["runs_s"]) == list(data["simulated_s"]) == ["fcfs", "longest_first"]
    assert all(len(each) == 2 for each in data["runs_s"].values())
    assert data["table"]["rows"] == [1, 4]
    assert [len(each) for each in data["lengths"]] == [8, 8]
    assert all(length > 0 for each in data["lengths"] for length in each)


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
def test_sampling_masks(tmp_path):
    runs = written(sampling_masks.main, tmp_path, "sampling_masks", "--pairs", "1")["runs"]
    assert len(runs) == 2 * len(sampling_masks.FILTERS)


@pytest.mark.soak
def test_the_sampling_table(tmp_path):
    data = written(sampling_table.main, tmp_path, "sampling_table", "--pairs", "1")
    assert list(data["seconds"]["vocabulary 4096"]) == list(sampling_table.SETTINGS)


@pytest.mark.soak
def test_hybrids(tmp_path):
    data = written(hybrid.main, tmp_path, "hybrid", "--pairs", "1")
    assert list(data["decode"]) == [
        "1 rows, prompts of 16",
        "8 rows, prompts of 16",
        "64 rows, prompts of 16",
        "64 rows, prompts of 64",
    ]
    # All samples begin with one prompt of 64 tokens, the last of which is no prefill's.
    assert data["prefilled"]["group of 16"] == {"cache off": 16 * 63, "cache on": 63}
    assert data["memory"]["dense"]["states"] == 0 < data["memory"]["hybrid"]["states"]


@pytest.mark.soak
def test_shared_prompts(tmp_path):
    """Both engines have the same tokens and log-probs, else the script ends."""
    data = written(shared_prompts.main, tmp_path, "shared_prompts", "--pairs", "1")
    (seconds,) = data["seconds"].values()
    assert list(seconds) == [shared_prompts.ALONE, shared_prompts.TOGETHER]


@pytest.mark.soak
def test_shared_bytes(tmp_path):
    data = written(shared_bytes.main, tmp_path, "shared_bytes")
    assert list(data["bytes"]) == list(shared_bytes.KERNELS)


@pytest.mark.soak
def test_rounded_keys(tmp_path):
    data = written(rounding.main, tmp_path, "rounding", "--pairs", "1")
    assert list(data["rollouts"]) == list(rounding.ROLLOUTS)
    assert [list(each) for each in data["seconds"].values()] == [
        [rounding.BASE, rounding.INT8_KEYS]
    ]
    assert all(each["tokens"] for each in data["rollouts"].values())
