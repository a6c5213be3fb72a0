"""The engine computes what MaxText does, in every family and form; see `agreement`."""

from __future__ import annotations

import pytest
from flax import nnx

from tests.maxtext import actors, agreement
from tests.recipes.models import make_tokenizer
from tunix_sgljax import SglJaxRollout

pytestmark = pytest.mark.filterwarnings("ignore")

# Half of them have everything once: scanned layers, flat ones, tied heads and others.
CASES = [
    pytest.param(case, marks=() if case.is_scanned == case.is_tied else pytest.mark.slow)
    for case in agreement.CASES
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probs_and_greedy_tokens(case):
    exact, rounded = agreement.measure(case)
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")
    assert exact.num_equal == exact.num_greedy, exact
    # A recurrent state amplifies rounding: MaxText is as far from itself.
    limit = 2e-4 if case.family.startswith(("qwen3-next", "qwen3.5")) else 1e-4
    assert exact.difference <= limit, exact
    # Rounding decides near ties in bfloat16, of experts too; the engine's is no coarser. In a small
    # mixture of experts one token on the border is a quarter of the mean.
    assert rounded.error <= 1.5 * rounded.maxtext_error, rounded
    assert rounded.num_equal >= rounded.num_greedy / 2, rounded


def test_an_adapter_is_an_actor_of_the_plain_rollout():
    """Its config is that of the model inside, and its own mapping for vLLM is not asked."""
    actor = agreement.make_actor(agreement.CASES[0], "float32")
    assert actor.model.config is None
    rollout = SglJaxRollout(
        rollout_actor=actor.model,
        tokenizer=make_tokenizer(names_pad=True),
        rollout_config=actors.rollout_config(),
    )
    state = nnx.state(actor.model, nnx.Param)
    rollout.update_params(state)
    assert rollout.find_differing_weights(state) == []
    assert rollout.dtype == "float32"
    rollout.close()
