"""Requests become device rows by length, and get back what is theirs."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.runner.batches.batch import build_decode_batch, decode_order
from sgljax_engine.runner.programs.decode import DecodeOutput
from sgljax_engine.runner.results import PendingDecode
from sgljax_engine.sampling.logprobs import ExtraLogprobs
from sgljax_engine.sampling_params import LogprobOptions, SamplingParams
from sgljax_engine.types import TopLogprobs
from tests import inside
from tests.engine.interrupts import make_engine
from tests.engine.models import make_requests
from tests.geometry import other

TWO_SIZES = other("programs of four rows and of eight", batch_buckets=(4, 8))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((5, 9, 2), [1, 0, 2]),
        ((4, 4, 4), [0, 1, 2]),
        ((1, 7, 1, 7), [1, 3, 0, 2]),
        ((3,), [0]),
    ],
)
def test_longest_rows_first_and_equal_ones_as_they_come(lengths, expected):
    assert decode_order(make_requests(*lengths), 16) == (expected, False)


def test_output_counts_as_length():
    requests = make_requests(5, 4)
    requests[1].output_ids.extend([0, 0])
    assert decode_order(requests, 16) == ([1, 0], False)


class TestGroups:
    """Rows of requests by their prompt; its pages are those before the last token's."""

    def requests(self, prompts, outputs, num_pages=8):
        """One for each prompt (its number) and count of output tokens."""
        requests = make_requests(*[16 * num_pages + 1] * len(prompts))
        own = 1000
        for request, prompt, count in zip(requests, prompts, outputs, strict=True):
            request.pages.extend(range(100 * prompt, 100 * prompt + num_pages))
            request.pages.append(own := own + 1)
            request.output_ids.extend([0] * count)
        return requests

    def test_samples_of_a_prompt_are_neighbours(self):
        requests = self.requests([1, 2] * 5 + [3], [1] * 8 + [1, 3, 9])
        # Prompt 2 has the longest row of those that share pages; nobody has prompt 3's.
        assert decode_order(requests, 16) == ([9, 1, 3, 5, 7, 0, 2, 4, 6, 8, 10], True)

    def test_prompts_that_begin_alike_are_neighbours_too(self):
        requests = self.requests([1, 2, 3, 1, 2, 3], [1] * 6, num_pages=16)
        for i in (2, 5):  # prompt 3 has the first half of prompt 1
            requests[i].pages[:8] = requests[0].pages[:8]
        assert decode_order(requests, 16) == ([0, 3, 2, 5, 1, 4], True)

    def test_random_trees_of_prompts(self):
        """At every level of the tree rows with the same prefix are neighbours."""
        rng = np.random.default_rng(0)
        for _ in range(50):
            requests = make_requests(*[300] * 24)
            ids: dict[tuple[int, ...], int] = {}
            for row, request in enumerate(requests):
                path = tuple(rng.integers(0, 3, 3).tolist())
                for page in range(18):
                    prefix = path[: 1 + (page >= 8) + (page >= 16)]
                    request.pages.append(ids.setdefault((page, *prefix), len(ids)))
                request.pages.append(10_000 + row)
            order, _ = decode_order(requests, 16)
            assert sorted(order) == list(range(24))
            for num_pages in (8, 16, 18):
                seen = [tuple(requests[i].pages[:num_pages]) for i in order]
                changes = sum(a != b for a, b in itertools.pairwise(seen))
                assert changes == len(set(seen)) - 1

    def test_short_prompts_go_by_length(self):
        requests = self.requests([1, 2] * 4, [1, 2, 3, 4, 5, 6, 7, 8], num_pages=7)
        assert decode_order(requests, 16) == ([7, 6, 5, 4, 3, 2, 1, 0], False)


def test_rows_keep_their_pages_and_limits():
    requests = make_requests(3, 9, 6)
    for i, request in enumerate(requests):
        request.pages.extend(range(10 * i, 10 * i + i + 1))
        request.output_ids.append(70 + i)
    batch = build_decode_batch(requests, [2, 128 - 1, 1], buckets=[4], table_width=3)
    np.testing.assert_array_equal(batch.input_ids, [70, 71, 72, 0])
    np.testing.assert_array_equal(batch.positions, [3, 9, 6, 0])
    np.testing.assert_array_equal(
        batch.page_table, [[0, 0, 0], [10, 11, 0], [20, 21, 22], [0, 0, 0]]
    )
    np.testing.assert_array_equal(batch.step_limits, [2, 127, 1, 0])
    np.testing.assert_array_equal(batch.ends_at_limit, [False, True, False, False])


def test_each_request_gets_the_results_of_its_row():
    """Three requests on a batch of four rows, as the device left it after at most three steps."""
    requests = make_requests(3, 9, 6)
    requests[2].logprob_options = LogprobOptions(enabled=True, top_num=1, token_ids=(4,))
    order, _ = decode_order(requests, 16)
    assert order == [1, 2, 0]
    steps = jnp.arange(20, dtype=jnp.int32).reshape(5, 4)
    floats = steps.astype(jnp.float32)
    extras = ExtraLogprobs(floats[..., None] / 2, steps[..., None] * 2, floats[..., None] / 4)
    result = DecodeOutput(
        token_ids=steps,
        logprobs=-floats,
        scaled_logprobs=-2 * floats,
        processed_logprobs=-3 * floats,
        num_tokens=jnp.array([3, 2, 1, 0], jnp.int32),
        stopped=jnp.array([False, True, False, False]),
        extras=extras,
    )
    first, second, third = PendingDecode(result, [requests[i] for i in order], order).wait()
    assert second.token_ids == [0, 4, 8]
    assert third.token_ids == [1, 5]
    assert first.token_ids == [2]
    assert third.logprobs == [-1.0, -5.0]
    assert third.scaled_logprobs == [-2.0, -10.0]
    assert third.processed_logprobs == [-3.0, -15.0]
    assert [first.stopped, second.stopped, third.stopped] == [False, False, True]
    assert list(third.extra_logprobs) == [
        TopLogprobs([0.5], [2], [0.25]),
        TopLogprobs([2.5], [10], [1.25]),
    ]
    assert not first.extra_logprobs
    assert not second.extra_logprobs


@pytest.mark.parametrize(
    ("lengths", "dispatches"),
    [
        ([2, 2, 2, 2, 4, 4, 4, 4], [(8, 2), (4, 2)]),  # rows and steps
        ([1, 2, 3, 3, 4, 4, 4, 4], [(8, 3), (4, 1)]),  # four must finish before four rows serve
        ([2, 2, 2, 4, 4, 4, 4, 4], [(8, 4)]),
    ],
)
def test_a_dispatch_ends_when_the_rows_left_fit_a_smaller_program(lengths, dispatches):
    found = []
    with make_engine(**TWO_SIZES) as engine:
        runner = inside.runner(engine)
        decode = runner.decode

        def spied(output):
            pending = decode(output)
            counts = np.asarray(pending.result.num_tokens)
            found.append((len(counts), int(counts.max())))
            return pending

        runner.decode = spied
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
        engine.generate_requests([[1, 2, 3]] * len(lengths), params)
    assert found == dispatches
