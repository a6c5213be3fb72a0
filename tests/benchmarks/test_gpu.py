"""The GPU benchmark in miniature, so that it runs when a GPU is there at last."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from benchmarks.hardware import gpu, gpu_ladder, gpu_profile


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_every_section_runs(tmp_path, capsys):
    output = tmp_path / "gpu.md"
    gpu.main(["--smoke", "--output", str(output)])
    data = json.loads(output.with_suffix(".json").read_text())
    assert "failures" not in data
    for name in ("decode_attention", "prefill_attention"):
        assert {row["backend"] for row in data[name]} == {"pallas", "xla"}
        assert all(row["time_s"] > 0 and row["limit_s"] > 0 for row in data[name])
    assert [row["contestant"] for row in data["rollouts"]] == ["engine, xla", "vanilla"]
    assert [row["rows"] for row in data["decode_steps"]] == [1, 4]
    (mismatch,) = data["mismatch"]
    assert mismatch["tokens"] > 0
    assert mismatch["largest"] < 0.01
    operations = [row["operation"] for row in data["interruptions"]]
    assert operations[:2] == ["sync", "sleep(1)"]
    assert len(operations) == 5
    contestants = [row["contestant"] for row in data["determinism"]]
    assert contestants == ["engine", "engine, deterministic"]
    assert "| pallas | 2 | 64 |" in output.read_text()
    capsys.readouterr()


def test_a_failed_section_costs_no_other(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no such kernel\nand more")

    def one_row(*_):
        yield {"backend": "xla", "rows": 1}

    def one_row_and_fail(*_):
        yield {"contestant": "vanilla"}
        fail()

    monkeypatch.setattr(gpu, "measure_ceilings", lambda _: gpu.Ceilings(1e12, 1e12))
    monkeypatch.setattr(gpu, "measure_decode", fail)
    monkeypatch.setattr(gpu, "measure_prefill", lambda *_: iter(()))
    monkeypatch.setattr(gpu, "measure_rollouts", one_row_and_fail)
    monkeypatch.setattr(gpu, "measure_decode_steps", one_row)
    for name in ("measure_mismatch", "measure_interruptions", "measure_determinism"):
        monkeypatch.setattr(gpu, name, one_row)
    output = tmp_path / "gpu.md"
    with pytest.raises(SystemExit, match="failed: Decode attention, Rollouts"):
        gpu.main(["--smoke", "--output", str(output)])
    data = json.loads(output.with_suffix(".json").read_text())
    assert "no such kernel" in data["failures"]["Decode attention"]
    assert data["rollouts"] == [{"contestant": "vanilla"}]
    assert data["decode_steps"] == [{"backend": "xla", "rows": 1}]
    assert "Failed: RuntimeError: no such kernel\n" in output.read_text()
    capsys.readouterr()


def test_sections_that_would_begin_too_late_are_left_out(tmp_path, capsys):
    output = tmp_path / "gpu.md"
    gpu.main(["--smoke", "--budget-s", "-1", "--output", str(output)])
    text = output.read_text()
    assert text.count("Left out: -1 s had passed.") == text.count("\n## ") >= 8
    capsys.readouterr()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it runs")
def test_it_is_refused_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "this needs a GPU, and JAX's default device is a cpu" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_a_decode_step_is_profiled():
    found = gpu_profile.measure(gpu.EngineSizes.smoke(), rows=4, linear_backend="xla")
    assert found["rows"] == 4
    assert found["kernels_per_step"] == 0  # no GPU


def test_the_profile_has_each_variant():
    kernels = [{"kernel": "attention", "per_step": 28.0, "us_per_step": 2300.0}]
    works = {"step_ms": 4.5, "kernels_per_step": 435.0, "kernel_ms_per_step": 4.1, "top": kernels}
    lines = gpu_profile.report_lines({"off": works, "all": {"error": "first line\nno such flag"}})
    assert "| off | 4.5 | 435 | 4.1 |" in lines
    assert "| all | failed: no such flag | | |" in lines
    assert "| `attention` | 28 | 2.3e+03 |" in lines


def climbed(output, *args: str) -> dict[str, dict[str, Any]]:
    """Results of the ladder in miniature."""
    gpu_ladder.main(
        ["--smoke", "--budget-s", "3000", "--rung-s", "600", *args, "--output", str(output)]
    )
    rungs = json.loads(output.with_suffix(".json").read_text())["rungs"]
    assert not [one["error"] for one in rungs.values() if "error" in one]
    return rungs


def test_rungs_that_are_named_run_alone(tmp_path, capsys, monkeypatch):
    """One process for each set of flags."""
    asked = []

    def lines_of(command, flags, *_):
        asked.append((flags, *command[command.index("--here") + 1 :]))
        return [{"step, ms": 4.0, "tokens/s": 32e3, "largest difference": 0.0}]

    monkeypatch.setattr(gpu_ladder, "_lines_of", lines_of)
    output = tmp_path / "ladder.md"
    names = [gpu_ladder.BASE, "base, products by cuBLAS"]
    assert list(climbed(output, "--only", *names)) == names
    assert asked == [(gpu_ladder.RUNGS[name].flags, name, "--smoke") for name in names]
    assert output.read_text().count("| 4 | 32,000 |") == 2
    capsys.readouterr()


@pytest.mark.soak
def test_every_rung_runs(tmp_path, capsys):
    output = tmp_path / "ladder.md"
    rungs = climbed(output)
    assert list(rungs) == list(gpu_ladder.RUNGS)
    checked = {name: one for name, one in rungs.items() if "is_right" in one}
    assert list(checked) == [
        name for name, rung in gpu_ladder.RUNGS.items() if rung.measure == "decode"
    ]
    assert all(one["is_right"] and one["compared tokens"] > 0 for one in checked.values())
    # Each change computes in other steps: a switch that does nothing would not differ.
    changes = [one for name, one in checked.items() if gpu_ladder.RUNGS[name].fused]
    assert all(one["largest difference"] > 0 for one in changes)
    assert rungs["JAX and a kernel"]["JAX"] == jax.__version__
    for name in ("an MLP alone, by tiles", "an MLP alone in int8, by tiles"):
        times = [value for key, value in rungs[name].items() if key.endswith(", us")]
        assert len(times) > 8
        assert all(isinstance(value, float) and value > 0 for value in times), rungs[name]
    not_run = {name for name, one in rungs.items() if "not run" in one}
    if jax.default_backend() != "gpu":
        assert not_run == {name for name in rungs if "Hopper" in name}
        assert "- not run: it needs a Hopper GPU, the device is of kind" in output.read_text()
    capsys.readouterr()


def test_a_wrong_rung_is_not_timed_and_a_dead_one_costs_no_other(monkeypatch):
    names = list(gpu_ladder.RUNGS)[1:4]
    answers = iter([[{"step, ms": 4.0, "tokens/s": 32e3, "largest difference": 0.0}], [], []])
    monkeypatch.setattr(gpu_ladder, "_lines_of", lambda *_: next(answers))
    saved = []
    found = gpu_ladder.run_rungs(names, 60.0, 30.0, is_smoke=True, save=saved.append)
    assert [one.get("error") for one in found.values()] == [
        None,
        *["its process died, or it took 30 s"] * 2,
    ]
    assert len(saved) == 4
    found[names[1]] = {"is_right": False, "largest difference": 0.5}
    lines = gpu_ladder.report_lines(found)
    assert f"| {names[0]} | 4 | 32,000 | 1.00 | 0 |" in lines
    assert f"| {names[1]} | wrong, not timed | | | 0.5 |" in lines
    assert f"| {names[2]} | failed: its process died, or it took 30 s | | | |" in lines
