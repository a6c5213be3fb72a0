"""The waiting queue against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.scheduler.waiting import WaitingQueue
from sgljax_engine.types import Request


def make_request(arrival, key=0, num_output=0):
    request = Request(
        rid=str(arrival), prompt_ids=[1], params=SamplingParams(), seed=0, prompt_key=key
    )
    request.arrival = arrival
    request.output_ids.extend([7] * num_output)
    return request


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "start", "put_back", "remove"]), st.integers(0, 99))
    )
)
def test_any_order_of_changes(changes):
    queue, expected, running, num_arrivals = WaitingQueue(), [], [], 0
    for change, draw in changes:
        if change == "append":
            request = make_request(num_arrivals, key=draw % 3)
            num_arrivals += 1
            queue.append(request)
            expected.append(request)
        elif change == "start" and expected:
            request = expected.pop(0)
            assert queue.oldest is request
            queue.remove(request)
            running.append(request)
        elif change == "put_back" and running:
            request = running.pop(draw % len(running))
            request.output_ids.extend([7] * (draw % 2))
            queue.put_back(request)
            expected = sorted([*expected, request], key=lambda r: r.arrival)
        elif change == "remove" and expected:
            queue.remove(expected.pop(draw % len(expected)))
        assert list(queue) == expected
        assert len(queue) == len(expected)
        for key in range(3):
            others = [r for r in expected if r.prompt_key == key and not r.output_ids]
            assert queue.has_same_prompt(make_request(-1, key)) == bool(others)


def test_what_is_put_back_is_in_order_of_arrival():
    queue, requests = WaitingQueue(), [make_request(arrival, num_output=1) for arrival in range(4)]
    for arrival in (2, 0, 3, 1):
        queue.put_back(requests[arrival])
    assert list(queue.returned) == list(queue) == requests


def test_removing_what_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="not in list"):
        WaitingQueue().remove(make_request(0))


def test_emptying_a_long_queue_takes_linear_time():
    """20,000 requests, from the front and from the back; quadratic work would take minutes."""
    queue = WaitingQueue()
    requests = [make_request(i, key=i) for i in range(20_000)]
    for request in requests:
        queue.append(request)
    for request in requests[:-10_000]:
        assert queue.oldest is request
        queue.remove(request)
    for request in reversed(requests[-10_000:]):
        queue.remove(request)
    assert not queue
