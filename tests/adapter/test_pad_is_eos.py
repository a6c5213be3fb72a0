"""Tokenizers whose pad token is the end token: Tunix's choice for all that name no pad token."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import CacheConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tests import tunix_reference as ref
from tests.adapter import grpo_parts as parts
from tests.adapter.helpers import (
    VOCAB_SIZE,
    EndingTokenizer,
    max_difference,
    new_rollout,
    padded,
    rollout_config,
    text_of,
    tokens_of,
)
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout, mismatch_report

# Warnings of Tunix itself and of what it uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 1, 9), seed=1)[::-1]


@pytest.fixture(scope="module")
def greedy(rollout):
    """16 greedy tokens after each of `PROMPTS`, none of which ends early."""
    return tokens_of(rollout, PROMPTS)


@pytest.fixture(scope="module")
def end(greedy):
    """A token that ends the first prompt's completion in its midst and is in no prompt."""
    prompt_ids = {int(token) for prompt in PROMPTS for token in prompt}
    return next(
        token
        for at, token in enumerate(greedy[0])
        if 4 <= at < 12 and greedy[0].index(token) == at and token not in prompt_ids
    )


@pytest.fixture(scope="module")
def same(model, end):
    """A rollout whose tokenizer pads with its end token."""
    rollout = new_rollout(
        model, tokenizer=EndingTokenizer(eos=end, pad=end), rollout_config=config_of()
    )
    yield rollout
    rollout.close()


def config_of(**changes):
    return rollout_config(**({"eos_tokens": None, "return_logprobs": True} | changes))


def texts_of(prompts):
    return [text_of(ids) for ids in prompts]


