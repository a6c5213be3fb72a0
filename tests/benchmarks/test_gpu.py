"""The GPU benchmark in miniature, so that it runs when a GPU is there at last."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from benchmarks.hardware import gpu_ladder


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
    assert rungs["rollouts beside Tunix's sampler"]["times Tunix's"] > 0
    assert rungs["weight sync, sleep and wake"]["wake_up after sleep(2), ms"] > 0
    mismatch = rungs["log-probs beside the trainer's"]
    assert mismatch["tokens"] == 16 * 8
    assert mismatch["largest"] < 0.01
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
