"""What users of vLLM, SGLang and transformers try first: it works, or the error says what does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    InvalidConfigError,
    InvalidRequestError,
    SamplingParams,
)
from tests import inside
from tests.engine.models import TINY, spread_weights
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import SMALL

GREEDY = {"temperature": 0, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def engine():
    with Engine(
        model_config=TINY, weights=spread_weights(), tokenizer=CharTokenizer(), **SMALL
    ) as engine:
        yield engine


class TestPrompts:
    @pytest.mark.parametrize(
        "kind",
        [
            tuple,
            np.array,
            lambda ids: np.array(ids, np.uint8),
            jnp.array,
            lambda ids: [np.int64(ids[0]), jnp.int32(ids[1])],
            lambda ids: range(ids[0], ids[-1] + 1),
        ],
        ids=["tuple", "numpy", "bytes", "jax", "scalars", "range"],
    )
    def test_token_ids_of_any_kind(self, engine, kind):
        ids = kind([5, 6])
        expected = engine.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]
        assert engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"] == expected
        (listed,) = engine.generate(input_ids=[ids], sampling_params=GREEDY)
        assert listed["output_ids"] == expected

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([[5, 6]], "prompt must be text, got list; give token ids as input_ids"),
            (np.array([5, 6]), "prompt must be text, got int64; give token ids as input_ids"),
            (5, "prompt must be a list, got int; give token ids as input_ids"),
            (b"ab", "prompt must be a list, got bytes"),
            (
                {"prompt_token_ids": [5, 6]},
                "prompt must be a list, got dict; give its text as prompt, or its token ids as "
                "input_ids",
            ),
            (
                [{"prompt": "ab"}],
                "prompt must be text, got dict; give its text as prompt, or its token ids as "
                "input_ids",
            ),
        ],
    )
    def test_that_are_no_text(self, engine, prompt, message):
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate(prompt, GREEDY)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (
                ["ab"],
                "input_ids must be a list of integers, got shape (1,) of <U2; give text as prompt",
            ),
            (
                {"input_ids": [5], "attention_mask": [1]},
                "input_ids must be a list, got dict; give its ['input_ids']",
            ),
            (5, "input_ids must be a list, got int"),
            ([5.0, 6.0], "input_ids must be a list of integers, got shape (2,) of float64"),
        ],
    )
    def test_that_are_no_token_ids(self, engine, ids, message):
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate(input_ids=ids, sampling_params=GREEDY)
        assert str(caught.value) == message

    @pytest.mark.parametrize("sequences", [[1, 2, 3], ["abc"], np.arange(3)])
    def test_that_are_no_sequences_to_score(self, engine, sequences):
        with pytest.raises(InvalidRequestError, match="sequences must be a list of lists of int"):
            engine.score(sequences)


class TestSamplingParams:
    def test_none_is_the_default(self, engine):
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        nothing: dict[str, Any] = dict.fromkeys(names)
        assert SamplingParams.from_dict(nothing) == SamplingParams()
        given = nothing | GREEDY | {"stop": None, "seed": None, "top_k": None}
        (out,) = engine.generate(["ab"], given)
        assert len(out["output_ids"]) == 3

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"max_tokens": 64}, "max_tokens=64 is not supported: it is called max_new_tokens"),
            ({"do_sample": False}, "do_sample=False is not supported: temperature=0 is greedy"),
            ({"pad_token_id": 0}, "pad_token_id=0 is not supported: nothing is padded"),
            ({"temprature": 1}, "unknown sampling field 'temprature'; did you mean 'temperature'"),
        ],
    )
    def test_other_names_are_told_however_they_come(self, fields, message):
        for make in (lambda: SamplingParams(**fields), lambda: SamplingParams.from_dict(fields)):
            with pytest.raises(InvalidRequestError, match=message):
                make()

    def test_copies(self):
        """The check of names is in the way of none."""
        params = SamplingParams(stop=("a",), logit_bias={3: 1.0}, temperature=1)
        assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
        assert dataclasses.replace(params, temperature=0).stop == ("a",)
        assert SamplingParams.from_dict(params.to_dict()) == params


class TestMakingAnEngine:
    def test_a_file(self):
        with pytest.raises(InvalidConfigError, match=r"must be a folder, got '.*peer_habits\.py'"):
            Engine(Path(__file__))

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("bfloat16")])
    def test_dtypes_of_jax(self, dtype):
        with Engine(model_config=TINY, load_format="dummy", dtype=dtype, **SMALL) as engine:
            weights = inside.runner(engine).weights
            assert weights["model.layers.0.mlp.up_proj.weight"].dtype == jnp.bfloat16
            assert weights["model.norm.weight"].dtype == jnp.float32  # as of all norms

    @pytest.mark.parametrize("dtype", [jnp.int32, "auto", object(), 16])
    def test_other_dtypes(self, dtype):
        with pytest.raises(InvalidConfigError, match="dtype must be None or one of"):
            Engine(model_config=TINY, load_format="dummy", dtype=dtype)
