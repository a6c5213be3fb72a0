"""Every row of the table of docs/sampling.md on a real engine."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import FOREIGN_FIELDS, Engine, InvalidRequestError, SamplingParams
from tests.engine.models import TINY, random_prompts, spread_weights, with_eos
from tests.engine.sampling_reference import adjust, distribution, forward, log_softmax
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_gqa_tied"
IM_START = 3
PROMPT = [11, 12, 13, 12]
TINY_EOS = 17
MODEL = with_eos(TINY, TINY_EOS)
WEIGHTS = spread_weights()
SEED_ROWS = """
n best_of _real_n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k
min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize
skip_special_tokens spaces_between_special_tokens logits_processors include_stop_str_in_output
truncate_prompt_tokens output_kind output_text_buffer_length structured_outputs logit_bias
allowed_token_ids extra_args bad_words _bad_words_token_ids max_new_tokens min_new_tokens
"""


def make_engine(**given: Any) -> Engine:
    return Engine(model_config=MODEL, weights=WEIGHTS, **{**SMALL, **given})


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def text_engine():
    with Engine(GOLDEN, **SMALL) as engine:
        yield engine


def run(engine, fields=None, **more):
    """The typed output of PROMPT; temperature 1 and seed 7 unless told otherwise."""
    fields = {"max_new_tokens": 12, "seed": 7, "ignore_eos": True} | (fields or {}) | more
    return engine.generate_requests([PROMPT], SamplingParams.from_dict(fields))[0]


def expected_logprobs(out, params):
    """Raw, scaled and processed log-probs of an output's tokens, in float64."""
    logits = forward(WEIGHTS, MODEL, out.prompt_ids + out.output_ids[:-1])
    logits = logits[len(out.prompt_ids) - 1 :]
    stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else (TINY_EOS,)))
    chosen = range(len(out.output_ids)), out.output_ids
    processed = [
        np.log(
            distribution(
                adjust(row, params, out.prompt_ids, out.output_ids[:step], stop_ids), params
            )[token]
        )
        for step, (row, token) in enumerate(zip(logits, out.output_ids, strict=True))
    ]
    scale = params.temperature or 1.0
    return log_softmax(logits)[chosen], log_softmax(logits / scale)[chosen], np.array(processed)


def check_logprobs(out, params):
    assert len(out.output_ids) >= 1
    raw, scaled, processed = expected_logprobs(out, params)
    np.testing.assert_allclose(out.logprobs, raw, atol=1e-4)
    np.testing.assert_allclose(out.scaled_logprobs, scaled, atol=1e-4)
    np.testing.assert_allclose(out.processed_logprobs, processed, atol=2e-4)


GENERATIONS = {
    "greedy": {"temperature": 0.0},
    "greedy_with_penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.4,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
    },
    "temperature_0_7": {"temperature": 0.7},
    "temperature_1": {"temperature": 1.0},
    "temperature_3": {"temperature": 3.0},
    "top_k": {"top_k": 4, "temperature": 2.0},
    "top_p": {"top_p": 0.7, "temperature": 2.0},
    "min_p": {"min_p": 0.2, "temperature": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "frequency_penalty_negative": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "repetition_penalty_below_1": {"repetition_penalty": 0.4},
    "logit_bias": {"logit_bias": {5: 6.0, 56: -4.0}},
    "allowed_token_ids": {"allowed_token_ids": [3, 5, 77, 127]},
    "bad_token_ids": {"bad_token_ids": [56, 77, 82]},
    "min_new_tokens": {"min_new_tokens": 9, "ignore_eos": False, "logit_bias": {TINY_EOS: 9.0}},
    "all_at_0_7": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0, 6: -1.0},
        "bad_token_ids": [56],
        "min_new_tokens": 12,
        "ignore_eos": False,
    },
}


class TestDistribution:
    def test_mixed_in_one_batch(self, engine):
        """Rows with all kinds of settings beside one another, over many dispatches."""
        params = [
            SamplingParams.from_dict({"max_new_tokens": 40, "seed": i, "ignore_eos": True} | fields)
            for i, fields in enumerate(GENERATIONS.values())
        ]
        prompts = random_prompts(len(params), 1, 30, seed=2)
        for out, each in zip(engine.generate_requests(prompts, params), params, strict=True):
            check_logprobs(out, each)
            if each.temperature == 0.0:
                assert out.processed_logprobs == [0.0] * len(out.output_ids)
                assert out.scaled_logprobs == out.logprobs


