"""Progress bars, and lines without them: what they say, when they are drawn, and that they end."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
import threading
import types

import pytest

from sgljax_engine import EngineProgress
from tunix_sgljax.observability import progress as shown
from tunix_sgljax.observability.progress import Progress, describe, is_interactive

RUNNING = EngineProgress(
    num_running=3,
    num_waiting=2,
    num_finished=5,
    num_output_tokens=150,
    num_prefill_tokens=30,
    num_verified_tokens=0,
    num_accepted_tokens=0,
    num_cached_tokens=70,
    weight_version=4,
    halted_s=None,
)


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def bar_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "sgljax-progress"]


def test_rollouts_and_loading_are_drawn(make_rollout, capsys):
    rollout = make_rollout(progress=Progress(True))
    for _ in range(2):
        rollout.generate(["1 2 3", "4 5 6"], rollout.rollout_config)
    drawn = capsys.readouterr().err
    assert "Place weights: 100%" in drawn
    assert drawn.count("Rollout: 100%") == 2
    assert "2/2" in drawn
    assert "tokens/s, 0 running, 0 waiting" in drawn
    assert "weights v0" in drawn
    assert bar_threads() == []


def test_no_bars_where_nobody_looks(make_rollout, capsys, monkeypatch):
    """No bars by option, or where stderr is no terminal."""
    assert not Progress(False).is_enabled
    assert not is_interactive()  # pytest's stderr is none
    assert not Progress().is_enabled
    for progress in (Progress(), Progress(False)):
        rollout = make_rollout(progress=progress)
        rollout.generate(["1 2 3"], rollout.rollout_config)
        assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Progress().is_enabled
    assert not Progress(False).is_enabled


def test_a_script_gets_a_line_for_each_slow_phase(make_rollout, capsys, monkeypatch):
    """Without a Progress: what compiles, the first rollout, and slow ones."""
    monkeypatch.setattr(shown, "SLOW_S", float("inf"))
    rollout = make_rollout()
    rollout.generate(["1 2 3", "4 5 6"], rollout.rollout_config)
    lines = capsys.readouterr().err.splitlines()
    compiled = [line for line in lines if line.startswith("rollout compiles program ")]
    state = rollout.engine.get_internal_state()
    assert len(compiled) == state.num_compiles > 1
    assert compiled[0] == "rollout compiles program 1, prefill"
    assert re.fullmatch(r"rollout \d+\.\d s, 2 samples, \d+ tokens/s, weights v0", lines[-1])
    assert len(lines) == len(compiled) + 1
    rollout.generate(["1 2 3", "4 5 6"], rollout.rollout_config)
    assert capsys.readouterr().err == "", "fast and compiled"
    monkeypatch.setattr(shown, "SLOW_S", 0.0)
    rollout.generate(["1 2 3"], rollout.rollout_config)
    assert " s, 1 sample, " in capsys.readouterr().err
    rollout.engine.warmup()
    lines = capsys.readouterr().err.splitlines()
    announced = re.fullmatch(r"rollout compiles (\d+) programs?", lines[0])
    assert announced is not None
    total = int(announced[1])
    done = [line for line in lines if line.startswith("rollout compiled ")]
    assert sorted(done) == sorted(f"rollout compiled {i} of {total}" for i in range(1, total + 1))
    assert bar_threads() == []


def test_lines_of_a_rollout_that_takes_long(rollout, capsys, monkeypatch):
    """It is alive; and whose turn it is, where a trainer follows."""
    written = threading.Event()
    monkeypatch.setattr(shown, "HEARTBEAT_S", 0.001)
    lines = shown.PhaseLines(has_trainer=True)
    real_write = shown._write

    def write(line):
        real_write(line)
        # 3 + 5: before the second rollout begins, a line counts the first alone.
        if ", 0 of 8 samples, " in line:
            written.set()

    monkeypatch.setattr(shown, "_write", write)
    with lines.rollout(rollout.engine, 3), lines.rollout(rollout.engine, 5):
        assert written.wait(60)
    drawn = capsys.readouterr().err.splitlines()
    assert drawn[-1].endswith("; next the trainer, whose first step compiles")
    lines.updated()
    with lines.rollout(rollout.engine, 3):
        pass
    assert "trainer" not in capsys.readouterr().err
    assert bar_threads() == []


def test_a_notebook_is_recognised(monkeypatch):
    shell = types.SimpleNamespace()
    ipython = types.ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert Progress().is_enabled
    monkeypatch.setattr(ipython, "get_ipython", lambda: None)
    assert not Progress().is_enabled


def test_bars_are_closed_when_the_call_fails(rollout, capsys):
    progress = Progress(True)

    def fail():
        with progress.rollout(rollout.engine, 3):
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert bar_threads() == []
    progress.started("read weights", 100, "B")
    with progress:
        progress.advanced("read weights", 50)
    progress.advanced("read weights", 50)  # of a bar that is closed
    assert "50.0/100" in capsys.readouterr().err


def test_concurrent_calls_share_a_bar(rollout, capsys):
    progress = Progress(True)
    with progress.rollout(rollout.engine, 3):
        with progress.rollout(rollout.engine, 5):
            assert bar_threads() == ["sgljax-progress"]
        assert bar_threads() == ["sgljax-progress"]
    assert bar_threads() == []
    assert "0/8" in capsys.readouterr().err


def test_what_the_rollout_bar_says():
    first = dataclasses.replace(
        RUNNING, num_output_tokens=50, num_prefill_tokens=0, num_cached_tokens=0
    )
    assert describe(first, RUNNING, 2.0) == (
        "50 tokens/s, 3 running, 2 waiting, 70% cached, weights v4"
    )
    assert "0% cached" in describe(RUNNING, RUNNING, 0.0)
    drafting = dataclasses.replace(RUNNING, num_verified_tokens=80, num_accepted_tokens=60)
    assert "70% cached, 75% drafted, weights v4" in describe(first, drafting, 2.0)
