"""A group's prompt is computed once, unless somebody turns that off."""

from __future__ import annotations

import pytest

from tests.adapter.helpers import params_of, tokens_of

PROMPT = [5, 9, 11, 3, 8, 2, 77, 21, 4, 6, 10]
GROUP = [PROMPT] * 6


def counters_after(rollout, prompts):
    tokens = tokens_of(rollout, prompts, max_tokens_to_generate=4)
    rollout.engine.check_integrity()
    return tokens, rollout.engine.get_internal_state().counters


@pytest.mark.parametrize("config", [{}, {"rollout_sglang_jax_disable_radix_cache": False}])
def test_a_group_is_prefilled_once(make_rollout, config):
    tokens, counters = counters_after(make_rollout(config=config), GROUP)
    # All but the newest token of the prompt, once.
    assert counters.num_prefill_tokens == len(PROMPT) - 1
    assert counters.num_cached_tokens == 5 * (len(PROMPT) - 1)
    assert tokens == tokens[:1] * 6


@pytest.mark.parametrize(
    "arguments",
    [
        {"disable_radix_cache": True},
        {"config": {"rollout_sglang_jax_kwargs": {"disable_radix_cache": True}}},
    ],
)
def test_sharing_can_be_turned_off(make_rollout, arguments):
    tokens, counters = counters_after(make_rollout(**arguments), GROUP)
    assert counters.num_prefill_tokens == 6 * (len(PROMPT) - 1)
    assert counters.num_cached_tokens == 0
    assert tokens == counters_after(make_rollout(), GROUP)[0]


def test_new_weights_match_nothing_old(make_rollout, other_model):
    rollout, fresh = make_rollout(), make_rollout(other_model)
    counters_after(rollout, GROUP)
    rollout.update_params(params_of(other_model))
    tokens, counters = counters_after(rollout, GROUP)
    assert counters.num_prefill_tokens == 2 * (len(PROMPT) - 1)
    assert tokens == counters_after(fresh, GROUP)[0]
