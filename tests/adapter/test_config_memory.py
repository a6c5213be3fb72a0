"""A config that was read once is read again exactly where a field has changed."""

from __future__ import annotations

import numpy as np
import pytest

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tests.adapter.helpers import rollout_config
from tunix_sgljax.rollout_config.memory import ConfigMemory


class Reads:
    """Counts how often a config is read."""

    def __init__(self):
        self.memory, self.num = ConfigMemory(), 0

    def get(self, config, **more):
        return self.memory.get(config, self.read, **more)

    def read(self):
        self.num += 1
        return self.num


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "temperature", 0.5),
        lambda config: config.eos_tokens.append(3),
        lambda config: config.rollout_vllm_kwargs.update(block_size=4),
        lambda config: config.rollout_vllm_kwargs["nested"].append(2),
    ],
)
def test_a_changed_field_is_seen(change):
    reads = Reads()
    config = rollout_config(rollout_vllm_kwargs={"block_size": 8, "nested": [1]})
    assert reads.get(config) == 1
    change(config)
    assert reads.get(config) == 2
    assert reads.get(config) == 2


def test_what_may_change_unseen_is_read_each_time():
    reads = Reads()
    config = rollout_config(eos_tokens=np.array([3, 4]))
    assert [reads.get(config), reads.get(config)] == [1, 2]
    assert reads.get(rollout_config(eos_tokens=[3, 4])) == 3
    assert reads.get(config) == 4  # compared with the list


def test_a_rollout_sees_changes_between_calls(rollout):
    config = rollout_config(max_tokens_to_generate=4)
    (first,) = rollout.generate(["5 6 7"], config).tokens
    config.max_tokens_to_generate = 2
    (second,) = rollout.generate(["5 6 7"], config).tokens
    assert second.tolist() == first[:2].tolist()
    assert config.eos_tokens is not None
    config.eos_tokens.append(int(first[0]))
    (third,) = rollout.generate(["5 6 7"], config).tokens
    assert third.tolist() == first[:1].tolist()
    config.max_tokens_to_generate = 0
    with pytest.raises(InvalidRequestError, match="max_tokens_to_generate"):
        rollout.generate(["5 6 7"], config)
    config.max_tokens_to_generate = 2
    config.rollout_vllm_kwargs["max_model_len"] = 77  # no engine
    with pytest.raises(InvalidConfigError, match="cannot change after construction"):
        rollout.generate(["5 6 7"], config)
