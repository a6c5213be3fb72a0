"""What the engines of a group do together, with a fault at each stage on each engine.

Threads and futures are real; what they prepare is a note in a list.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any, cast

import pytest

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.meeting import Meeting, Steps
from tests.threads import LIMIT_S, start

STAGES = ("prepare", "together", "commit")
ERRORS = (RuntimeError("planted"), SystemExit("planted"))


@dataclasses.dataclass
class Note:
    """What became of the engines: their states by place."""

    stage: str
    place: int
    error: BaseException
    states: dict[int, str] = dataclasses.field(default_factory=dict)

    def fail(self, stage: str, place: int) -> None:
        if (stage, place) == (self.stage, self.place):
            raise self.error

    @property
    def steps(self) -> Steps:
        def prepare(core: Any, _: Any) -> str:
            self.fail("prepare", core)
            self.states[core] = "prepared"
            return f"of {core}"

        def together(_: Any, cores: Any, prepared: Any) -> list[str]:
            self.fail("together", self.place)
            assert [f"of {core}" for core in cores] == list(prepared)
            return [f"made {each}" for each in prepared]

        def commit(core: Any, _: Any, prepared: Any) -> int:
            assert prepared == f"made of {core}"
            self.fail("commit", core)
            self.states[core] = "committed"
            return core

        def rollback(core: Any, _: Any, prepared: Any, error: BaseException) -> None:
            assert error is not None
            assert (prepared is not None) == (core in self.states)
            self.states[core] = "rolled back"

        return Steps(prepare, together, commit, rollback, combine=list)


def hold(note: Note, count: int, refused: int | None = None) -> tuple[Future[Any], list[Any]]:
    """Has so many threads meet; the answer, and what each thread raised."""
    answer: Future[Any] = Future()
    meeting = Meeting(cmd.GetState(answer), note.steps, count)

    def attend(place: int) -> None:
        try:
            if place == refused:
                meeting.refuse(place, lambda: RuntimeError("it is closed"))
            else:
                meeting.attend(place, cast(EngineCore, place))
        finally:  # as an engine thread that ends
            meeting.refuse(place, lambda: RuntimeError("it came already"))

    calls = [start(lambda place=place: attend(place)) for place in range(count)]
    raised = [call.exception(LIMIT_S) for call in calls]
    answer.exception(LIMIT_S)
    return answer, raised


@pytest.mark.parametrize("count", [1, 2, 4])
class TestMeeting:
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
        for place in range(count):
            note = Note(stage, place, error)
            answer, raised = hold(note, count)
            assert answer.exception(0) is error
            others = [state for each, state in note.states.items() if each != place]
            assert len(others) == count - 1
            if stage == "commit":  # a bug: it ends engines that may differ now
                assert set(others) <= {"committed"}
                is_fatal = count > 1 or not isinstance(error, Exception)
                assert raised[place] is (error if is_fatal else None)
            else:
                assert note.states == dict.fromkeys(range(count), "rolled back")
                assert not any(raised)

    def test_an_engine_that_does_not_come(self, count):
        for place in range(count):
            note = Note("", 0, ERRORS[0])
            answer, raised = hold(note, count, refused=place)
            assert str(answer.exception(0)) == "it is closed"
            others = set(range(count)) - {place}
            assert note.states == dict.fromkeys(others, "rolled back")
            assert not any(raised)
