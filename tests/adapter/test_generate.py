"""The contract of `SglJaxRollout.generate`: shapes and types, end tokens, randomness, errors."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import EngineShutdownError, InvalidConfigError, InvalidRequestError
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    VOCAB_SIZE,
    EndingTokenizer,
    new_rollout,
    padded,
    params_of,
    rollout_config,
    text_of,
    tokens_of,
)

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 1, 9), seed=1)
GROUP = [PROMPTS[0]] * 4
HF_FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_gqa_tied"


@pytest.fixture(scope="module")
def greedy(rollout):
    """32 greedy tokens after each of `PROMPTS`."""
    return tokens_of(rollout, PROMPTS, max_tokens_to_generate=32)


@pytest.fixture(scope="module")
def both(model):
    """Two rollouts of the same weights; whoever calls one with a seed calls the other as well."""
    rollouts = [new_rollout(model) for _ in range(2)]
    yield rollouts
    for each in rollouts:
        each.close()


# ------------------------------------------------------------------ shapes and types


def test_output(rollout):
    output = rollout.generate([text_of(ids) for ids in PROMPTS], rollout_config())
    assert type(output.text) is list
    assert all(type(text) is str for text in output.text)
    assert output.text == [text_of(row) for row in output.tokens]
    for row in output.tokens:
        assert isinstance(row, np.ndarray)
        assert (row.shape, row.dtype) == ((16,), np.int32)
    np.testing.assert_array_equal(
        output.left_padded_prompt_tokens, padded(PROMPTS, 16, left=True), strict=True
    )
    assert output.logprobs is None


def test_logprobs_have_the_lengths_of_the_tokens(rollout, greedy):
    end = greedy[0][5]
    config = rollout_config(return_logprobs=True, eos_tokens=[end])
    output = rollout.generate([text_of(ids) for ids in PROMPTS], config)
    assert output.logprobs is not None
    assert len(output.tokens[0]) < 16
    for tokens, logprobs in zip(output.tokens, output.logprobs, strict=True):
        assert isinstance(logprobs, np.ndarray)
        assert (logprobs.shape, logprobs.dtype) == (tokens.shape, np.float32)
        assert (logprobs <= 0).all()


def test_all_microbatches_have_prompts_of_the_same_width(rollout):
    widths = set()
    for length in (1, 7, 16):
        prompts = ref.make_prompts(VOCAB_SIZE, (length,))
        output = rollout.generate([text_of(prompts[0])], rollout_config(max_tokens_to_generate=1))
        widths.add(output.left_padded_prompt_tokens.shape)
    assert widths == {(1, 16)}


@pytest.mark.parametrize(("length", "width"), [(17, 32), (32, 32), (33, 64)])
def test_a_longer_prompt_is_not_cut(rollout, length, width):
    prompts = ref.make_prompts(VOCAB_SIZE, (3, length))
    config = rollout_config(max_tokens_to_generate=1)
    output = rollout.generate([text_of(ids) for ids in prompts], config)
    np.testing.assert_array_equal(
        output.left_padded_prompt_tokens, padded(prompts, width, left=True), strict=True
    )


def test_prompts_may_be_numpy_strings(rollout, greedy):
    texts = np.array([text_of(ids) for ids in PROMPTS])
    assert isinstance(texts[0], np.str_)
    for prompts in (list(texts), texts):
        output = rollout.generate(prompts, rollout_config())
        assert [row.tolist() for row in output.tokens] == [row[:16] for row in greedy]
        assert all(type(text) is str for text in output.text)


@pytest.mark.parametrize("kind", [str, np.str_])
def test_a_bare_string_is_one_prompt(rollout, greedy, kind):
    output = rollout.generate(kind(text_of(PROMPTS[2])), rollout_config())
    assert [row.tolist() for row in output.tokens] == [greedy[2][:16]]
    assert output.left_padded_prompt_tokens.shape == (1, 16)


def test_bos_goes_in_front_once(make_rollout, rollout):
    with_bos = make_rollout(tokenizer=EndingTokenizer(eos=2, bos=1))
    expected = tokens_of(rollout, [[1, 5, 6]])
    for prompt in ([5, 6], [1, 5, 6]):
        output = with_bos.generate([text_of(prompt)], rollout_config())
        assert output.left_padded_prompt_tokens[0].tolist() == [0] * 13 + [1, 5, 6]
        assert [row.tolist() for row in output.tokens] == expected


@pytest.mark.parametrize("bos", [None, 0, -1])
def test_no_bos_where_the_tokenizer_has_none(make_rollout, rollout, bos):
    """Hugging Face says None, SentencePiece -1, and Tunix takes 0 for none."""
    without_bos = make_rollout(tokenizer=EndingTokenizer(eos=2, bos=bos))
    assert tokens_of(without_bos, [[5, 6]]) == tokens_of(rollout, [[5, 6]])


# ------------------------------------------------------------------ where completions end


def test_end_token_stays_in_tokens_and_not_in_text(rollout, greedy):
    end = greedy[0][9]
    at = greedy[0].index(end)
    output = rollout.generate([text_of(PROMPTS[0])], rollout_config(eos_tokens=[end]))
    assert output.tokens[0].tolist() == greedy[0][: at + 1]
    assert output.text == [text_of(greedy[0][:at])]


def test_the_tokenizers_end_token_ends_a_completion(make_rollout, greedy):
    end = greedy[1][6]
    at = greedy[1].index(end)
    rollout = make_rollout(tokenizer=EndingTokenizer(eos=end))
    assert (rollout.eos_id(), rollout.pad_id()) == (end, ref.PAD_ID)
    assert tokens_of(rollout, PROMPTS[1:2], eos_tokens=None) == [greedy[1][: at + 1]]
    # As Tunix has it, `eos_tokens` stands in for the tokenizer's.
    assert tokens_of(rollout, PROMPTS[1:2], eos_tokens=[]) == [greedy[1][:16]]


@pytest.mark.parametrize("eos", [None, -1])
def test_a_tokenizer_without_an_end_token(make_rollout, greedy, eos):
    """Hugging Face says None and SentencePiece says -1; nothing ends early then."""
    rollout = make_rollout(tokenizer=EndingTokenizer(eos=eos))
    assert tokens_of(rollout, PROMPTS, eos_tokens=None) == [row[:16] for row in greedy]


def test_max_tokens_to_generate_of_each_call_counts(rollout, greedy):
    for limit in (1, 5, 32):
        expected = [row[:limit] for row in greedy]
        assert tokens_of(rollout, PROMPTS, max_tokens_to_generate=limit) == expected


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, TokenizerAdapter])
def test_hugging_face_tokenizer(make_rollout, wrap):
    tokenizer = AutoTokenizer.from_pretrained(HF_FOLDER)
    model = ref.make_tunix_qwen3({**ref.CONFIGS["gqa2_tied"], "vocab_size": len(tokenizer)})
    config = {"rollout_sglang_jax_model_version": str(HF_FOLDER), "eos_tokens": None}
    rollout = make_rollout(model, tokenizer=wrap(tokenizer), config=config)
    assert (rollout.pad_id(), rollout.eos_id()) == (0, 1)
    # Drawn until some completions ended.
    output = rollout.generate(["hello"] * 8, rollout_config(**config, temperature=3.0, seed=0))
    # Tunix puts BOS in front, whatever the tokenizer does.
    prompt = [tokenizer.bos_token_id, *tokenizer.encode("hello")]
    assert output.left_padded_prompt_tokens[0].tolist() == [0] * (16 - len(prompt)) + prompt
    for text, tokens in zip(output.text, output.tokens, strict=True):
        assert text == tokenizer.decode(tokens.tolist())  # as Tunix's samplers do


def test_structured_outputs(make_rollout):
    """As vLLM's sampling fields of a config, or as a keyword of the rollout."""
    tokenizer = AutoTokenizer.from_pretrained(HF_FOLDER)
    model = ref.make_tunix_qwen3({**ref.CONFIGS["gqa2_tied"], "vocab_size": len(tokenizer)})
    fields = {"structured_outputs": {"regex": "[0-9]{3}"}}
    config = {"eos_tokens": None, "temperature": 1.0, "seed": 0}
    by_config = make_rollout(
        model, tokenizer=tokenizer, config={**config, "rollout_vllm_sampling_kwargs": fields}
    )
    by_keyword = make_rollout(model, tokenizer=tokenizer, sampling_params=fields)
    for rollout in (by_config, by_keyword):
        output = rollout.generate(["hello"] * 4, rollout_config(**config))
        assert all(len(text) == 3 and text.isdigit() for text in output.text)
        assert len(set(output.text)) > 1


