"""Processes with an engine end, are interrupted and fork like others; see `ends.py`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.ends import ENDS, FORKS, table
from tests.process.zygotes import Zygote
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
DOES = ("idle", "in_flight", "paused", "asleep", "updating", "group", "serving")
ONLY_END = ("building", "warming")
"""What goes on until the process ends."""
SPAWN = ("spawn", "grain", "subprocess")
"""Children that import all anew."""
IN_VAIN = {("building", "closes"), ("warming", "closes")}

QUICK_COMPILE = "how processes end"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote("tests.process.scenes")
    yield made
    made.close()


@pytest.fixture(scope="module")
def learners() -> Iterator[Zygote]:
    made = Zygote("tests.process.learners")
    yield made
    made.close()


def shell_code(found: dict[str, Any]) -> int:
    """The exit code as a shell has it."""
    return found["code"] if found["code"] >= 0 else 128 - found["code"]


CASES = [
    f"{does}, {ends}" for ends in ENDS for does in (*DOES, *ONLY_END) if (does, ends) not in IN_VAIN
]
IN_CI = [
    "in_flight, interrupted",
    *map(", ".join, zip((*DOES, *ONLY_END), itertools.cycle(ENDS), strict=False)),
]


@pytest.mark.parametrize("case", tiered(CASES, IN_CI[:1], IN_CI))
def test_end(zygote, tmp_path, case):
    does, ends = case.split(", ")
    row = ENDS[ends]
    found = zygote.play(tmp_path, does=does, ends=ends)
    lines = found["out"].splitlines()
    assert shell_code(found) == row.code, found
    assert lines[0] == "ready", found
    if row.calls is None or does == "idle":
        assert lines == ["ready"], found
    else:
        assert len(lines) > 1, found
        assert all(line.partition(" ")[2].startswith(row.calls) for line in lines[1:]), found
    own = {"raises": "RuntimeError: a fault", "interrupted": "KeyboardInterrupt"}.get(ends)
    errors = [each for each in found["err"].splitlines() if "the engine sleeps" not in each]
    assert errors[-1].startswith(own) if own else errors == [], found


def test_a_fork(zygote, tmp_path):
    check_lives_on(zygote, tmp_path, "in_flight", ["sys_exit", "closes", "calls"])


@pytest.mark.parametrize("does", tiered(DOES, [], ["in_flight", "group"]))
def test_forks(zygote, tmp_path, does):
    check_lives_on(zygote, tmp_path, does, [each for each in FORKS if each not in SPAWN])


@pytest.mark.parametrize("child", tiered(SPAWN, [], ["spawn"]))
def test_spawn(zygote, tmp_path, child):
    check_lives_on(zygote, tmp_path, "in_flight", [child])


ANSWERS = [each for each in DOES if each not in ("paused", "asleep")]


@pytest.mark.parametrize("does", tiered(ANSWERS, [], ["in_flight"]))
def test_interrupts(zygote, tmp_path, does):
    check_lives_on(zygote, tmp_path, does, ["cell", "asyncio"])


def check_lives_on(zygote, folder, does, events):
    """The process lives through these events, and loses nothing."""
    found = zygote.play(folder, does=does, ends="", events=" ".join(events))
    lines = found["out"].splitlines()
    assert found["code"] == 0, found
    # IPython's tracebacks end within a line, and what comes next stands behind one.
    assert lines[-1].endswith("nothing was lost") or "nothing was lost" in lines, found
    assert re.findall(r"event (\S+)$", found["out"], re.MULTILINE) == events


def test_the_page_has_the_table():
    assert table() in PAGE.read_text("utf-8")


LEARNERS = [
    f"{does}, {ends}"
    for does in ("sampling", "training", "over_sampling", "agentic")
    for ends in ("interrupted", "terminated", "handles")
]


@pytest.mark.parametrize("case", tiered(LEARNERS, [], LEARNERS[:1]))
def test_learner(learners, tmp_path, case):
    """A script with Tunix's learner ends when it is told to, whatever its threads do."""
    does, ends = case.split(", ")
    found = learners.play(tmp_path, does=does, ends=ends)
    assert shell_code(found) == ENDS[ends].code, found
    assert found["out"] == "ready\n", found


@pytest.mark.soak
def test_reward_functions_with_processes(learners, tmp_path):
    """Nothing is lost: the rollout has the weights of both steps."""
    found = learners.play(tmp_path, does="reward_workers", ends="")
    assert (found["code"], found["out"]) == (0, "trained\n"), found
