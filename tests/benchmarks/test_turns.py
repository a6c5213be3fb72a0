"""Runs in turns and the table of their speeds."""

from __future__ import annotations

from benchmarks.lib.turns import speed_table, speeds, take_turns


def test_speeds_are_those_over_the_base_turn_by_turn():
    seconds = {"default": [2.0, 3.0, 1.0], "other": [4.0, 3.0, 4.0]}
    assert speeds(seconds, "default") == {"default": [1, 1, 1], "other": [0.5, 1.0, 0.25]}
    row = speed_table({"x": seconds}, "default")[-1]
    assert row == "| x | other | 4.0000 | 0.500 | 0.250 to 1.000 | 3 |"


def test_runs_take_turns_after_an_untimed_one_of_each():
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = take_turns(runs, 2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [len(each) for each in seconds.values()] == [2, 2]
