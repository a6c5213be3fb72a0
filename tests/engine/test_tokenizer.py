"""Text in, text out: every kind of tokenizer that users bring."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece as spm

from sgljax_engine import Engine, EngineError, InvalidConfigError
from sgljax_engine.tokenizer import (
    HFTokenizer,
    SentencePieceTokenizer,
    TunixTokenizer,
    load_tokenizer,
    wrap_tokenizer,
)
from tests.engine.models import TINY, spread_weights

GOLDEN = Path(__file__).parents[1] / "golden"


class CharTokenizer:
    """A user's own tokenizer with Tunix's methods."""

    def __init__(self, bos=1):
        self.bos = bos
        self.poison = None
        self.error: type[BaseException] = RuntimeError

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        if self.poison in ids:
            raise self.error(f"cannot decode {self.poison}")
        return "".join(chr(i) for i in ids)

    def bos_id(self):
        return self.bos

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def test_hf_folder():
    tokenizer = load_tokenizer(GOLDEN / "qwen3_gqa_tied")
    assert isinstance(tokenizer, HFTokenizer)
    ids = tokenizer.encode("hello")
    assert "hello" in tokenizer.decode(ids)
    eos = tokenizer.eos_token_id
    assert eos is not None
    assert tokenizer.decode([*ids, eos]) == tokenizer.decode(ids)
    assert load_tokenizer(GOLDEN / "qwen3_mqa_untied") is None


def test_sentencepiece():
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "jumps over the lazy dog"] * 20),
        model_writer=model,
        vocab_size=32,
        pad_id=3,
        minloglevel=2,
    )
    processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = wrap_tokenizer(processor)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    ids = tokenizer.encode("the fox")
    assert ids[0] == processor.bos_id()
    assert tokenizer.decode(ids[1:]) == "the fox"
    assert tokenizer.eos_token_id == processor.eos_id()


@pytest.mark.parametrize(
    ("bos", "expected"), [(1, [1, 97]), (0, [97]), (None, [97]), (97, [97]), (-1, [97])]
)
def test_tunix_methods_and_bos(bos, expected):
    tokenizer = wrap_tokenizer(CharTokenizer(bos))
    assert isinstance(tokenizer, TunixTokenizer)
    assert tokenizer.encode("a") == expected


def test_anything_else_is_refused():
    with pytest.raises(InvalidConfigError, match="got int"):
        wrap_tokenizer(7)


def test_engine_text_leaves_out_the_stop_token():
    with Engine(model_config=TINY, weights=spread_weights(), tokenizer=CharTokenizer()) as engine:
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        out = engine.generate("ab", params)
        assert out["meta_info"]["prompt_tokens"] == 3
        assert out["text"] == "".join(map(chr, out["output_ids"]))
        stop = out["output_ids"][3]
        cut = engine.generate("ab", params | {"stop_token_ids": [stop]})
        assert cut["output_ids"][-1] == stop
        assert cut["text"] == "".join(map(chr, cut["output_ids"][:-1]))
        both = engine.generate(["ab", "c"], params)
        assert both[0]["text"] == out["text"]


class Panic(BaseException):
    """What a tokenizer written in Rust raises when it panics is no Exception either."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_tokenizer_that_raises_fails_its_request_only(error):
    tokenizer = CharTokenizer()
    tokenizer.error = error
    with Engine(model_config=TINY, weights=spread_weights(), tokenizer=tokenizer) as engine:
        params = {"temperature": 0, "max_new_tokens": 4}
        out = engine.generate(input_ids=[5], sampling_params=params)
        tokenizer.poison = out["output_ids"][0]
        with pytest.raises(EngineError, match=f"cannot decode {tokenizer.poison}"):
            engine.generate(input_ids=[5], sampling_params=params)
        tokenizer.poison = None
        assert engine.generate(input_ids=[5], sampling_params=params)["text"] == out["text"]
