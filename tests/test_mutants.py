"""The table of deliberate faults fits the code; `python -m tests.mutants` runs them."""

from __future__ import annotations

from collections import Counter

from tests import mutants


def test_each_fault_can_be_made():
    assert mutants.table_problems() == []


def test_every_room_has_its_share():
    rooms = Counter(mutant.room for mutant in mutants.MUTANTS)
    assert set(rooms) == set(mutants.ROOMS)
    assert len(mutants.MUTANTS) == 40
    assert min(rooms.values()) >= 4
