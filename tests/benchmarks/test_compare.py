"""The harness end to end, on tiny sizes and without torch, and the arithmetic of its tables."""

import json

import pytest

from benchmarks.hardware.roofline import weight_bytes
from benchmarks.interruption.weight_sync import (
    find_stalls_s,
    format_weight_sync,
    measure_weight_sync,
)
from benchmarks.lib.comparison import PeerResult, WorkloadResult, format_comparison
from benchmarks.lib.shapes import MODELS
from benchmarks.lib.vanilla import VanillaPeer
from benchmarks.lib.workloads import make_workload
from benchmarks.throughput import compare
from sgljax_engine.observability.trace import RecordedEvent

QUICK_COMPILE = "that the benchmark runs and what it writes, not its numbers"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix


def peer_result(name="vanilla", runs_s=(4.0, 6.0, 5.0), our_runs_s=(2.0, 2.0, 1.0)):
    return PeerResult(
        name=name,
        batch_size=8,
        num_agreed=16,
        first_token_s=[0.25, 0.5],
        runs_s=list(runs_s),
        our_runs_s=list(our_runs_s),
    )


def test_tables_and_ratios():
    ours = peer_result("sgljax", runs_s=(2.0, 2.0, 1.0))
    result = WorkloadResult(
        workload="test",
        num_requests=2,
        num_rows=2,
        useful_tokens=100,
        step_bytes=2_000_000,
        read_bytes_per_s=3e9,
        limit_by_part_s={"projections": 0.5, "attention": 0.5},
        peers=[ours, peer_result()],
    )
    assert peer_result().ratios == [2.0, 3.0, 5.0]
    vanilla = result.to_dict()["peers"][1]
    assert vanilla["tokens_per_s"] == 20.0
    assert vanilla["limit_fraction"] == 0.2
    assert vanilla["median_ratio"] == 3.0
    text = "\n".join(format_comparison([result]))
    assert "| sgljax | 8 | 50 |  | 50.0% | 0.38, 0.50 | 2.00 |" in text
    assert "| vanilla | 8 | 20 | 3.00 (2.00, 5.00) | 20.0% | 0.38, 0.50 | 5.00 |" in text
    assert "step reads 2 MB on average, for which the ceiling is 3.0 GB/s." in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pairs", "0"], "--pairs must be at least 1, got 0"),
        (["--workloads", "rl_uniform", "--alone", "single_stream"], "--alone must name some of"),
    ],
)
def test_options_are_checked(argv, message, capsys):
    with pytest.raises(SystemExit):
        compare.parse_args(argv)
    assert message in capsys.readouterr().err


@pytest.mark.soak
def test_comparison_end_to_end(tmp_path, capsys):
    arguments = ["--quick", "--workloads", "rl_uniform", "single_stream"]
    arguments += ["--skip-sync", "--alone", "single_stream"]
    compare.main([*arguments, "--output-dir", str(tmp_path)])
    output = capsys.readouterr().out
    assert "16 of 16 greedy tokens are those of vanilla" in output
    data = json.loads((tmp_path / "bench_tiny.json").read_text())
    assert data["is_quick"]
    assert data["environment"]["versions"]["jax"]
    assert [w["workload"] for w in data["workloads"]] == ["rl_uniform", "single_stream"]
    uniform, stream = data["workloads"]
    names = [peer["name"] for peer in uniform["peers"]]
    assert names in (["sgljax", "vanilla"], ["sgljax", "vanilla", "vanilla, micro-batch"])
    assert [peer["name"] for peer in stream["peers"]] == ["sgljax"]
    for peer in (*uniform["peers"], *stream["peers"]):
        assert 0 < peer["limit_fraction"] < 1
        assert max(peer["first_token_s"]) > 0
    assert data["weight_sync"] == []
    assert "| [bench_tiny](bench_tiny.md) |" in (tmp_path / "README.md").read_text()


@pytest.mark.soak
def test_a_run_that_is_cut_short_leaves_what_it_has(tmp_path, monkeypatch):
    measure, calls = compare.measure_workload, []

    def fail_second(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(compare, "measure_workload", fail_second)
    arguments = ["--quick", "--workloads", "rl_uniform", "single_stream", "--alone", "rl_uniform"]
    with pytest.raises(KeyboardInterrupt):
        compare.main([*arguments, "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "bench_tiny.json").read_text())
    assert [w["workload"] for w in data["workloads"]] == ["rl_uniform"]
    assert "CUT SHORT: 1 workload(s)" in (tmp_path / "bench_tiny.md").read_text()


@pytest.mark.soak
def test_micro_batches_answer_in_order():
    config = MODELS["tiny"].config
    workload = make_workload("rl_longtail", config.vocab_size, is_quick=True)
    model = compare.make_tunix_model(config)
    whole, micro = (
        VanillaPeer(model, config, workload, size).generate(workload, is_greedy=True)
        for size in (None, 4)
    )
    assert whole == micro
    assert tuple(map(len, whole)) == workload.output_lengths


@pytest.mark.soak
def test_weight_sync():
    bench_model = MODELS["tiny"]
    model = compare.make_tunix_model(bench_model.config)
    workload = make_workload("single_stream", bench_model.config.vocab_size, is_quick=True)
    syncs = measure_weight_sync(model, workload.with_lengths([256]), repeats=2)
    assert [sync.mode for sync in syncs] == ["retract", "in_place"]
    for sync in syncs:
        assert sync.num_bytes == pytest.approx(  # not computed
            weight_bytes(bench_model.config), rel=1e-2
        )
        assert len(sync.idle_s) == len(sync.copies_s) == len(sync.stalls_s) / 2 == 2
    table = "\n".join(format_weight_sync(syncs))
    assert "| retracted, and prefilled again |" in table
    assert "| going on in place |" in table


def test_a_stall_is_the_time_between_dispatches_that_holds_the_swap():
    begin_ends = [(0.0, 1.0), (1.1, 2.0), (2.1, 3.0), (3.5, 4.0), (4.1, 5.0), (8.0, 9.0)]
    events = [RecordedEvent("engine", "decode", *times, {}) for times in begin_ends]
    swaps = [
        RecordedEvent("engine", "swap weights", begin, begin + 0.2, {}) for begin in (3.1, 5.0)
    ]
    assert find_stalls_s(events + swaps) == pytest.approx([0.5 - 0.1, 3.0 - 0.1])  # not computed
    outside = RecordedEvent("engine", "swap weights", 9.1, 9.2, {})
    with pytest.raises(AssertionError, match="1 swaps, of which 0"):
        find_stalls_s([*events, outside])