@pytest.mark.parametrize("leaves_out", [None, True])
def test_special_tokens_are_in_the_text(make_rollout, leaves_out):
    """A reward may look for them; Tunix's samplers decode them too."""
    tokenizer = AutoTokenizer.from_pretrained(HF_FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
    model = ref.make_tunix_qwen3({**ref.CONFIGS["gqa2_tied"], "vocab_size": len(tokenizer)})
    answer = tokenizer.convert_tokens_to_ids("<answer>")
    more = {} if leaves_out is None else {"skip_special_tokens": leaves_out}
    rollout = make_rollout(
        model, tokenizer=tokenizer, sampling_params={"logit_bias": {answer: 50.0}, **more}
    )
    output = rollout.generate(["hello"], rollout_config(eos_tokens=None, max_tokens_to_generate=3))
    assert output.tokens[0].tolist() == [answer] * 3
    assert output.text == ["" if leaves_out else "<answer>" * 3]


def test_negative_seeds(rollout):
    """As in OpenAI's API; -1 is any seed."""
    drawn = [tokens_of(rollout, GROUP, temperature=1.0, seed=seed) for seed in (-7, -7, -1, -1)]
    assert len({str(each) for each in drawn[2:]}) == 2
    assert drawn[0] != drawn[1], "the number of earlier calls counts"


# ------------------------------------------------------------------ randomness


def test_a_group_of_identical_prompts_gets_different_samples(rollout):
    for seed in (None, 5):
        samples = tokens_of(rollout, GROUP, temperature=1.0, seed=seed)
        assert len({tuple(row) for row in samples}) == len(GROUP)


def test_without_a_seed_every_call_is_fresh(rollout, both):
    """Also across rollouts, as across the runs of a program."""
    calls = [tokens_of(each, GROUP[:1], temperature=1.0) for each in (*both, rollout, rollout)]
    assert len({tuple(row) for call in calls for row in call}) == 4


SEEDS = {
    "int": lambda: 6,
    "numpy": lambda: np.int32(7),
    "typed key": lambda: jax.random.key(8),
    "raw key": lambda: jax.random.PRNGKey(9),
}


@pytest.mark.parametrize("kind", SEEDS)
def test_a_seed_makes_a_run_reproducible(both, kind):
    seed = SEEDS[kind]()
    runs = [[tokens_of(each, GROUP, temperature=1.0, seed=seed) for _ in "12"] for each in both]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    if isinstance(seed, jax.Array):
        assert not seed.is_deleted()
        assert 0 <= float(jax.random.uniform(seed)) < 1


def test_other_seeds_give_other_samples(rollout):
    seeds = (0, 1, 2**40, 2**63 - 1, jax.random.key(1), jax.random.key(2))
    samples = [tokens_of(rollout, GROUP[:1], temperature=1.0, seed=seed)[0] for seed in seeds]
    assert len({tuple(row) for row in samples}) == len(seeds)


def test_no_noise_is_used_twice(rollout):
    """All rows of all calls with one seed, not just those of neighbouring calls."""
    samples = [
        tuple(row) for _ in range(4) for row in tokens_of(rollout, GROUP, temperature=1.0, seed=11)
    ]
    assert len(set(samples)) == len(samples)


@pytest.mark.parametrize("seed", ["x", 1.5, np.zeros(2, np.float32), 2**63])
def test_what_is_no_seed_is_refused(rollout, seed):
    with pytest.raises((InvalidConfigError, InvalidRequestError), match="seed"):
        tokens_of(rollout, GROUP[:1], temperature=1.0, seed=seed)


# ------------------------------------------------------------------ filters


@pytest.mark.parametrize(
    "greedy_sampling",
    [
        {"temperature": 0.0, "top_p": 1.0},
        {"temperature": 0.0, "top_p": None},
        {"temperature": 0.0, "top_p": 0.5, "top_k": 7},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_greedy_in_many_words(rollout, greedy, greedy_sampling):
    assert tokens_of(rollout, PROMPTS, **greedy_sampling) == [row[:16] for row in greedy]


@pytest.mark.parametrize(
    "words",
    [{"top_p": None}, {"top_k": None}, {"top_k": -1}, {"top_k": 0}, {"top_k": VOCAB_SIZE}],
    ids=str,
)
def test_many_words_for_no_filter(both, words):
    plain, worded = (
        tokens_of(each, GROUP, temperature=1.0, seed=2, **fields)
        for each, fields in zip(both, ({"top_p": 1.0, "top_k": None}, words), strict=True)
    )
    assert plain == worded


# ------------------------------------------------------------------ errors


def test_unknown_keywords_are_refused(rollout):
    with pytest.raises(InvalidRequestError, match="beam_size"):
        rollout.generate(["1"], rollout_config(), beam_size=2)


def test_no_prompts_are_refused(rollout):
    with pytest.raises(InvalidRequestError, match="prompts"):
        rollout.generate([], rollout_config())


@pytest.mark.parametrize("prompts", [["1 2", ""], [f"{VOCAB_SIZE}"], ["-1"]])
def test_bad_prompts_are_refused(rollout, prompts):
    with pytest.raises(InvalidRequestError, match=r"prompt|input_ids"):
        rollout.generate(prompts, rollout_config())


def test_a_completion_without_a_prompt_cannot_be_scored(rollout):
    """Its first token has no log-prob; whoever asks must not get numbers for it."""
    prompts, completions = np.array([[0, 0], [0, 4]], np.int32), np.array([[5, 6]] * 2, np.int32)
    with pytest.raises(InvalidRequestError, match="prompt"):
        rollout.get_per_token_logps(prompts, completions)


def test_a_request_beyond_the_context_is_refused(rollout):
    with pytest.raises(InvalidRequestError, match=r"120.*16.*136.*max_model_len = 128"):
        tokens_of(rollout, [[1] * 120])
    assert len(tokens_of(rollout, [[1] * 112])[0]) == 16


def test_an_error_leaves_the_rollout_serving(rollout, greedy):
    with pytest.raises(InvalidRequestError):
        rollout.generate(["1", "100000"], rollout_config())
    assert tokens_of(rollout, PROMPTS) == [row[:16] for row in greedy]


# ------------------------------------------------------------------ the end


def calls_after_close(rollout, model):
    return {
        "generate": lambda: rollout.generate(["1"], rollout_config()),
        "get_per_token_logps": lambda: rollout.get_per_token_logps(
            np.ones((1, 4), np.int32), np.ones((1, 4), np.int32)
        ),
        "update_params": lambda: rollout.update_params(params_of(model), None),
        "engine": lambda: rollout.engine.get_internal_state(),
    }


@pytest.mark.parametrize("is_built", [True, False])
def test_close(make_rollout, model, is_built):
    rollout = make_rollout()
    if is_built:
        tokens_of(rollout, PROMPTS)
    rollout.close()
    rollout.close()
    for name, call in calls_after_close(rollout, model).items():
        with pytest.raises(EngineShutdownError):
            call()
        assert name


def test_default_config_of_tunix(make_rollout):
    """Every field at Tunix's own default."""
    rollout = make_rollout(rollout_config=RolloutConfig(), tokenizer=EndingTokenizer(eos=1))
    output = rollout.generate(["1 2 3", "4"], RolloutConfig())
    assert output.left_padded_prompt_tokens.shape == (2, 64)
    assert all(0 < len(row) <= 64 for row in output.tokens)
