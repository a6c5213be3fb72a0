"""The growth figures, end to end on tiny sizes."""

import json

import pytest

import growth
import plots


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_batch_sizes(tmp_path):
    growth.main(["--quick", "--series", "batch", "--output-dir", str(tmp_path)])
    (series,) = json.loads((tmp_path / "growth.json").read_text())["series"]
    assert [point["size"] for point in series["points"]["tiny"]] == [1, 2]
    assert "growth_batch.svg" in plots.write_page(tmp_path).read_text()


@pytest.mark.parametrize("name", ["batch", "context", "vocabulary"])
def test_one_size_varies_at_a_time(name):
    (series,) = (series for series in growth.FULL if series.name == name)
    loads = list(growth._loads(series, "tiny"))
    fields = {
        "batch": [load.num_rows for load in loads],
        "context": [load.context for load in loads],
        "vocabulary": [load.config.vocab_size for load in loads],
    }
    assert fields.pop(name) == list(series.sizes)
    assert all(len(set(values)) == 1 for values in fields.values())
