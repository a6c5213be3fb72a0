"""What the engines of a group do together, with a fault at each stage on each engine.

Threads and futures are real; what they prepare is a note in a list.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any, cast

import pytest

from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.transaction import GroupCommand, Transaction
from tests.threads import LIMIT_S, start

STAGES = ("prepare", "together", "commit")
ERRORS = (RuntimeError("planted"), SystemExit("planted"))


@dataclasses.dataclass
class Note:
    """What becomes of the engines: their states by index."""

    stage: str
    index: int
    error: BaseException
    states: dict[int, str] = dataclasses.field(default_factory=dict)

    def fail(self, stage: str, index: int) -> None:
        if (stage, index) == (self.stage, self.index):
            raise self.error


class Planted(GroupCommand):
    """A command with a fault, for engines that are numbers."""

    def __init__(self, note: Note, future: Future[Any]) -> None:
        self.note = note
        self.future = future

    def prepare(self, core: Any) -> str:
        self.note.fail("prepare", core)
        self.note.states[core] = "prepared"
        return f"of {core}"

    def together(self, cores: Any, prepared: Any) -> list[str]:
        self.note.fail("together", self.note.index)
        assert [f"of {core}" for core in cores] == list(prepared)
        return [f"made {each}" for each in prepared]

    def commit(self, core: Any, prepared: Any) -> int:
        assert prepared == f"made of {core}"
        self.note.fail("commit", core)
        self.note.states[core] = "committed"
        return core

    def rollback(self, core: Any, prepared: Any, error: BaseException) -> None:
        assert error is not None
        assert (prepared is not None) == (core in self.note.states)
        self.note.states[core] = "rolled back"

    def combine(self, answers: Any) -> list[int]:
        return list(answers)


def hold(note: Note, count: int, refused: int | None = None) -> tuple[Future[Any], list[Any]]:
    """Has so many threads take part; the answer, and what each thread raised."""
    answer: Future[Any] = Future()
    transaction = Transaction(Planted(note, answer), count)

    def take_part(index: int) -> None:
        try:
            if index == refused:
                transaction.refuse(index, lambda: RuntimeError("it is closed"))
            else:
                transaction.take_part(index, cast(EngineCore, index))
        finally:  # as an engine thread that ends
            transaction.refuse(index, lambda: RuntimeError("it came already"))

    calls = [start(lambda index=index: take_part(index)) for index in range(count)]
    raised = [call.exception(LIMIT_S) for call in calls]
    answer.exception(LIMIT_S)
    return answer, raised


@pytest.mark.parametrize("count", [1, 2, 4])
class TestTransaction:
    def test_all_commit(self, count):
        note = Note("", 0, ERRORS[0])
        answer, raised = hold(note, count)
        assert answer.result(0) == list(range(count))
        assert note.states == dict.fromkeys(range(count), "committed")
        assert not any(raised)

    @pytest.mark.parametrize("error", ERRORS, ids=repr)
    @pytest.mark.parametrize("stage", STAGES)
    def test_all_or_none(self, count, stage, error):
        """Whatever a hook raises is the caller's; then every engine rolls back."""
        for index in range(count):
            note = Note(stage, index, error)
            answer, raised = hold(note, count)
            assert answer.exception(0) is error
            others = [state for each, state in note.states.items() if each != index]
            assert len(others) == count - 1
            if stage == "commit":  # a bug: it ends engines that may differ now
                assert set(others) <= {"committed"}
                is_fatal = count > 1 or not isinstance(error, Exception)
                assert raised[index] is (error if is_fatal else None)
            else:
                assert note.states == dict.fromkeys(range(count), "rolled back")
                assert not any(raised)

    def test_an_engine_that_does_not_come(self, count):
        for index in range(count):
            note = Note("", 0, ERRORS[0])
            answer, raised = hold(note, count, refused=index)
            assert str(answer.exception(0)) == "it is closed"
            others = set(range(count)) - {index}
            assert note.states == dict.fromkeys(others, "rolled back")
            assert not any(raised)
