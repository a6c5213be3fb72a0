"""The table of a decode step's parts, end to end on tiny sizes."""

import json

import pytest

from benchmarks.hardware import step_parts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_parts_of_a_running_engine(tmp_path):
    step_parts.main(["--model", "tiny", "--quick", "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "step_parts_tiny.json").read_text())
    assert 2 <= data["num_rows"] <= 4
    measured = {part["part"]: part["measured_s"] for part in data["parts"]}
    assert list(measured) == ["projections", "attention", "logits", "sampling", "other", "host"]
    assert measured["projections"] > 0