def vanilla(model, tokenizer):
    """Tunix's own sampler, with room for the longest of the tests' sequences."""
    config = model.config
    cache = CacheConfig(
        cache_size=64,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return VanillaRollout(model, tokenizer, cache)


def trainer_logps(model, prompts_BP, completions_BC, pad):
    graphdef, state = nnx.split(model)
    logps = compute_per_token_logps(
        graphdef,
        state,
        jnp.asarray(prompts_BP),
        jnp.asarray(completions_BC),
        pad_id=pad,
        eos_id=pad,
    )
    return np.asarray(logps)


# ------------------------------------------------------------------ as Tunix's vanilla sampler


def check_like_vanilla(rollout, model, tokenizer, texts, config):
    """The same greedy tokens, texts and padded prompts; returns how long the completions are."""
    ours = rollout.generate(texts, config)
    theirs = vanilla(model, tokenizer).generate(texts, config)
    assert ours.text == theirs.text
    for row, expected in zip(ours.tokens, theirs.tokens, strict=True):
        np.testing.assert_array_equal(row, expected)
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    return [len(row) for row in ours.tokens]


@pytest.mark.slow
def test_two_steps_of_grpo_and_the_tokens_of_vanilla():
    """Before and after training the rollout gives what Tunix's sampler gives of the actor."""
    config = parts.rollout_config(temperature=0.0, top_p=None)
    model = ref.make_tunix_qwen3(parts.MODEL)
    unended = vanilla(model, EndingTokenizer(eos=ref.NO_EOS_ID)).generate(parts.PROMPTS, config)
    in_prompts = {int(word) for text in parts.PROMPTS for word in text.split()}
    end = next(int(token) for token in unended.tokens[1][2:] if int(token) not in in_prompts)
    tokenizer = EndingTokenizer(eos=end, pad=end)

    rewarded = []

    def reward(prompts, completions, **_):
        rewarded.extend(completions)
        return [float(sum(int(word) % 2 == 0 for word in text.split())) for text in completions]

    made = parts.make_parts(rollout_engine=functools.partial(SglJaxRollout, **SMALL))
    made.arguments["tokenizer"] = tokenizer
    cluster: Any = RLCluster(**made.arguments)
    try:
        actor = cluster.actor_trainer.model
        lengths = check_like_vanilla(cluster.rollout, actor, tokenizer, parts.PROMPTS, config)
        assert min(lengths) < config.max_tokens_to_generate
        GRPOLearner(cluster, parts.grpo_config(), reward).train(parts.list_batches())
        assert cluster.global_steps == cluster.rollout.weight_version == parts.NUM_STEPS
        check_like_vanilla(cluster.rollout, actor, tokenizer, parts.PROMPTS, config)
    finally:
        cluster.rollout.close()
    assert len(rewarded) == len(parts.PROMPTS) * parts.NUM_GENERATIONS
    assert all(str(end) not in text.split() for text in rewarded)


# ------------------------------------------------------------------ where completions end


def test_everything_ends_before_the_end_token(same, model, greedy, end):
    output = same.generate(texts_of(PROMPTS), config_of())
    at = greedy[0].index(end)
    assert output.tokens[0].tolist() == greedy[0][:at]
    assert output.text == [text_of(row) for row in output.tokens]
    rows = zip(output.tokens, output.logprobs, output.weight_versions, strict=True)
    for tokens, logprobs, versions in rows:
        assert len(tokens) == len(logprobs) == len(versions) > 0
        assert end not in tokens
    expected = ref.trainer_logps(model, PROMPTS, output.tokens, pad_id=end)
    assert max_difference(output.logprobs, expected) < 1e-4


def test_a_completion_may_be_empty(make_rollout, greedy):
    first = greedy[0][0]
    rollout = make_rollout(tokenizer=EndingTokenizer(eos=first, pad=first))
    output = rollout.generate(texts_of(PROMPTS[:1]), config_of())
    assert output.text == [""]
    for rows in (output.tokens, output.logprobs, output.weight_versions):
        assert [len(row) for row in rows] == [0]


def test_only_an_end_token_that_is_the_pad_is_cut(make_rollout, greedy, end):
    """Whether it is the tokenizer's end token or one of `eos_tokens`."""
    at = greedy[0].index(end)
    pads_with_end = make_rollout(tokenizer=EndingTokenizer(eos=VOCAB_SIZE - 1, pad=end))
    assert tokens_of(pads_with_end, PROMPTS[:1], eos_tokens=[end]) == [greedy[0][:at]]
    before = greedy[0][at - 1]
    assert greedy[0].index(before) == at - 1
    kept = tokens_of(pads_with_end, PROMPTS[:1], eos_tokens=[before, end])
    assert kept == [greedy[0][:at]]
    # Nothing ends there, so the pad id is a token like any other.
    unended = tokens_of(pads_with_end, PROMPTS[:1], eos_tokens=[], max_tokens_to_generate=at + 1)
    assert unended == [greedy[0][: at + 1]]


def test_one_warning_for_each_rollout(make_rollout, caplog, end):
    with caplog.at_level(logging.WARNING, logger="tunix_sgljax"):
        rollout = make_rollout(tokenizer=EndingTokenizer(eos=end, pad=end))
        for _ in range(2):
            tokens_of(rollout, PROMPTS[:1], eos_tokens=None)
        rollout.bind(config_of())
    (record,) = caplog.records
    assert f"pad and end tokens are both {end}" in record.getMessage()


@pytest.mark.parametrize("nothing", [None, -1])
def test_a_tokenizer_with_neither_is_refused(model, nothing):
    with pytest.raises(InvalidConfigError, match=f"pad and end tokens are both {nothing}, which"):
        new_rollout(model, tokenizer=EndingTokenizer(eos=nothing, pad=nothing))


# ------------------------------------------------------------------ pad ids inside rows


def test_pad_ids_inside_a_prompt_are_kept(rollout, same, end):
    inside = [5, end, 9, end, end, 11]
    expected = tokens_of(rollout, [inside], eos_tokens=[end])
    assert expected[0][-1] == end or len(expected[0]) == 16
    want = [token for token in expected[0] if token != end]
    assert tokens_of(same, [inside], eos_tokens=None) == [want]
    without = [token for token in inside if token != end]
    assert tokens_of(same, [without], eos_tokens=None) != [want]


def test_a_prompt_of_pad_ids_alone_is_refused(same, end):
    with pytest.raises(InvalidRequestError, match=rf"prompts\[1\]='{end} {end}' .* {end} alone"):
        same.generate(["5 9", f"{end} {end}"], config_of())
    with pytest.raises(InvalidRequestError, match="padding alone"):
        same.get_per_token_logps(np.full((1, 4), end), np.array([[5, end]]))


def test_scores_see_pad_ids_inside_rows(same, end):
    """Padding is stripped at the ends only, as when the rows were sampled."""
    prompts = [[5, end, 9, 11], [7, 3, end]]
    completions = [[4, end, 6], [8, end, end, 2]]
    same.bind(config_of(temperature=1.0))
    prompts_BP = padded(prompts, 6, left=True, pad=end)
    completions_BC = padded(completions, 6, left=False, pad=end)
    logps = np.asarray(same.get_per_token_logps(prompts_BP, completions_BC))
    for prompt, completion, row in zip(prompts, completions, logps, strict=True):
        (expected,) = same.engine.score([prompt + completion], start_lens=[len(prompt)])
        np.testing.assert_allclose(row[: len(completion)], expected, atol=1e-5, rtol=0)
        assert not row[len(completion) :].any()


def test_trainer_match_gives_what_tunixs_masks_make_of_them(make_rollout, model, end):
    """There log-probs are the trainer's, which sees no pad id anywhere."""
    rollout = make_rollout(
        tokenizer=EndingTokenizer(eos=end, pad=end), logprobs_mode="trainer_match"
    )
    prompts_BP = padded([[5, end, 9, 11], [7, 3, 8]], 16, left=True, pad=end)
    completions_BC = padded([[4, end, 6], [8, 2]], 16, left=False, pad=end)
    expected = trainer_logps(model, prompts_BP, completions_BC, end)
    logps = np.asarray(rollout.get_per_token_logps(prompts_BP, completions_BC))
    np.testing.assert_array_equal(logps[0, :3], expected[0, :3])
    np.testing.assert_array_equal(logps[1, :2], expected[1, :2])
    assert not logps[0, 3:].any()
    assert not logps[1, 2:].any()

    texts = texts_of([[5, end, 9, 11], [7, 3, 8]])
    output = rollout.generate(texts, config_of())
    completions_BC = padded(output.tokens, 16, left=False, pad=end)
    expected = trainer_logps(model, output.left_padded_prompt_tokens, completions_BC, end)
    for row, want in zip(output.logprobs, expected, strict=True):
        np.testing.assert_array_equal(row, want[: len(row)])


def test_a_mismatch_report_says_which_prompts_the_trainer_sees_otherwise(same, model, end):
    same.bind(config_of(temperature=0.7))
    texts = texts_of([[5, 9], [5, end, 9], [7, 3]])
    report = mismatch_report(same, model, texts, rollout_config=config_of(temperature=0.7))
    assert report.prompt_pad_rows == (1,)
    assert list(report.rows_off()) == [1]
    assert report.to_dict()["prompt_pad_rows"] == [1]
    assert "pad id in prompt  in rows [1]" in str(report)
    assert mismatch_report(same, model, texts[::2]).is_within()


# ------------------------------------------------------------------ the parts
