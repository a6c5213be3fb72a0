"""Decode rows that stay as they are from one dispatch to the next, and those that must not."""

from __future__ import annotations

from unittest import mock

import pytest

from sgljax_engine import SamplingParams
from sgljax_engine.runner.batches.batch import build_decode_batch
from sgljax_engine.runner.kv.contiguous_slots import ContiguousSlots
from tests import inside
from tests.engine.interrupts import make_engine, results, start_all, tokens_of, wait_until
from tests.engine.models import make_requests, random_prompts, spread_weights
from tests.geometry import SMALL

PARAMS = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = random_prompts(7, 3, 70)


class TestSlots:
    """Rows of 64 keys a chunk."""

    def place(self, kept, requests, limits=None, *, size=4, num_steps=8):
        for request in requests:
            request.output_ids.append(0)
        limits = limits or [num_steps] * len(requests)
        batch = build_decode_batch(requests, limits, buckets=[size], table_width=3)
        return kept.place(requests, batch, num_steps)

    def test_same_requests_copy_only_what_is_new(self):
        kept, requests = ContiguousSlots(), make_requests(60, 10)
        found = [self.place(kept, requests) for _ in range(3)]
        assert found == [0, 2, 2]  # up to token 68, which is in the second chunk

    def test_few_steps_end_in_the_first_chunk(self):
        kept, requests = ContiguousSlots(), make_requests(60, 10)
        assert [self.place(kept, requests, num_steps=4) for _ in range(3)] == [0, 1, 2]

    @pytest.mark.parametrize("order", [[1, 0], [0], [0, 1, 2], [1, 2], []])
    def test_others_copy_everything(self, order):
        kept, requests = ContiguousSlots(), make_requests(60, 10, 5)
        self.place(kept, requests[:2])
        assert self.place(kept, [requests[i] for i in order]) == 0

    def test_another_number_of_rows_copies_everything(self):
        kept, requests = ContiguousSlots(), make_requests(60, 10)
        self.place(kept, requests)
        assert self.place(kept, requests, size=8) == 0

    def test_what_changed_is_copied(self):
        kept, requests = ContiguousSlots(), make_requests(60, 10, 5)
        self.place(kept, requests[:2])
        kept.changed(requests[2:])
        assert self.place(kept, requests[:2]) == 2
        kept.changed(requests[1:])
        assert self.place(kept, requests[:2]) == 0
        kept.forget()
        assert self.place(kept, requests[:2]) == 0

    def test_a_row_without_a_step_was_not_copied(self):
        kept, requests = ContiguousSlots(), make_requests(60, 10)
        self.place(kept, requests, [8, 0])
        assert self.place(kept, requests) == 0


@pytest.fixture(scope="module")
def engine():
    with make_engine(**SMALL, attention_backend="xla_rows") as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine):
    return tokens_of(engine.generate_requests(PROMPTS, PARAMS))


def recorded(engine):
    """Collects `num_ready` of all decode dispatches, and None for each prefill."""
    programs = inside.runner(engine).programs
    found, original = [], programs.run

    def run(call, state):
        if call.name == "decode":
            found.append(int(call.args[0].num_ready))
        elif call.name == "prefill":
            found.append(None)
        return original(call, state)

    return found, mock.patch.object(programs, "run", run)


@pytest.mark.soak
def test_an_engine_copies_rows_once(engine, expected):
    """All of a batch runs to its end together; once no request joins, only new keys are copied."""
    found, recording = recorded(engine)
    engine.flush_cache()
    with recording:
        outputs = engine.generate_requests(PROMPTS, PARAMS)
    assert tokens_of(outputs) == expected
    first, *others = found[len(found) - found[::-1].index(None) :]
    assert first == 0
    assert len(others) > 2
    assert 0 not in others


@pytest.mark.soak
@pytest.mark.parametrize("interrupt", ["retract", "in_place", "update", "sleep", "release"])
def test_what_interrupts_the_pages_changes_no_token(engine, expected, interrupt):
    engine.flush_cache()
    calls = start_all(engine, PROMPTS, PARAMS)
    before = engine.get_internal_state().counters.num_output_tokens
    wait_until(engine, lambda state: state.counters.num_output_tokens > before + 8)
    found, recording = recorded(engine)
    with recording:
        if interrupt == "update":
            engine.update_weights(spread_weights(), mode="in_place")
        elif interrupt == "sleep":
            engine.sleep(preserve_state=True)
            engine.wake_up()
        else:
            engine.pause_generation("in_place" if interrupt == "in_place" else "retract")
            if interrupt == "release":
                engine.release_kv_cache()
            engine.continue_generation()
        assert tokens_of(results(calls)) == expected
    if interrupt != "in_place":
        assert 0 in found