class TestRows:
    def test_n(self, engine):
        params = {"n": 3, "max_new_tokens": 10, "seed": 5}
        outs = engine.generate(input_ids=[PROMPT, PROMPT[:2]], sampling_params=params)
        assert len({tuple(o["output_ids"]) for o in outs}) == 6
        assert [o["meta_info"]["prompt_tokens"] for o in outs] == [4, 4, 4, 2, 2, 2]

    def test_presence_penalty(self, engine):
        plain = run(engine, temperature=0, max_new_tokens=40).output_ids
        out = run(engine, temperature=0, max_new_tokens=40, presence_penalty=2.0).output_ids
        rewarded = run(engine, temperature=0, max_new_tokens=40, presence_penalty=-2.0).output_ids
        assert len(set(rewarded)) < len(set(plain)) < len(set(out))

    def test_frequency_penalty(self, engine):
        counts = [
            max(
                np.bincount(
                    run(
                        engine, temperature=0, max_new_tokens=60, frequency_penalty=value
                    ).output_ids
                )
            )
            for value in (-2.0, 0.0, 2.0)
        ]
        assert counts[0] > counts[1] > counts[2]

    def test_repetition_penalty(self, engine):
        out = run(engine, temperature=0, max_new_tokens=60, repetition_penalty=100.0).output_ids
        assert len(set(out)) == 60
        assert not set(out) & set(PROMPT)

    def test_temperature(self, engine):
        greedy = run(engine, temperature=0).output_ids
        assert run(engine, temperature=1e-4).output_ids == greedy
        assert run(engine, temperature=1e6).output_ids != greedy
        logits = forward(WEIGHTS, MODEL, PROMPT + greedy[:-1])[len(PROMPT) - 1 :]
        assert greedy == logits.argmax(-1).tolist()

    def test_top_p(self, engine):
        assert run(engine, top_p=1e-6).output_ids == run(engine, temperature=0).output_ids
        assert run(engine, top_p=1.0).output_ids == run(engine).output_ids

    def test_top_k(self, engine):
        assert run(engine, top_k=1).output_ids == run(engine, temperature=0).output_ids
        everything = run(engine).output_ids
        for value in (-1, 0, None, TINY.vocab_size, 10**6, np.int64(-1), jnp.int32(0)):
            assert run(engine, top_k=value).output_ids == everything
        assert SamplingParams(top_k=np.int64(-1)).top_k == -1  # type: ignore[arg-type]

    def test_min_p(self, engine):
        assert run(engine, min_p=1.0).output_ids == run(engine, temperature=0).output_ids
        assert run(engine, min_p=0.0).output_ids == run(engine).output_ids

    def test_seed(self, engine):
        first = run(engine, seed=3).output_ids
        assert run(engine, seed=3).output_ids == first
        assert run(engine, seed=4).output_ids != first
        assert run(engine, seed=None).output_ids != run(engine, seed=None).output_ids

    def test_stop_token_ids(self, engine):
        plain = run(engine).output_ids
        cut = next(i for i in range(3, 12) if plain[i] not in plain[:i])
        out = run(engine, stop_token_ids=[plain[cut], 99])
        assert out.output_ids == plain[: cut + 1]
        assert (out.finish.type, out.finish.matched) == ("stop", plain[cut])
        assert run(engine, stop_token_ids=None).output_ids == plain

    def test_ignore_eos(self, engine):
        wanted = {"logit_bias": {TINY_EOS: 100.0}}
        out = run(engine, wanted, ignore_eos=False)
        assert out.output_ids == [TINY_EOS]
        assert (out.finish.type, out.finish.matched) == ("stop", TINY_EOS)
        assert run(engine, wanted, ignore_eos=True).output_ids == [TINY_EOS] * 12
        out = run(engine, wanted, ignore_eos=True, stop_token_ids=[TINY_EOS])
        assert out.output_ids == [TINY_EOS]

    def test_max_new_tokens(self, engine):
        for count in (1, 4, 5, 33):
            out = run(engine, max_new_tokens=count)
            assert len(out.output_ids) == count
            assert out.finish.to_dict(count) == {"type": "length", "length": count}

    @pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 12])
    def test_min_new_tokens(self, engine, count):
        """End-of-sequence and stop tokens wait, and one comes as soon as it may."""
        fields = {
            "ignore_eos": False,
            "stop_token_ids": [40],
            "logit_bias": {TINY_EOS: 100.0, 40: 100.0},
            "min_new_tokens": count,
        }
        out = run(engine, fields)
        assert not {TINY_EOS, 40} & set(out.output_ids[:count])
        if count < 12:
            assert len(out.output_ids) == count + 1
            assert out.finish.matched in (TINY_EOS, 40)
        else:
            assert out.finish.type == "length"

    def test_logit_bias(self, engine):
        assert run(engine, logit_bias={9: 100}).output_ids == [9] * 12
        assert run(engine, logit_bias={"9": 100.0}).output_ids == [9] * 12
        first = run(engine, temperature=0).output_ids[0]
        assert run(engine, temperature=0, logit_bias={first: -100}).output_ids[0] != first
        for neutral in ({}, {9: 0.0}, None):
            assert run(engine, logit_bias=neutral).output_ids == run(engine).output_ids

    def test_logit_bias_of_every_token(self, engine):
        """As long as the vocabulary, the widest list there is; shifts all logits alike."""
        bias = dict.fromkeys(range(TINY.vocab_size), 3.0)
        assert run(engine, logit_bias=bias).output_ids == run(engine).output_ids

    def test_allowed_token_ids(self, engine):
        """No stop token is among them, so nothing stops but the length."""
        out = run(engine, allowed_token_ids=[5, 90], max_new_tokens=50, ignore_eos=False)
        assert set(out.output_ids) == {5, 90}
        assert out.finish.type == "length"
        out = run(engine, allowed_token_ids=[TINY_EOS, 5], ignore_eos=False, max_new_tokens=200)
        assert set(out.output_ids[:-1]) <= {5}
        assert out.output_ids[-1] == TINY_EOS

    def test_bad_token_ids(self, engine):
        likely = run(engine, temperature=0, max_new_tokens=40).output_ids
        out = run(engine, temperature=0, max_new_tokens=40, bad_token_ids=likely)
        assert not set(out.output_ids) & set(likely)
        assert run(engine, bad_token_ids=None).output_ids == run(engine).output_ids
        only = [token for token in range(TINY.vocab_size) if token != 77]
        assert run(engine, bad_token_ids=only).output_ids == [77] * 12


