"""The report on sleep, wake and checkpoints, end to end on tiny sizes."""

import json

import pytest

from benchmarks.interruption import sleep_wake

QUICK_COMPILE = "that the benchmark runs and what it writes, not its numbers"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_cycles_and_saves(tmp_path):
    sleep_wake.main(["--quick", "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "sleep_wake.json").read_text())
    kept, given_up = data["cycles"]
    assert kept["device_bytes"] == given_up["device_bytes"]
    assert kept["host_bytes"] > given_up["host_bytes"]
    memory = data["memory"]
    assert max(memory["asleep"]) <= memory["base"]
    assert set(memory["woken"]) == {memory["awake"]}
    assert [each["with_kv"] for each in data["saves"]] == [False, True]
    assert "| given up |" in (tmp_path / "sleep_wake.md").read_text()
