"""The growth figures, end to end on tiny sizes."""

import json

import pytest

from benchmarks.lib import plots
from benchmarks.throughput import growth
from tunix_sgljax.bench.shapes import MODELS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_batch_sizes(tmp_path):
    growth.main(["--quick", "--series", "batch", "--output-dir", str(tmp_path)])
    (series,) = json.loads((tmp_path / "growth.json").read_text())["series"]
    assert [point["size"] for point in series["points"]["tiny"]] == [1, 2]
    assert "growth_batch.svg" in plots.write_page(tmp_path).read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_waiting_requests_stand_behind_those_that_are_served(monkeypatch):
    states, proceed = [], growth.Engine.continue_generation

    def note_and_continue(engine):
        states.append(engine.get_internal_state())
        proceed(engine)

    monkeypatch.setattr(growth.Engine, "continue_generation", note_and_continue)
    load = growth._Load(size=40, config=MODELS["tiny"].config, num_rows=2, num_waiting=40)
    point = growth.measure_point(load, 2)
    assert [state.waiting_queue_size for state in states] == [42] * 3
    assert len(point.runs_s) == 2
    # What the last run adds is the first one's over again; at most the next two have started.
    tokens = [state.counters.num_output_tokens for state in states]
    assert 2 * growth.OUTPUT_LEN <= tokens[2] - tokens[1] <= 4 * growth.OUTPUT_LEN


@pytest.mark.parametrize("name", ["batch", "context", "vocabulary", "waiting"])
def test_one_size_varies_at_a_time(name):
    (series,) = (series for series in growth.FULL if series.name == name)
    loads = list(growth._loads(series, "tiny"))
    fields = {
        "batch": [load.num_rows for load in loads],
        "context": [load.context for load in loads],
        "vocabulary": [load.config.vocab_size for load in loads],
        "waiting": [load.num_waiting for load in loads],
    }
    assert fields.pop(name) == list(series.sizes)
    assert all(len(set(values)) == 1 for values in fields.values())
