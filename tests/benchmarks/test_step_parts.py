"""The table of a decode step's parts, end to end on tiny sizes."""

import json

import pytest

from benchmarks.hardware import step_parts
from benchmarks.lib import plots


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_parts_of_a_running_engine(tmp_path):
    step_parts.main(["--model", "tiny", "--quick", "--output-dir", str(tmp_path)])
    data = json.loads((tmp_path / "step_parts_tiny.json").read_text())
    assert 2 <= data["num_rows"] <= 4
    measured = {part["part"]: part["measured_s"] for part in data["parts"]}
    assert list(measured) == ["projections", "attention", "logits", "sampling", "other", "host"]
    assert measured["projections"] > 0
    assert "step_parts_tiny.svg" in plots.write_page(tmp_path).read_text()


def test_a_report_of_a_disturbed_run_says_so():
    def report(sampling_s):
        parts = {"projections": 0.03, "sampling": sampling_s, "other": -0.004}
        found = [step_parts.Part(part=p, measured_s=s, limit_s=0.0) for p, s in parts.items()]
        return "\n".join(step_parts._report(found))

    assert "(sampling): other work disturbed" in report(-0.005)
    assert "disturbed" not in report(-0.0002)