def text_of(engine, **fields):
    given = {"max_new_tokens": 24, "seed": 11, "ignore_eos": True, "temperature": 6.0}
    params = given | {"allowed_token_ids": words(engine)} | fields
    return engine.generate(prompt="the first", sampling_params=params)


@functools.cache
def words(engine):
    """Tokens of a space and two or more letters, none of which contains another's text."""
    pieces = {token: engine._tokenizer.decode([token]) for token in range(320)}
    return [
        token
        for token, text in pieces.items()
        if len(text) > 2 and text[0] == " " and text[1:].isalpha() and text.isascii()
    ]


@pytest.fixture(scope="module")
def plain(text_engine):
    """Words without a stop, and the tokens' texts."""
    out = text_of(text_engine)
    pieces = [text_engine._tokenizer.decode([token]) for token in out["output_ids"]]
    assert out["text"] == "".join(pieces)
    assert len(set(pieces)) > 3
    return out["text"], out["output_ids"], pieces


def across(pieces):
    """A string over the end of one token and the beginning of the next, and where it is."""
    whole = "".join(pieces)
    for last in range(3, len(pieces)):
        stop = pieces[last - 1][-1] + pieces[last][:2]
        begin = len("".join(pieces[:last])) - 1
        if whole.find(stop) == begin:
            return stop, begin, last
    raise AssertionError(whole)


