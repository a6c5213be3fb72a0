"""Trainings that are killed again and again: each row is trained on once, no noise comes twice."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter.trainings_to_kill import (
    BATCH_SIZE,
    NUM_GENERATIONS,
    NUM_ROWS,
    PARTS,
)
from tests.process.zygotes import Zygote

OVER_SAMPLING = ("carry", "abort", "drop")
AGENTIC = ("agentic", "agentic_tail")
PLAIN = ("plain", "lora", "ppo", "vanilla")
"""With `vanilla` it is all Tunix's own: what its learner does when it is killed and resumed."""

KINDS = (*OVER_SAMPLING, *AGENTIC, *PLAIN)
OTHER_PARTS = [name for name in PARTS if name != "agents"]

LONG = 6
"""Tokens of a completion that no other noise would give."""

NUM_INTERRUPTS = 7

TO_THE_END: dict[str, Any] = {"num_calls": -1, "delay_s": 0.0, "max_steps": None}
"""Nobody kills or stops the process."""

QUICK_COMPILE = "which rows are sampled, and with which noise"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote("tests.adapter.trainings_to_kill")
    yield made
    made.close()


@dataclasses.dataclass
class Start:
    """What the journal says of one process: where it started, its calls, and its end, if any."""

    starts: int
    step: int
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ends: dict[str, int] | None = None


def read_journal(path: Path) -> list[Start]:
    starts: list[Start] = []
    for line in path.read_text().splitlines():
        facts = json.loads(line)
        if "starts" in facts:
            starts.append(Start(**facts))
        elif "ends" in facts:
            starts[-1].ends = facts
        else:
            starts[-1].calls.append(facts)
    return starts


def surviving(starts: list[Start]) -> list[dict[str, Any]]:
    """Calls whose update is in the weights of the next start, and so in the last ones."""
    ends = [start.starts for start in starts[1:]] + [10**9]
    return [
        call
        for start, end in zip(starts, ends, strict=True)
        for call in start.calls
        if call["update"] < end
    ]


class Training:
    """A training of a kind, drawn by chance, that is killed until it is through."""

    def __init__(self, zygote: Zygote, folder: Path, kind: str, chance: random.Random) -> None:
        self._zygote, self._folder, self._chance = zygote, folder, chance
        self.kind = kind
        folder.mkdir()
        self.case = {
            "kind": kind,
            "checkpoints": str(folder / "checkpoints"),
            "parts": "agents"
            if kind in AGENTIC
            else chance.choice(["whole", "micro", "calls", "updates"]),
            # Tunix's own learner skips rows of a resumed run if it trains on each more than once.
            "iterations": chance.choice([1, 1, 2]) if kind not in PLAIN else 1,
            "seed": chance.choice(["engine", "config"]),
            "save_every": chance.choice([1, 1, 2, 3]),
        }
        self.updates_per_batch = BATCH_SIZE // PARTS[self.case["parts"]].get(
            "mini_batch_size", BATCH_SIZE
        )
        self.num_kills = 0

    def start(self, journal: Path, **ending: Any) -> bool:
        """Runs a process; returns whether it came to the end of the data."""
        found = self._zygote.play(self._folder, **self.case, journal=str(journal), **ending)
        self.num_kills += found["code"] == -9
        assert found["code"] in (0, -9), found
        return found["code"] == 0 and ending["max_steps"] is None

    def interrupt(self, num_times: int) -> list[Start]:
        """Kills it, or sometimes stops it in order, and lets it come to its end at last."""
        journal, chance = self._folder / "journal", self._chance
        for _ in range(num_times):
            ending = dict(TO_THE_END)
            if chance.random() < 0.9:
                ending["num_calls"] = chance.choice((0, 1, 1, 2, 2, 3, 4))
                ending["delay_s"] = chance.uniform(0, 0.5)
            else:
                ending["max_steps"] = chance.randrange(1, 6)
            if self.start(journal, **ending):
                return read_journal(journal)
        self.start(journal, **TO_THE_END)
        return read_journal(journal)

    def run_whole(self, folder: Path) -> list[Start]:
        """The same training, never killed."""
        folder.mkdir()
        self.case |= {"checkpoints": str(folder / "checkpoints")}
        self.start(folder / "journal", **TO_THE_END)
        return read_journal(folder / "journal")

    def check(self, starts: list[Start]) -> None:
        """What must hold however often it was killed."""
        case = self.case
        calls = surviving(starts)
        rows = [row for call in calls for row in self._rows(call)]
        assert len(set(rows)) == len(rows), (case, "trained twice", starts)
        if self.kind == "drop":
            assert len(rows) % BATCH_SIZE == 0
            assert BATCH_SIZE <= len(rows) <= NUM_ROWS
        elif self.kind in AGENTIC:
            # A checkpoint within a step leaves a smaller last batch, which Tunix's agents skip.
            assert NUM_ROWS - BATCH_SIZE < len(rows) <= NUM_ROWS, (case, starts)
        else:
            assert sorted(rows) == list(range(NUM_ROWS)), (case, starts)
        last = starts[-1].ends
        assert last is not None
        num_updates = len(rows) * self.updates_per_batch * case["iterations"] // BATCH_SIZE
        # One that dies between two updates with the same rows goes on with the next rows.
        num_lost = (case["iterations"] - 1) * (len(starts) - 1)
        assert num_updates - num_lost <= last["ends"] <= num_updates, (case, starts)
        if num_updates * BATCH_SIZE == len(rows):  # an update a step
            assert [start.step for start in starts] == [start.starts for start in starts]
        texts = [text for call in calls for text in call["texts"] if len(text.split()) >= LONG]
        if self.kind != "vanilla":
            assert len(set(texts)) == len(texts), (case, "noise came twice", starts)

    def check_equals(self, whole: list[Start], starts: list[Start]) -> None:
        """It samples what a training does that is never killed, with the same seed."""
        key = self.kind == "vanilla"
        wanted, got = (
            [(call["update"], call["rows"], key or call["texts"]) for call in surviving(each)]
            for each in (whole, starts)
        )
        assert got == wanted, (self.case, starts)

    def _rows(self, call: dict[str, Any]) -> list[int]:
        return call["rows"][:: 1 if self.kind == "ppo" else NUM_GENERATIONS]


@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        pytest.param("carry", 2, marks=pytest.mark.slow),
        *(
            pytest.param(kind, 45, marks=pytest.mark.soak)
            for kind in (*OVER_SAMPLING, *AGENTIC, *PLAIN)
        ),
    ],
)
def test_killed_trainings(zygote, tmp_path, kind, num_kills):
    chance = random.Random(f"{kind} {num_kills}")
    whole: dict[str, list[Start]] = {}
    num_killed = 0
    while num_killed < num_kills:
        training = Training(zygote, tmp_path / str(num_killed), kind, chance)
        starts = training.interrupt(min(num_kills, NUM_INTERRUPTS))
        training.check(starts)
        if kind in PLAIN:
            key = f"{training.case['parts']} {training.case['seed']}"
            if key not in whole:
                whole[key] = training.run_whole(tmp_path / key)
            training.check_equals(whole[key], starts)
        num_killed += training.num_kills
