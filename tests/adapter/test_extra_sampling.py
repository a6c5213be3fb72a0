"""Sampling fields that RolloutConfig does not have, and the choice of log-probs."""

from __future__ import annotations

import numpy as np
import pytest

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tests import tunix_reference as ref
from tests.adapter.helpers import max_difference, rollout_config, text_of, tokens_of

PROMPTS = [[5, 9, 11], [3, 8, 2, 77]]


def sampled(rollout, **config):
    fields = {"temperature": 0.7, "seed": 3, "return_logprobs": True, **config}
    return rollout.generate([text_of(ids) for ids in PROMPTS], rollout_config(**fields))


def test_logprobs_modes(make_rollout, model):
    """Three views of the same tokens; the trainer's own numbers check two of them."""
    outputs = {
        mode: sampled(make_rollout(logprobs_mode=mode), top_k=5)
        for mode in ("trainer_logprobs", "processed_logprobs", "raw_logprobs")
    }
    tokens = outputs["trainer_logprobs"].tokens
    for output in outputs.values():
        for row, same in zip(output.tokens, tokens, strict=True):
            np.testing.assert_array_equal(row, same)
    for mode, temperature in (("trainer_logprobs", 0.7), ("raw_logprobs", 1.0)):
        expected = ref.trainer_logps(model, PROMPTS, tokens, temperature=temperature)
        assert max_difference(outputs[mode].logprobs, expected) < 1e-4
    for processed, trainer in zip(
        outputs["processed_logprobs"].logprobs, outputs["trainer_logprobs"].logprobs, strict=True
    ):
        # What top-k took away is shared among five tokens.
        assert (processed > trainer).all()
        assert (processed < 1e-5).all()


def test_without_filters_the_sampled_distribution_is_the_trainers(make_rollout):
    processed = sampled(make_rollout(logprobs_mode="processed_logprobs"))
    trainer = sampled(make_rollout())
    assert max_difference(processed.logprobs, trainer.logprobs) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"sampling_params": {"temperature": 1.0}}, InvalidConfigError, "temperature.*1.0.*Rollo"),
        ({"sampling_params": {"n": 2}}, InvalidConfigError, "'n', got 2"),
        ({"sampling_params": {"min_q": 1}}, InvalidRequestError, "did you mean 'min_p'"),
        ({"sampling_params": {"best_of": 2}}, InvalidRequestError, "best_of=2 is not supported"),
        ({"sampling_params": {"min_p": 2}}, InvalidRequestError, r"min_p must be in \[0, 1\]"),
        ({"sampling_params": {"detokenize": False}}, InvalidConfigError, "reward functions"),
        ({"logprobs_mode": "raw"}, InvalidConfigError, "logprobs_mode must be one of.*'raw'"),
    ],
)
def test_refused(make_rollout, arguments, error, match):
    with pytest.raises(error, match=match):
        make_rollout(**arguments)


def test_a_call_too_short_for_min_new_tokens_is_refused(make_rollout):
    rollout = make_rollout(sampling_params={"min_new_tokens": 10})
    with pytest.raises(InvalidRequestError, match=r"min_new_tokens.*between 0 and 4"):
        tokens_of(rollout, PROMPTS, max_tokens_to_generate=4)
