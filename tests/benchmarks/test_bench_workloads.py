"""The benchmarks' request lists are what their reports say; peers must agree on answers."""

import pytest

from benchmarks.lib.measure import count_agreed
from benchmarks.lib.vanilla import VanillaPeer
from benchmarks.lib.workloads import WORKLOADS, make_workload

VOCAB_SIZE = 4096


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_deterministic_and_never_hold_the_pad_token(name, is_quick):
    workload = make_workload(name, VOCAB_SIZE, is_quick=is_quick)
    assert workload == make_workload(name, VOCAB_SIZE, is_quick=is_quick)
    assert workload.name == name
    for prompt in workload.prompts:
        assert min(prompt) >= 1
        assert max(prompt) < VOCAB_SIZE
    assert len(workload.requests) == len(workload.output_lengths)
    assert workload.useful_tokens == sum(workload.output_lengths)
    assert workload.num_rows <= len(workload.requests)


def test_sizes():
    longtail = make_workload("rl_longtail", VOCAB_SIZE)
    assert (len(longtail.prompts), longtail.num_samples, longtail.num_rows) == (16, 8, 128)
    assert {64 <= len(prompt) <= 128 for prompt in longtail.prompts} == {True}
    assert min(longtail.output_lengths) == 16
    assert longtail.max_output_len == 256
    assert sorted(longtail.output_lengths)[64] in range(50, 80)
    assert longtail.requests[0] == longtail.requests[7] != longtail.requests[8]

    uniform = make_workload("rl_uniform", VOCAB_SIZE)
    assert set(uniform.output_lengths) == {128}
    assert (len(uniform.output_lengths), uniform.num_rows) == (128, 64)

    group, single = (make_workload(n, VOCAB_SIZE) for n in ("long_prompt", "long_prompt_single"))
    assert group.prompts == single.prompts
    assert (group.max_prompt_len, group.max_output_len, group.num_samples) == (2048, 64, 8)
    assert single.max_model_len == 2112

    stream = make_workload("single_stream", VOCAB_SIZE)
    assert (stream.max_prompt_len, stream.output_lengths) == (128, (128,))


def test_unknown_names_and_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match=r"workload must be one of .* got 'rl'"):
        make_workload("rl", VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"must hold 1 entries .* got 2"):
        make_workload("single_stream", VOCAB_SIZE).with_lengths([3, 4])


def test_different_outputs_stop_the_comparison():
    workload = make_workload("single_stream", 64, is_quick=True)

    class Constant(VanillaPeer):
        def __init__(self, token):
            self.name, self.token = "constant", token

        def generate(self, workload, *, is_greedy=False) -> list[list[int]]:
            return [[self.token] * length for length in workload.output_lengths]

    assert count_agreed(Constant(1), Constant(1), workload) == (8, 8)
    with pytest.raises(AssertionError, match="first greedy tokens"):
        count_agreed(Constant(1), Constant(2), workload)
