"""The report on interruptions, end to end on tiny sizes."""

import json

import pytest

from benchmarks.interruption import interruptions

QUICK_COMPILE = "that the benchmark runs and what it writes, not its numbers"


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_pauses(tmp_path):
    interruptions.main(["--quick", "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "interruptions.json").read_text())
    latencies = [(each["mode"], each["max_dispatch_s"]) for each in data["latencies"]]
    assert latencies == [(m, s) for s in (1.0, 0.1) for m in ("retract", "in_place")]
    assert all(len(each["pauses_s"]) == 3 for each in data["latencies"])
    assert "| 0.1 s | in_place | 3 | ms |" in (tmp_path / "interruptions.md").read_text()
