"""The arithmetic of the benchmark of deterministic sampling."""

from __future__ import annotations

import time

from benchmarks.throughput.determinism import Pairs, measure_pairs


def test_ratios_are_speeds_pair_by_pair():
    pairs = Pairs(name="x", default_s=[2.0, 3.0, 1.0], deterministic_s=[4.0, 3.0, 4.0])
    assert pairs.ratios == [0.5, 1.0, 0.25]
    assert pairs.row() == "| x | 2.00 | 4.00 | 0.500 | 0.250 to 1.000 | 3 |"


def test_modes_take_turns_after_an_untimed_run_of_each():
    calls = []
    runs = {
        mode: lambda mode=mode, wait_s=wait_s: (calls.append(mode), time.sleep(wait_s))
        for mode, wait_s in (("default", 0.001), ("deterministic", 0.02))
    }
    pairs = measure_pairs("x", runs, 2)
    first, second = "default", "deterministic"
    assert calls == [first, second, second, first, first, second]
    assert len(pairs.default_s) == len(pairs.deterministic_s) == 2
    assert all(ratio < 1 for ratio in pairs.ratios)
