"""The report on interruptions, end to end on tiny sizes."""

import json

import pytest

from benchmarks.interruption import interruptions

QUICK_COMPILE = "that the benchmark runs and what it writes, not its numbers"


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_pauses_and_cycles(tmp_path):
    interruptions.main(["--quick", "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "interruptions.json").read_text())
    latencies = [(each["mode"], each["max_dispatch_s"]) for each in data["latencies"]]
    assert latencies == [(m, s) for s in (1.0, 0.1) for m in ("retract", "in_place")]
    assert all(len(each["pauses_s"]) == 3 for each in data["latencies"])
    assert all(each["tokens_per_s"] > 0 for each in data["latencies"])
    assert all(each["num_held"] >= 3 for each in data["idleness"])
    cycles = data["cycles"]
    assert cycles["num_whole"] + cycles["num_aborted"] == cycles["num_requests"] > 64
    assert cycles["num_after_update"] > 0
    assert cycles["num_programs"] == 0
    assert "| lost | 0 |" in (tmp_path / "interruptions.md").read_text()


@pytest.mark.slow
def test_pauses_alone_write_no_report(tmp_path, capsys):
    interruptions.main(["--quick", "--only-pauses", "--pauses", "1", "--output-dir", str(tmp_path)])
    assert "| 0.1 s | in_place | 1 | ms |" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
