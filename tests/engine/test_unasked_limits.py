"""Requests without new tokens, without a maximum, and with seeds of the whole range."""

from __future__ import annotations

import json
import shutil
from typing import Any, ClassVar

import numpy as np
import pytest

from sgljax_engine import Engine, InvalidRequestError, SamplingParams
from tests.engine.models import TINY, spread_weights
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL

PROMPTS = [[5, 9, 33, 2, 60, 9], [8], [3, 4, 5, 6]]


@pytest.fixture(scope="module")
def engine():
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        yield engine


class TestNoNewTokens:
    """A request that only prefills, as distillation and reward servers ask."""

    FIELDS: ClassVar[dict[str, Any]] = {
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
    }

    def check(self, engine, prompt, out):
        assert (out["text"], out["output_ids"]) == ("", [])
        meta = out["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["completion_tokens"] == 0
        assert meta["output_token_logprobs"] == []
        logprobs = [entry[0] for entry in meta["input_token_logprobs"]]
        assert logprobs[0] is None
        expected = engine.score([prompt])[0]
        np.testing.assert_allclose(logprobs[1:], expected, atol=1e-4)

    def test_one_and_many(self, engine):
        one = engine.generate(input_ids=PROMPTS[0], logprob_start_len=0, **self.FIELDS)
        self.check(engine, PROMPTS[0], one)
        many = engine.generate(input_ids=PROMPTS, logprob_start_len=0, **self.FIELDS)
        for prompt, out in zip(PROMPTS, many, strict=True):
            self.check(engine, prompt, out)

    def test_a_stream_has_one_piece_each(self, engine):
        pieces = list(
            engine.generate(input_ids=PROMPTS, logprob_start_len=0, stream=True, **self.FIELDS)
        )
        assert sorted(piece["index"] for piece in pieces) == [0, 1, 2]
        for piece in pieces:
            self.check(engine, PROMPTS[piece["index"]], piece)

    def test_the_token_that_is_not_reported_decides_nothing(self, engine):
        """Also where it is a stop token, and in a batch with others."""
        bias = {"logit_bias": {40: 100.0}, "stop_token_ids": [40]}
        params = [{"max_new_tokens": 0, **bias}, {"max_new_tokens": 3, "ignore_eos": True}]
        first, second = engine.generate(input_ids=PROMPTS[:2], sampling_params=params)
        assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert len(second["output_ids"]) == 3
        engine.check_integrity()


class TestNoMaximum:
    def test_it_is_cut_to_what_fits(self, engine):
        fields = {"ignore_eos": True, "temperature": 0}
        for params in (fields, SamplingParams(**fields), fields | {"max_new_tokens": None}):
            out = engine.generate(input_ids=[7] * 242, sampling_params=params)
            assert len(out["output_ids"]) == 14
        assert len(engine.generate(input_ids=[7] * 255)["output_ids"]) == 1

    def test_a_folders_number_is_no_ones(self, tmp_path):
        folder = tmp_path / "model"
        shutil.copytree(GOLDEN / "qwen3_gqa_tied", folder)
        path = folder / "generation_config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**config, "max_new_tokens": 2048, "eos_token_id": 1}))
        with Engine(folder, **SMALL) as engine:
            assert engine.get_default_sampling_params().max_new_tokens == 2048
            count = len(engine.tokenize("the fox"))
            out = engine.generate("the fox")
            assert len(out["output_ids"]) <= 512 - count
            pieces = list(engine.generate("the fox", stream=True))
            assert pieces[-1]["meta_info"]["finish_reason"] is not None
            assert engine.chat([{"role": "user", "content": "a"}])["output_ids"]
            with pytest.raises(InvalidRequestError, match="2048"):
                engine.generate("the fox", {"max_new_tokens": 2048})


class TestSeeds:
    def sample(self, engine, seed):
        params = {"seed": seed, "max_new_tokens": 12, "n": 2, "ignore_eos": True}
        return [o["output_ids"] for o in engine.generate(input_ids=[5, 9], sampling_params=params)]

    @pytest.mark.parametrize("seed", [-2, -(2**63), 2**63 - 1])
    def test_the_whole_range_is_reproducible(self, engine, seed):
        assert self.sample(engine, seed) == self.sample(engine, seed)
        assert self.sample(engine, seed) != self.sample(engine, 5)

    def test_minus_one_is_any(self, engine):
        assert self.sample(engine, -1) != self.sample(engine, -1)
