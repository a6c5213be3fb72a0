"""The same tokens and log-probs as Tunix's own sampler and trainer, for several shapes."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tests import tunix_reference as ref
from tests.adapter.helpers import max_difference, new_rollout, rollout_config, scores, text_of
from tests.tiers import tiered

NUM_TOKENS = 64
TOLERANCE = 1e-4


def config_of(**changes):
    return rollout_config(max_tokens_to_generate=NUM_TOKENS, return_logprobs=True, **changes)


@pytest.fixture(
    scope="module",
    params=tiered(("gqa2_tied", "gqa4_untied", "mha_tied"), ["gqa2_tied"], ["gqa4_untied"]),
)
def case(request):
    """A Tunix model, its rollout, and ragged prompts."""
    model = ref.make_tunix_qwen3(request.param)
    rollout = new_rollout(model, rollout_config=config_of())
    prompts = ref.make_prompts(model.config.vocab_size)
    yield types.SimpleNamespace(model=model, rollout=rollout, prompts=prompts)
    rollout.close()


def until_pad(tokens, logprobs):
    """What stands before the first sampled pad id, since Tunix's trainer masks pad ids."""
    ends = [int(np.append(row == ref.PAD_ID, True).argmax()) for row in tokens]
    kept = [row[:end] for row, end in zip(tokens, ends, strict=True)]
    return kept, [row[:end] for row, end in zip(logprobs, ends, strict=True)]


def generate(case, **changes):
    return case.rollout.generate([text_of(ids) for ids in case.prompts], config_of(**changes))


def test_greedy_tokens_are_those_of_tunixs_sampler(case):
    expected = ref.vanilla_greedy(case.model, case.prompts, NUM_TOKENS)
    for row, want in zip(generate(case).tokens, expected, strict=True):
        np.testing.assert_array_equal(row, want)


def test_greedy_logprobs_and_scores_are_the_trainers(case):
    """Scores at temperature 0 leave the logits alone."""
    output = generate(case)
    expected = ref.trainer_logps(case.model, case.prompts, output.tokens, temperature=0.0)
    assert max_difference(output.logprobs, expected) < TOLERANCE
    case.rollout.bind(config_of(temperature=0.0))
    assert max_difference(scores(case.rollout, case.prompts, output.tokens), expected) < TOLERANCE


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 1.0}, id="plain"),
        # Filters decide what can be drawn; the trainer, who scores all tokens, knows none.
        pytest.param(
            {"temperature": 0.7, "top_k": 12, "top_p": 0.9}, id="filtered", marks=pytest.mark.slow
        ),
    ],
)
def test_sampled_logprobs_are_the_trainers(case, sampling):
    output = generate(case, seed=3, **sampling)
    tokens, logprobs = until_pad(output.tokens, output.logprobs)
    assert sum(map(len, tokens)) > len(tokens) * NUM_TOKENS // 4
    temperature = sampling["temperature"]
    expected = ref.trainer_logps(case.model, case.prompts, tokens, temperature=temperature)
    assert max_difference(logprobs, expected) < TOLERANCE

    case.rollout.bind(config_of(**sampling))
    assert max_difference(scores(case.rollout, case.prompts, tokens), expected) < TOLERANCE


def test_score_of_completions_of_any_length(case):
    """Ragged completions, an empty one among them, as Tunix pads them."""
    case.rollout.bind(config_of(temperature=1.0))
    rng = np.random.default_rng(0)
    completions = [
        rng.integers(1, 100, length).astype(np.int32) for length in (1, NUM_TOKENS, 7, 16, 2)
    ]
    got = scores(case.rollout, case.prompts, completions)
    expected = ref.trainer_logps(case.model, case.prompts, completions)
    assert max_difference(got, expected) < TOLERANCE

    completions[0] = completions[0][:0]
    again = scores(case.rollout, case.prompts, completions)
    assert len(again[0]) == 0
    assert max_difference(again[1:], expected[1:]) < TOLERANCE