class TestText:
    def test_stop_across_tokens(self, text_engine, plain):
        text, ids, pieces = plain
        stop, begin, last = across(pieces)
        out = text_of(text_engine, stop=stop)
        assert out["text"] == text[:begin]
        assert out["output_ids"] == ids[: last + 1]
        assert out["meta_info"]["completion_tokens"] == last + 1

    def test_include_stop_str_in_output(self, text_engine, plain):
        text, ids, pieces = plain
        stop, begin, last = across(pieces)
        out = text_of(text_engine, stop=stop, include_stop_str_in_output=True)
        assert out["text"] == text[: begin + len(stop)]
        assert out["output_ids"] == ids[: last + 1]

    def test_include_stop_str_in_output_of_a_stop_token(self, text_engine, plain):
        _, ids, pieces = plain
        cut = next(i for i in range(3, 24) if ids[i] not in ids[:i])
        for include, count in ((False, cut), (True, cut + 1)):
            out = text_of(
                text_engine, stop_token_ids=[ids[cut]], include_stop_str_in_output=include
            )
            assert out["output_ids"] == ids[: cut + 1]
            assert out["text"] == "".join(pieces[:count])

    def test_min_new_tokens_and_stop(self, text_engine, plain):
        """A stop string that the tokens up to min_new_tokens complete does not count."""
        text, ids, pieces = plain
        stop, begin, last = across(pieces)
        once = text.count(stop) == 1
        for minimum in (0, last, last + 1, 24):
            out = text_of(text_engine, stop=stop, min_new_tokens=minimum)
            if minimum <= last:
                assert out["output_ids"] == ids[: last + 1]
                assert out["text"] == text[:begin]
            else:
                assert len(out["output_ids"]) > last + 1
                assert out["output_ids"] == ids[: len(out["output_ids"])]
                assert out["text"] == text or not once

    def test_detokenize(self, text_engine, plain):
        out = text_of(text_engine, detokenize=False)
        assert out["text"] == ""
        assert out["output_ids"] == plain[1]
        with pytest.raises(InvalidRequestError, match="needs detokenize=True"):
            text_of(text_engine, detokenize=False, stop="x")

    def test_skip_special_tokens(self, text_engine, plain):
        word = plain[1][0]
        fields = {"allowed_token_ids": [IM_START, word], "max_new_tokens": 16}
        hidden = text_of(text_engine, **fields)
        shown = text_of(text_engine, **fields, skip_special_tokens=False)
        assert hidden["output_ids"] == shown["output_ids"]
        assert {IM_START, word} == set(shown["output_ids"])
        assert "<|im_start|>" in shown["text"]
        assert hidden["text"] == shown["text"].replace("<|im_start|>", "")

    def test_spaces_between_special_tokens(self, text_engine, monkeypatch):
        """The tokenizer is told; fast ones, as this, make no difference."""
        tokenizer = text_engine._tokenizer._tokenizer
        decode, told = tokenizer.decode, []

        def recorded(ids, **options):
            told.append(options.get("spaces_between_special_tokens", True))
            return decode(ids, **options)

        words(text_engine)
        monkeypatch.setattr(tokenizer, "decode", recorded)
        fields = {"allowed_token_ids": [IM_START, 30], "skip_special_tokens": False}
        fields["decode_behind_prompt"] = False  # one decode each
        spaced = text_of(text_engine, **fields)
        close = text_of(text_engine, **fields, spaces_between_special_tokens=False)
        assert spaced["text"] == close["text"]
        assert told == [True, False]

    @pytest.mark.parametrize("stream", [False, True])
    def test_decode_behind_prompt(self, text_engine, stream):
        """A character whose bytes begin in the prompt."""
        tokenizer = text_engine._tokenizer
        ids = tokenizer.encode_rendered("a\u00e9")
        prompt, rest = ids[:-1], ids[-1]
        assert tokenizer.decode([rest]) == "\ufffd"
        for fields, text in (({}, "\u00e9"), ({"decode_behind_prompt": False}, "\ufffd")):
            params = {"max_new_tokens": 1, "allowed_token_ids": [rest], **fields}
            made = text_engine.generate(input_ids=prompt, sampling_params=params, stream=stream)
            assert "".join(each["text"] for each in (made if stream else [made])) == text
        # What the output does not complete is the prompt's alone.
        params |= {"allowed_token_ids": [ids[0]], "decode_behind_prompt": True}
        out = text_engine.generate(input_ids=prompt, sampling_params=params)
        assert out["text"] == tokenizer.decode([ids[0]])

    def test_reasoning_tags(self, text_engine, plain):
        """Stop strings count behind the thoughts that the text begins with."""
        text, _, pieces = plain
        stop = text[0]
        ends_at = len("".join(pieces[:6]))
        closing = text[ends_at - 3 : ends_at]
        first = text.find(closing) + len(closing)
        assert text.find(stop, first) > 0
        opening = text.lstrip()[:3]
        for tags, start in ((("", closing), first), ((opening, closing), first), (("no", "x"), 0)):
            out = text_of(text_engine, stop=stop, reasoning_tags=tags)
            assert out["text"] == text[: text.find(stop, start)]
        assert text_of(text_engine, stop=stop, reasoning_tags=("", "never"))["text"] == text

    @pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|>\n"])
    def test_a_stop_string_that_is_a_special_token(self, text_engine, stop):
        """The text never holds it."""
        fields = {"allowed_token_ids": [IM_START, 30], "logit_bias": {IM_START: 3.0}}
        out = text_of(text_engine, stop=["never", stop], **fields)
        assert out["output_ids"].index(IM_START) == len(out["output_ids"]) - 1
        assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": IM_START}
        shown = text_of(text_engine, stop=[stop.strip()], skip_special_tokens=False, **fields)
        assert shown["meta_info"]["finish_reason"]["matched"] == stop.strip()
        assert shown["text"] == out["text"]


