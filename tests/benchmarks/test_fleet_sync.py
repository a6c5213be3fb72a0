"""The benchmark of weight versions, on tiny sizes."""

import json

import pytest

from benchmarks.throughput import fleet_sync


@pytest.mark.slow
def test_versions_through_a_store(tmp_path):
    fleet_sync.main(["--quick", "--pairs", "1", "--output-dir", str(tmp_path)])
    runs = json.loads((tmp_path / "fleet_sync.json").read_text())["runs"]
    assert [each["changed"] for each in runs] == ["1%", "3%", "100%", "by a step of Adam",
                                                  "1%", "3%", "100%"]  # fmt: skip
    for each in runs:
        last = each["versions"][-1]
        assert last["is_base"] == (each["changed"] == "100%")
        assert last["is_base"] or last["num_bytes"] < last["whole_bytes"] / 5
