"""generation_config.json of generated folders: transformers' probabilities, or one warning."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from sgljax_engine import InvalidConfigError, InvalidRequestError, SamplingParams, load_model_config
from sgljax_engine.processing import generation_defaults
from sgljax_engine.processing.generation_defaults import read_generation_defaults
from sgljax_engine.sampling_params import _SWITCHES as SWITCHES
from sgljax_engine.structured_outputs import with_own_names
from tests.engine.models import TINY
from tests.engine.small_tokenizers import GOLDEN
from tests.folders import generation_cases as cases

PROBS = np.load(Path(__file__).with_name("generation_goldens.npz"))["probs"]
MODEL = dataclasses.replace(
    TINY, vocab_size=cases.VOCAB_SIZE, eos_token_ids=cases.END, context_length=64
)


@pytest.fixture
def read(tmp_path, caplog):
    """Parameters of a file, and the warning's part for each field without effect."""

    def of(contents, has_tokenizer=True):
        (tmp_path / "generation_config.json").write_text(json.dumps(contents))
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="sgljax_engine"):
            params = read_generation_defaults(tmp_path, MODEL, has_tokenizer=has_tokenizer)
        start = f"{tmp_path / 'generation_config.json'}: without effect here: "
        assert all(record.message.startswith(start) for record in caplog.records)
        assert len(caplog.records) <= 1
        text = "".join(record.message.removeprefix(start) for record in caplog.records)
        return params, text

    return of


def probabilities(params: SamplingParams, output: tuple[int, ...]) -> np.ndarray:
    """What SamplingParams' docstring makes of the logits, in float64: [V]."""
    logits = np.array(cases.LOGITS)
    logits[list(params.bad_token_ids)] = -np.inf
    if len(output) < params.min_new_tokens:
        logits[list(cases.END)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*cases.PROMPT, *output}:
        penalty = params.repetition_penalty
        logits[token] *= penalty if logits[token] < 0 else 1 / penalty
    logits /= params.temperature
    order = np.argsort(-logits, kind="stable")
    if params.top_k is not None and params.top_k > 0:
        logits[order[params.top_k :]] = -np.inf
    probs = _softmax(logits)
    reached = np.cumsum(probs[order]) - probs[order]  # by more likely tokens
    logits[order[reached >= params.top_p]] = -np.inf
    probs = _softmax(logits)
    logits[probs < params.min_p * probs.max()] = -np.inf
    return _softmax(logits)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_files_of_honoured_fields_give_transformers_probabilities(read):
    for contents, golden in zip(cases.honoured(), PROBS, strict=True):
        params, unused = read(contents)
        assert unused == "", contents
        for output, wanted in zip(cases.OUTPUTS, golden, strict=True):
            np.testing.assert_allclose(
                probabilities(params, output), wanted, atol=1e-5, err_msg=str(contents)
            )


def test_other_fields_and_values_are_named_and_change_nothing(read):
    for contents, names in cases.others():
        params, unused = read(contents)
        for name in names:
            assert name in unused, contents
        rest, _ = read({k: v for k, v in contents.items() if k not in names})
        assert params == rest, contents


def test_each_such_field_alone(read):
    for name, values in cases.OTHER.items():
        for value in values:
            params, unused = read({name: value})
            assert name in unused, value
            assert params == SamplingParams(), (name, value)