class TestRefused:
    @pytest.mark.parametrize("field", FOREIGN_FIELDS.values(), ids=lambda field: field.name)
    def test_field(self, engine, field):
        """An error names the field and what to do instead, unless the value asks for nothing."""
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate(input_ids=[1], sampling_params={field.name: 7})
        assert str(caught.value) == (
            f"sampling field {field.name}=7 is not supported: {field.instead}"
        )
        nothing = [None, "", [], {}, [None, None], *field.neutral]
        for value in [*nothing, False] if field.takes_false else nothing:
            assert SamplingParams.from_dict({field.name: value}) == SamplingParams()

    @pytest.mark.parametrize(
        ("name", "value"),
        [("do_sample", False), ("best_of", True), ("stop_regex", ["", "a"]), ("bad_words", ["a"])],
    )
    def test_what_asks_for_something(self, name, value):
        with pytest.raises(InvalidRequestError, match=f"sampling field {name}="):
            SamplingParams.from_dict({name: value})

    def test_the_seeds_table_is_covered(self):
        """Each row of the table that the engine was asked for is a field or is refused."""
        fields = {field.name for field in dataclasses.fields(SamplingParams)}
        assert not fields & set(FOREIGN_FIELDS)
        assert set(SEED_ROWS.split()) <= fields | set(FOREIGN_FIELDS)

    VALUES = (
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\], got 0.0"),
        ({"repetition_penalty": 1e-30}, r"repetition_penalty must be in \[0.01, 100\]"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\], got -2.1"),
        ({"top_k": -1.0}, "top_k must be an integer .* got -1.0"),
        ({"top_k": 0.0}, "top_k must be an integer .* got 0.0"),
        ({"top_k": False}, "top_k must be an integer .* got False"),
        ({"top_k": -2}, "top_k must be >= 1 .* got -2"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\] must be in \[-100, 100\], got 101"),
        ({"logit_bias": {-1: 1}}, "logit_bias token id must be >= 0, got -1"),
        ({"logit_bias": {"x": 1}}, "logit_bias token id must be an integer"),
        ({"logit_bias": {"5": 1, 5: 2}}, "logit_bias must name each token id once"),
        ({"logit_bias": [5]}, "logit_bias must map"),
        ({"logit_bias": {128: 1}}, r"logit_bias must be in \[0, 128\), got 128"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be None or hold a token"),
        ({"allowed_token_ids": [128]}, r"allowed_token_ids must be in \[0, 128\), got 128"),
        ({"bad_token_ids": [500]}, r"bad_token_ids must be in \[0, 128\), got 500"),
        ({"bad_token_ids": list(range(128))}, "must leave a token"),
        ({"allowed_token_ids": [5], "bad_token_ids": [5]}, "must hold a token that is not in bad"),
        ({"allowed_token_ids": [TINY_EOS], "min_new_tokens": 1}, "must leave a token"),
        (
            {"bad_token_ids": [t for t in range(128) if t != TINY_EOS], "min_new_tokens": 1},
            "must leave a token",
        ),
        ({"min_new_tokens": 13}, r"min_new_tokens must be between 0 and 12 \(max_new_tokens\)"),
        ({"stop": ["x"]}, r"stop=\['x'\] needs a tokenizer"),
        ({"stop": [""]}, "stop must hold non-empty strings"),
        ({"reasoning_tags": ("<think>",)}, "reasoning_tags must be None or two strings"),
        ({"reasoning_tags": ("<think>", "")}, "reasoning_tags must be None or two strings"),
        ({"detokenize": 0}, "detokenize must be True or False"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False"),
        ({"n": 0}, "n must be >= 1, got 0"),
    )

    @pytest.mark.parametrize(("fields", "message"), VALUES)
    def test_value(self, engine, fields, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 12} | fields)

    def test_neutral_neighbours_of_refused_values_are_fine(self, engine):
        """What leaves one token is accepted and generates it."""
        all_but = [token for token in range(128) if token != TINY_EOS]
        out = run(engine, bad_token_ids=all_but, ignore_eos=False)
        assert out.output_ids == [TINY_EOS]
        out = run(engine, allowed_token_ids=[TINY_EOS, 5], min_new_tokens=12, ignore_eos=False)
        assert out.output_ids == [5] * 12

    def test_round_trip(self):
        params = SamplingParams.from_dict(
            {"logit_bias": {"3": 1}, "stop": "x", "bad_token_ids": np.array([4])}
        )
        assert SamplingParams.from_dict(params.to_dict()) == params
        assert params.logit_bias == {3: 1.0}
