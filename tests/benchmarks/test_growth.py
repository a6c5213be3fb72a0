"""The points of the growth figures."""

import dataclasses

import pytest

from benchmarks.throughput import growth


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_waiting_requests_stand_behind_those_that_are_served(monkeypatch):
    states, proceed = [], growth.Engine.continue_generation

    def note_and_continue(engine):
        states.append(engine.get_internal_state())
        proceed(engine)

    monkeypatch.setattr(growth.Engine, "continue_generation", note_and_continue)
    load = growth.Load(vocab_size=1024, num_rows=2, num_waiting=40)
    assert len(growth.measure_point("tiny", load, 2)) == 2
    assert [state.waiting_queue_size for state in states] == [42] * 3
    # What the last run adds is the first one's over again; at most the next two have started.
    tokens = [state.counters.num_output_tokens for state in states]
    assert 2 * growth.OUTPUT_LEN <= tokens[2] - tokens[1] <= 4 * growth.OUTPUT_LEN


@pytest.mark.parametrize("name", growth.SERIES)
def test_one_size_varies_at_a_time(name):
    first, second = (dataclasses.asdict(growth.make_load(name, n, 1024)) for n in (3, 4))
    varying = {
        "batch": "num_rows",
        "context": "context",
        "vocabulary": "vocab_size",
        "waiting": "num_waiting",
    }
    assert [field for field in first if first[field] != second[field]] == [varying[name]]
