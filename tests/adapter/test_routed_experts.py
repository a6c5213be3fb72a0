"""`return_routed_experts`, which RolloutConfig has after 0.1.7: what goes to Tunix's learners."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidConfigError
from tests import tunix_families
from tests.adapter.helpers import new_rollout, rollout_config, text_of

FAMILY = "qwen3_moe"
PROMPTS = [text_of(ids) for ids in tunix_families.make_prompts(FAMILY)[:2]]


@dataclasses.dataclass
class LaterConfig(RolloutConfig):
    """A RolloutConfig with the fields of Tunix's main."""

    return_routed_experts: bool = False
    rollout_vllm_free_kv_cache_during_weight_sync: bool = True
    rollout_vllm_overlap_postprocessing: bool = True


def later(**fields):
    return LaterConfig(**{**vars(rollout_config(max_tokens_to_generate=6)), **fields})


def rollout_of(**fields):
    model = tunix_families.make(FAMILY)
    return closing(new_rollout(model, rollout_config=later(**fields)))


def experts_of(rollout, config) -> Any:
    output = rollout.generate(PROMPTS, config)
    assert [len(row) for row in output.tokens] == [6, 6]
    return output.routed_experts


@pytest.mark.slow
def test_a_config_that_asks_for_experts():
    with rollout_of(return_routed_experts=True) as rollout:
        asked = experts_of(rollout, later(return_routed_experts=True))
        for row, prompt in zip(asked, PROMPTS, strict=True):
            assert row.shape == (len(rollout.encode(prompt, rollout_config())) + 6 - 1, 2, 3)
        assert experts_of(rollout, later()) is None
        again = experts_of(rollout, rollout_config(max_tokens_to_generate=6))  # 0.1.7 cannot ask
        for row, same in zip(asked, again, strict=True):
            np.testing.assert_array_equal(row, same)


@pytest.mark.slow
def test_the_training_config_decides():
    with rollout_of() as rollout:
        assert experts_of(rollout, later()) is None
        with pytest.raises(InvalidConfigError, match="routed_experts asks for enable_return"):
            rollout.generate(PROMPTS, later(return_routed_experts=True))


def test_a_model_without_experts_has_none(model):
    """As Tunix says of the field."""
    with closing(new_rollout(model, rollout_config=later(return_routed_experts=True))) as rollout:
        assert rollout.generate(["3 4"], later(return_routed_experts=True)).routed_experts is None


def test_new_fields_that_change_nothing_are_named(model):
    for field in LaterConfig.__annotations__.keys() - {"return_routed_experts"}:
        with pytest.raises(InvalidConfigError, match=f"{field}=False has no meaning"):
            new_rollout(model, rollout_config=later(**{field: False}), strict_config=True)
