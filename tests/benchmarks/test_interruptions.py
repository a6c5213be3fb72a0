"""The report on interruptions, end to end on tiny sizes."""

import json

import pytest

import interruptions


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_pauses_and_cycles(tmp_path):
    interruptions.main(["--quick", "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "interruptions.json").read_text())
    assert [len(each["pauses_s"]) for each in data["latencies"]] == [3, 3]
    assert all(each["num_held"] >= 3 for each in data["idleness"])
    cycles = data["cycles"]
    assert cycles["num_whole"] + cycles["num_aborted"] == cycles["num_requests"] > 64
    assert cycles["num_after_update"] > 0
    assert cycles["num_programs"] == 0
    assert "| lost | 0 |" in (tmp_path / "interruptions.md").read_text()
