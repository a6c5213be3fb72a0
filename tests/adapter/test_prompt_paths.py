"""One way from a prompt to token ids, whoever asks; and prompts that are too long."""

from __future__ import annotations

import functools
import random
import types
from typing import Any

import numpy as np
import pytest
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.utils import pad_to_length

from sgljax_engine import InvalidRequestError
from tests.adapter.grpo_parts import make_parts
from tests.adapter.helpers import EndingTokenizer, rollout_config, text_of
from tests.geometry import SMALL
from tunix_sgljax import OverSampling, RLCluster, SglJaxRollout
from tunix_sgljax.long_tail.feed import Row
from tunix_sgljax.long_tail.groups import GroupsInFlight, to_output
from tunix_sgljax.rollout.prompts import PromptEncoder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

WIDTH, PAD = 16, 3
CONFIG = rollout_config(return_logprobs=True, temperature=1.0, seed=5, max_tokens_to_generate=6)


def masked_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids that a prompt has for Tunix: its sampler's, padded, from where its mask begins."""
    sampler: Any = types.SimpleNamespace(tokenizer=TokenizerAdapter(tokenizer))
    ids = Sampler.tokenize(sampler, text)
    padded = pad_to_length(np.asarray(ids), WIDTH, tokenizer.pad_id(), left=True)
    return padded[int(np.argmax(padded != tokenizer.pad_id())) :].tolist()


LIMIT = 40
"""Most tokens of a prompt and its answer."""


def encode(tokenizer: Any, prompt: Any, *, render: Any = None) -> list[int]:
    encoder = PromptEncoder(tokenizer)
    return encoder.encode(
        prompt, CONFIG, name="prompts[4]", max_model_len=LIMIT, render=render or _no_template
    )


def _no_template(_messages: Any) -> list[int]:
    raise AssertionError


def test_ids_are_those_that_tunix_samples_from_and_masks():
    """Random texts, many of which begin with BOS or pad ids, for four kinds of tokenizers."""
    rng = random.Random(0)
    for bos in (0, 2, PAD, None):
        tokenizer = EndingTokenizer(eos=1, pad=PAD, bos=bos)
        for _ in range(100):
            head = [rng.choice([PAD, 2]) for _ in range(rng.randrange(4))]
            text = text_of([*head, 5, *(rng.choice([PAD, 2, 7]) for _ in range(rng.randrange(5)))])
            assert encode(tokenizer, text) == masked_ids(tokenizer, text), (bos, text)


def test_a_conversation_has_bos_as_a_text_has_it():
    tokenizer = EndingTokenizer(eos=1, pad=PAD, bos=2)
    for ids in ([5, 6], [2, 5, 6]):
        messages = [{"role": "user", "content": "5 6"}]
        assert encode(tokenizer, messages, render=lambda _, ids=ids: ids) == [2, 5, 6]
    assert encode(tokenizer, [PAD, 5, 6]) == encode(tokenizer, np.array([5, 6])) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"5 6", r"prompts\[4\] must be a text, .* got b'5 6'"),
        (7, r"prompts\[4\] must be a text, .* got 7"),
        ("", r"prompts\[4\]='' has no tokens"),
        ("3 3", r"prompts\[4\]='3 3' holds the pad id 3 alone"),
        (
            " ".join("5" * 35),
            r"prompts\[4\]='5 5 5 .* has 35 tokens; with max_.* 6 that is 41, .*len = 40",
        ),
    ],
)
def test_refused_prompts_are_named(prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        encode(EndingTokenizer(eos=1, pad=PAD, bos=0), prompt)


def groups_of(rollout: SglJaxRollout) -> GroupsInFlight:
    """Groups of two samples."""

    def columns_of(rows: Any) -> dict[str, Any]:
        return {"prompts": [row.columns["prompts"][0] for row in rows for _ in range(2)]}

    return GroupsInFlight(rollout, OverSampling(), 2, columns_of)


def test_generate_and_over_sampling_sample_from_the_same_context(make_rollout):
    """Log-probs are those of the prompt that Tunix's arrays hold, where BOS is the pad token."""
    rollout = make_rollout(tokenizer=EndingTokenizer(eos=63, pad=PAD, bos=PAD))
    text = text_of([PAD, 5, 9, PAD, 11])
    groups = groups_of(rollout)
    groups.ask(Row(0, {"prompts": [text]}), CONFIG)
    asked = to_output(groups.take(1), rollout, CONFIG)
    groups.close()
    for output in (asked, rollout.generate([text], CONFIG)):
        prompts_BP = output.left_padded_prompt_tokens
        assert prompts_BP[0][prompts_BP[0] != PAD].tolist() == [5, 9, 11]
        completions_BC = np.array([pad_to_length(row, 8, PAD) for row in output.tokens])
        scores = rollout.get_per_token_logps(prompts_BP, completions_BC)
        for row, logps in zip(np.asarray(scores), output.logprobs or (), strict=True):
            np.testing.assert_allclose(row[: len(logps)], logps, atol=1e-4)


def test_an_over_sampled_prompt_is_named_by_its_row(rollout):
    groups = groups_of(rollout)
    with pytest.raises(
        InvalidRequestError, match=r"prompts of row 17=.* has 120 tokens; with max_"
    ):
        groups.ask(Row(17, {"prompts": [text_of([5] * 120)]}), rollout_config())
    groups.close()


def cluster_of(*, sampled: int, scored: int) -> RLCluster:
    """A cluster whose learner samples and scores in micro-batches of some sizes."""
    engine = functools.partial(SglJaxRollout, **SMALL)
    arguments = make_parts(rollout_engine=engine).arguments
    training = arguments["cluster_config"].training_config
    training.rollout_micro_batch_size, training.compute_logps_micro_batch_size = sampled, scored
    return RLCluster(**arguments)


def stop(cluster):
    cluster.rollout.close()


def test_prompts_of_several_calls_must_be_of_one_width():
    """Where Tunix concatenates them; one call's may be longer, and Tunix then pads all of them."""
    texts = [text_of([5] * 9), "6"]
    joined = cluster_of(sampled=1, scored=2)
    with pytest.raises(
        InvalidRequestError, match=r"prompts\[0\]=.* has 9 tokens, more than Roll.*=8"
    ):
        joined.generate(texts * 2, micro_batch_size=2)
    stop(joined)
    single = cluster_of(sampled=2, scored=1)
    output = single.generate(texts, micro_batch_size=2)
    assert output.left_padded_prompt_tokens.shape == (2, 16)
    stop(single)
