"""A rollout on a fleet of servers, beside one in process."""

from __future__ import annotations

import numpy as np
import pytest

from tests import tunix_reference as ref
from tests.adapter.helpers import VOCAB_SIZE, new_rollout, rollout_config, text_of
from tests.fleet.parts import fleet_rollout, workers

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 7, 12, 12))
TEXTS = [text_of(PROMPTS[row]) for row in (0, 1, 1, 2, 3, 1)]
CONFIGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5, "return_logprobs": True},
    "filtered": {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "return_logprobs": True, "seed": 1},
    "ending": {"temperature": 1.3, "eos_tokens": list(range(40)), "seed": -7},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def fleet(model, store):
    with workers(model, store, 2) as made:
        yield made


@pytest.fixture(scope="module")
def remote(model, store, fleet):
    rollout = fleet_rollout(model, store, fleet)
    yield rollout
    rollout.close()


@pytest.fixture(scope="module")
def local(model):
    rollout = new_rollout(model)
    yield rollout
    rollout.close()


def check_equal(one, other):
    """Outputs of the same seeds, but for the versions and names of who sampled them."""
    assert one.text == other.text
    for name in ("tokens", "logprobs", "left_padded_prompt_tokens"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        for a, b in zip(() if first is None else first, second or (), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_samples_are_those_in_process(local, remote, kind):
    config = rollout_config(**CONFIGS[kind])
    for _ in range(2):  # the second call with a seed draws others
        one, other = (each.generate(TEXTS, config) for each in (local, remote))
        check_equal(one, other)
        assert {row.min() for row in other.weight_versions} == {remote.weight_version}
        assert set(other.replica_ids) <= {"worker-0", "worker-1"}
        assert one.replica_ids is None