def test_no_field_that_is_left_out_has_a_counterpart():
    """A new field of SamplingParams would be ignored in folders' files, without a warning."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not fields & generation_defaults._NEUTRAL.keys()
    assert not fields & generation_defaults._WITHOUT_EFFECT


def test_a_file_as_transformers_saves_it_is_not_warned_of(read):
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[0, 7])
    params, unused = read(json.loads(config.to_json_string()))
    assert unused == ""
    assert params == SamplingParams(temperature=0.6, top_p=0.9)
    if hasattr(config, "_get_default_generation_params"):
        defaults = config._get_default_generation_params()
        _, unused = read(defaults)
        assert unused == "max_length=20"  # which would cut every answer


def test_greedy_files_and_stop_strings(read):
    assert read({"do_sample": False, "temperature": 0.7})[0].temperature == 0.0
    assert read({"temperature": 0})[0].temperature == 0.0
    assert read({"stop_strings": "END"})[0].stop == ("END",)
    assert read({"stop_strings": ["a", "b"]})[0].stop == ("a", "b")
    params, unused = read({"stop_strings": ["a"]}, has_tokenizer=False)
    assert params.stop == ()
    assert unused == "stop_strings=['a']: there is no tokenizer"


def test_a_minimum_above_the_maximum_is_named(read):
    params, unused = read({"min_new_tokens": 9, "max_new_tokens": 4})
    assert (params.min_new_tokens, params.max_new_tokens) == (0, 4)
    assert unused == "min_new_tokens=9: above max_new_tokens=4"


DEFAULTS = SamplingParams(
    min_new_tokens=5, max_new_tokens=20, bad_token_ids=(3,), stop=("END",), top_p=0.9
)


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"max_new_tokens": None, "top_p": None}, {}),
        ({"max_new_tokens": 2}, {"max_new_tokens": 2, "min_new_tokens": 2}),
        ({"min_new_tokens": 30}, {"max_new_tokens": 30, "min_new_tokens": 30}),
        ({"detokenize": False}, {"detokenize": False, "stop": ()}),
        ({"allowed_token_ids": [3]}, {"allowed_token_ids": [3], "bad_token_ids": ()}),
        ({"stop": "x"}, {"stop": "x"}),
    ],
)
def test_defaults_give_way_to_what_a_request_brings(given, changed):
    assert DEFAULTS.override(given) == dataclasses.replace(DEFAULTS, **changed)


VALID: tuple[dict[str, Any], ...] = (
    *({"n": n} for n in (1, 3)),
    *({"temperature": t} for t in (0.0, 0.7)),
    *({"top_k": k} for k in (-1, 0, 20, 512, 513, np.int64(9000))),
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"presence_penalty": 1.0},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 1.2},
    {"logit_bias": {3: -100.0}},
    *({"allowed_token_ids": ids} for ids in ([3], (3, 4))),
    *({"bad_token_ids": ids} for ids in ((), (3,), [3, 4])),
    {"seed": 5},
    *({"max_new_tokens": most} for most in (0, 2, 40, np.int64(2))),
    *({"min_new_tokens": least} for least in (0, 3, 30, np.int32(30))),
    *({"stop": stop} for stop in ("x", [], ["a", "b"])),
    {"stop_token_ids": [7]},
    {"reasoning_tags": ("<a>", "</a>")},
    {"max_thinking_tokens": 4, "reasoning_tags": ("<b>", "</b>")},
    *({"structured_outputs": kind} for kind in ({"regex": "a+"}, {"json_object": True})),
    {"json_schema": {"type": "object"}},
    *({name: is_on} for name in SWITCHES for is_on in (False, True)),
)
"""Each is valid alone; all fields are among them."""


def test_a_default_is_never_why_a_request_fails():
    """What is valid without defaults is valid with any, and stays as it is."""

    @functools.cache
    def made(*case: int) -> SamplingParams | None:
        try:
            return SamplingParams.from_dict(fields_of(case))
        except InvalidRequestError:
            return None

    def fields_of(case: tuple[int, ...]) -> dict[str, Any]:
        return {name: value for index in case for name, value in VALID[index].items()}

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names | {"json_schema"} == fields_of(tuple(range(len(VALID)))).keys()
    pairs = itertools.product(range(len(VALID)), repeat=2)
    drawn = np.random.default_rng(0).integers(len(VALID), size=(400, 4)).tolist()
    for case in (*pairs, *drawn):
        half = len(case) // 2
        defaults, given, alone = made(*case[:half]), fields_of(case[half:]), made(*case[half:])
        if defaults is None or alone is None:
            continue
        found = defaults.override(given)
        for name in with_own_names(given):
            assert getattr(found, name) == getattr(alone, name), (case, name)


def test_what_a_request_brings_is_still_checked():
    with pytest.raises(InvalidRequestError, match=r"top_p must be in \(0, 1\], got 0"):
        DEFAULTS.override({"top_p": 0})
    with pytest.raises(InvalidRequestError, match="min_new_tokens must be between 0 and 2"):
        DEFAULTS.override({"max_new_tokens": 2, "min_new_tokens": 3})


@pytest.mark.parametrize("value", ["2", ["a"], [[1]], 2.0, True, list(range(17))])
def test_end_tokens_that_are_none_are_refused_with_the_file(tmp_path, value):
    config = (GOLDEN / "qwen3_gqa_tied" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InvalidConfigError, match=r"generation_config.json: eos_token_id must be"):
        load_model_config(tmp_path)
