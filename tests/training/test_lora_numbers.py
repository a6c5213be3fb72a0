"""The `lora` section: new pairs, and rewards without a reference model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.test_lora import LORA, actor_of, config_of
from tests.training.test_train import read_records, train
from tests.training.tiny import write_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix and orbax


@pytest.mark.slow
def test_new_pairs_change_nothing_and_follow_the_seed(tmp_path):
    config = config_of(tmp_path)
    a, b, other = actor_of(config), actor_of(config), actor_of(config_of(tmp_path, "seed=1"))
    pair = lambda model: model.layers[0].attn.q_proj  # noqa: E731
    np.testing.assert_array_equal(pair(a).w_lora_a[...], pair(b).w_lora_a[...])
    assert np.abs(np.asarray(pair(a).w_lora_a[...] - pair(other).w_lora_a[...])).max() > 0
    assert not np.asarray(pair(a).w_lora_b[...]).any()


@pytest.mark.soak
@pytest.mark.parametrize("offloads", [False, True])
def test_adapters_need_no_reference_model(tmp_path, offloads):
    rewards = []
    for mode in ("merged", "adapter"):
        path = write_config(
            tmp_path,
            actor_model_config__lora_config=LORA,
            sgljax_config__lora=mode,
            offload_to_cpu=offloads,
        )
        assert train(path, "num_batches=3", "grpo_config.beta=0.5", "seed=2") == 0
        rewards.append([step["reward"] for step in read_records(tmp_path)["steps"]])
    np.testing.assert_allclose(rewards[0], rewards[1], atol=0.05)
