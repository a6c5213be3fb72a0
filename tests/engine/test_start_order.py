"""The order in which waiting requests start, and what is known of their lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgljax_engine.config import SCHEDULE_POLICIES, SchedulerConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.scheduler.lengths import AnswerLengths, expected_remaining
from sgljax_engine.scheduler.waiting import FirstCome, LongestFirst, WaitingQueue
from sgljax_engine.types import Request
from tests.engine.determinism_cases import MODEL, ask, differing, make_engine, requests
from tests.geometry import SMALL


def make_request(arrival: int, key: int = 0, *, num_tokens: int = 0, most: int = 1000) -> Request:
    """A request of the prompt `key`, with so many tokens so far."""
    return Request(
        rid=str(arrival),
        prompt_ids=[1],
        params=SamplingParams(max_new_tokens=most),
        seed=0,
        prompt_key=key,
        arrival=arrival,
        output_ids=[2] * num_tokens,
    )


def queue_of(*requests: Request) -> WaitingQueue:
    """A queue of requests that never ran."""
    waiting = WaitingQueue()
    for request in requests:
        waiting.append(request)
    return waiting


def lengths_of(**known: list[int]) -> AnswerLengths:
    """Lengths of prompts that are called p0, p1, ..."""
    lengths = AnswerLengths()
    for name, each in known.items():
        for length in each:
            lengths.add(int(name[1:]), length)
    return lengths


def starts(order, waiting, running=(), count=100, num_arrivals=None):
    """Arrival numbers in the order of starts."""
    if num_arrivals is None:
        num_arrivals = len(waiting) + len(running)
    return [r.arrival for r in order.first(waiting, running, num_arrivals, count)]


class TestLengths:
    def test_an_unknown_prompt_is_expected_to_be_like_all(self):
        lengths = lengths_of(p0=[100] * 3)
        assert lengths.expected(7) == pytest.approx(100)
        assert AnswerLengths().expected(7) == 0

    def test_answers_to_the_prompt_outweigh_the_mean_of_all(self):
        lengths = lengths_of(p0=[100], p1=[400] * 8)
        assert 300 < lengths.expected(1) < 400
        assert lengths.expected(0) < lengths.expected(1)

    def test_running_samples_say_how_long_it_is_at_least(self):
        lengths = lengths_of(p0=[100])
        assert lengths.expected(1, [10]) == lengths.expected(1)
        assert lengths.expected(1, [500]) == pytest.approx(300)

    def test_the_newest_sixteen_count(self):
        lengths = lengths_of(p0=[1] * 16 + [1000] * 16)
        assert lengths.expected(0) > 900

    def test_prompts_that_were_answered_long_ago_are_forgotten(self, monkeypatch):
        monkeypatch.setattr("sgljax_engine.scheduler.lengths._MAX_PROMPTS", 2)
        lengths = lengths_of(p0=[900], p1=[10], p2=[10])
        assert lengths.expected(0) == lengths.expected(99)
        assert lengths.expected(1) < lengths.expected(99)

    def test_what_remains_is_positive_and_within_the_limit(self):
        assert expected_remaining(100, 30, 1000) == 70
        assert expected_remaining(100, 200, 1000) == 100
        assert expected_remaining(100, 0, 20) == 20


class TestLongestFirst:
    def test_long_prompts_start_first_and_equal_ones_in_order_of_arrival(self):
        order = LongestFirst(lengths_of(p0=[10], p1=[300], p2=[100]), 100)
        waiting = queue_of(*(make_request(i, key) for i, key in enumerate([0, 1, 2, 2, 1, 0])))
        assert starts(order, waiting) == [1, 4, 2, 3, 0, 5]
        assert starts(FirstCome(), waiting) == [0, 1, 2, 3, 4, 5]
        assert starts(order, waiting, count=3) == [1, 4, 2]
        assert len(waiting) == 6

    def test_a_sibling_that_still_runs_makes_a_prompt_long(self):
        order = LongestFirst(lengths_of(p9=[50]), 100)
        running = [make_request(0, 0, num_tokens=20), make_request(1, 1, num_tokens=400)]
        waiting = queue_of(make_request(2, 0), make_request(3, 1))
        assert starts(order, waiting, running) == [3, 2]

    def test_one_sample_of_each_unknown_prompt_is_tried_first(self):
        order = LongestFirst(lengths_of(p0=[500]), 100)
        running = [make_request(0, 3, num_tokens=1)]
        waiting = queue_of(*(make_request(1 + i, key) for i, key in enumerate([0, 1, 1, 2, 2, 3])))
        assert starts(order, waiting, running) == [2, 4, 1, 3, 5, 6]

    def test_tokens_so_far_and_the_limit_count(self):
        order = LongestFirst(lengths_of(p0=[100]), 100)
        waiting = queue_of(
            make_request(0, num_tokens=90), make_request(1, most=20), make_request(2)
        )
        assert starts(order, waiting) == [2, 0, 1]  # 100, 45 and 20 tokens

    def test_retracted_requests_are_next(self):
        order = LongestFirst(lengths_of(p0=[1], p1=[300]), 100)
        waiting = queue_of(make_request(0, 1), make_request(1, 1))
        waiting.put_back(make_request(2, 0))
        assert starts(order, waiting) == [2, 0, 1]
        assert starts(order, waiting, count=1) == [2]

    @given(seed=st.integers(0, 2**16), max_later=st.integers(0, 20), rows=st.integers(1, 4))
    def test_nobody_starts_later_than_the_bound(self, seed, max_later, rows):
        """A start is counted when a request leaves the queue, whatever arrives meanwhile."""
        rng = random.Random(seed)
        order = LongestFirst(lengths_of(p0=[1], p1=[100], p2=[1000]), max_later)
        waiting, num_arrivals, num_started = WaitingQueue(), 0, 0
        for _ in range(60):
            for _ in range(rng.randint(0, 3)):
                waiting.append(make_request(num_arrivals, rng.randrange(3)))
                num_arrivals += 1
            for request in order.first(waiting, [], num_arrivals, rng.randint(0, rows)):
                waiting.remove(request)
                assert num_started - request.arrival <= max_later
                num_started += 1


def test_samples_are_the_same_with_either_policy(monkeypatch):
    """Bit for bit, though the second call starts other requests first."""
    first, jumps = LongestFirst.first, []

    def watched(*args):
        chosen = first(*args)
        jumps.append(chosen != FirstCome().first(*args[1:]))
        return chosen

    monkeypatch.setattr(LongestFirst, "first", watched)
    asked = [each for each in requests(40, MODEL.vocab_size) if not each.params.changes_logits][:20]
    answers = []
    for policy in SCHEDULE_POLICIES:
        with make_engine({**SMALL, "schedule_policy": policy}) as engine:
            answers.append([bits for _ in range(2) for bits in ask(engine, asked)])
            engine.check_integrity()
    assert any(jumps)
    assert not differing(*answers)


@pytest.mark.parametrize("value", ["longest", None, 3])
def test_an_unknown_policy_is_refused_by_name(value):
    with pytest.raises(InvalidConfigError, match=r"schedule_policy.*longest_first"):
        SchedulerConfig(schedule_policy=value)
