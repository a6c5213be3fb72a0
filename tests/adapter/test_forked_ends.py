"""What ends or unwinds in a forked child, while another thread of the parent held every lock."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tunix_sgljax
from tests.adapter.test_over_sampling_machine import ModelRollout, columns_of
from tests.threads import start
from tunix_sgljax import OverSampling
from tunix_sgljax.long_tail.groups import GroupsInFlight
from tunix_sgljax.long_tail.pausing import TrainerPause
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.observability.timeline import Timeline

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork")

PACKAGE = Path(tunix_sgljax.__file__).parent
LIMIT_S = 5
ENDS = {"close", "stop", "end", "__exit__"}
LOCKS = ("Lock", "RLock", "Condition")

ELSEWHERE = {
    "InProcessTransport": "needs a later Tunix; its close is as Progress's",
    "SglJaxRollout": "tests/process ends one in forked children",
    "SglJaxSampler": "closes its rollout; its lock is asyncio's",
}


class Line(contextlib.ExitStack):
    """A block of over-sampling's evaluation, which a child leaves by an exception."""

    def close(self) -> None:
        with contextlib.suppress(SystemExit), self:
            raise SystemExit(3)


def in_evaluation() -> Any:
    rollout: Any = ModelRollout(seed=0)
    block, pause = Line(), TrainerPause(rollout)
    block.enter_context(pause.running(lambda: True))
    block.subject = pause  # pyright: ignore[reportAttributeAccessIssue]
    return block


def make_groups() -> GroupsInFlight:
    rollout: Any = ModelRollout(seed=0)
    return GroupsInFlight(rollout, OverSampling(), 2, columns_of)


def make_pause() -> TrainerPause:
    rollout: Any = ModelRollout(seed=0)
    return TrainerPause(rollout)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "Progress": (lambda: Progress(enabled=True), "close"),
    "Timeline": (Timeline, "stop"),
    "GroupsInFlight": (make_groups, "close"),
    "TrainerPause": (make_pause, "end"),
    "TrainerPause.running": (in_evaluation, "close"),
}
"""How to make one of each class, and what ends it."""


def locks_of(each: object) -> Iterator[Any]:
    """The locks of one of our objects, and of those that it has."""
    for value in vars(each).values():
        if hasattr(value, "acquire"):
            yield value
        elif type(value).__module__.startswith("tunix_sgljax"):
            yield from locks_of(value)


def classes_with_locks() -> set[str]:
    """Our classes that make a lock and can be ended."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "Lock(" in text or "Condition(" in text else ():
            if not isinstance(node, ast.ClassDef):
                continue
            names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            made = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            if names & ENDS and made & set(LOCKS):
                found.add(node.name)
    return found


def test_every_class_with_a_lock_is_here():
    assert classes_with_locks() <= CASES.keys() | ELSEWHERE.keys()
    assert classes_with_locks() >= {name for name in CASES if "." not in name}


@pytest.mark.parametrize("name", CASES)
def test_a_forked_child_that_ends_it_does_not_hang(name):
    make, end = CASES[name]
    subject = make()
    locks = list(locks_of(subject))
    assert locks
    are_held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            are_held.set()
            let_go.wait()

    holder = start(hold)
    are_held.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        try:
            getattr(subject, end)()
            os._exit(0)
        finally:
            os._exit(1)
    let_go.set()
    holder.result(LIMIT_S)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    getattr(subject, end)()  # in the parent it ends
