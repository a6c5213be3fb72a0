"""`bench`, end to end on tiny models: with random weights, and on a folder against vanilla."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.bench import main
from benchmarks.lib import measure
from benchmarks.lib.workloads import FULL, QUICK, make_workload
from tests.engine.small_tokenizers import GOLDEN

QUICK_COMPILE = "what the command prints and writes"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

MODEL = GOLDEN / "qwen3_gqa_tied"
SMALL_ENGINE = ["--engine", "token_buckets=[64]", "--engine", "chunked_prefill_size=64"]


def bench(*argv: Any) -> int:
    return main([*map(str, argv), *SMALL_ENGINE])


@pytest.mark.soak
def test_against_vanilla(tmp_path, capsys):
    report = tmp_path / "bench.json"
    argv = ["--model", MODEL, "--against", "vanilla", "--quick", "--repeats", 2]
    assert bench(*argv, "--workloads", "single_stream", "--json", report) == 0
    output = capsys.readouterr()
    head, _, row = output.out.splitlines()
    assert head.startswith("| workload | requests | useful tokens/s |")
    assert head.endswith("| vanilla tokens/s | times vanilla (pairs) |")
    assert row.startswith("| single_stream | 1 |")
    assert output.err.count("vanilla: ") == 2
    data = json.loads(report.read_text())
    assert data["is_complete"]
    assert data["environment"]["versions"]["jax"]
    (result,) = data["workloads"]
    assert result["useful_tokens"] == QUICK.uniform_output
    assert result["tokens_per_s"] > 0
    assert 0 < result["first_token_s"][0] <= result["latency_s"][0]
    assert result["memory"]["weights_bytes"] > 0
    assert result["num_compiles"] > 0
    against = result["against"]
    assert against["num_agreed"] == against["num_greedy"]  # the same model, read by both
    assert len(against["ratios"]) == len(result["runs_s"]) == 2
    assert against["ratios"][0] == against["runs_s"][0] / result["runs_s"][0]


@pytest.mark.slow
def test_what_was_measured_is_kept_when_interrupted(tmp_path, monkeypatch, capsys):
    calls, timed = [], measure.timed

    def interrupted(peer, workload):
        calls.append(workload.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return timed(peer, workload)

    monkeypatch.setattr(measure, "timed", interrupted)
    report = tmp_path / "bench.json"
    shape = tmp_path / "config.json"
    shape.write_text((MODEL / "config.json").read_text())
    argv = ["--random", shape, "--quick", "--repeats", 1, "--json", report]
    assert bench(*argv, "--workloads", "rl_uniform", "single_stream") == 130
    assert calls == ["rl_uniform", "single_stream"]
    output = capsys.readouterr()
    assert "interrupted: what was measured follows" in output.err
    assert output.out.splitlines()[-1].startswith("| rl_uniform | 8 |")
    data = json.loads(report.read_text())
    assert not data["is_complete"]
    assert [result["workload"] for result in data["workloads"]] == ["rl_uniform"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the arguments --model --random is required"),
        (["--random", "huge"], "--random must be one of tiny, small, qwen3-0.6b"),
        (["--random", "tiny", "--workloads", "rl"], "invalid choice: 'rl'"),
        (["--random", "tiny", "--repeats", "0"], "--repeats must be above 0, got 0"),
        (["--random", "tiny", "--engine", "max_model_len=9"], "is set by the workload"),
        (["--model", MODEL], "rl_longtail needs"),
        (
            ["--random", GOLDEN / "llama_tied" / "config.json", "--against", "vanilla"],
            "--against with --random takes a Qwen3ForCausalLM, got LlamaForCausalLM",
        ),
    ],
)
def test_bad_input(argv, message, capsys):
    assert bench(*argv, "--length-scale", "3") == 2
    assert message in capsys.readouterr().err


def test_sizes_scale():
    sizes = FULL.scaled(0.5)
    workload = make_workload("rl_longtail", 100, sizes=sizes)
    assert {32 <= len(prompt) <= 64 for prompt in workload.prompts} == {True}
    assert max(workload.output_lengths) <= 128
    assert make_workload("long_prompt", 100, sizes=sizes).max_prompt_len == 1024
    assert make_workload("rl_uniform", 100, sizes=sizes).num_rows == 64
