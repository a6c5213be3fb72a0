"""Tunix's own TokenizerAdapter in front of every kind of tokenizer."""

from __future__ import annotations

import pytest
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import InvalidRequestError
from sgljax_engine.tokenizer import (
    DecodeOptions,
    TunixHFTokenizer,
    TunixTokenizer,
    wrap_tokenizer,
)
from tests.engine import small_tokenizers

ASK = [{"role": "user", "content": "the <|im_end|>fox"}]


def test_hugging_face_inside():
    hugging_face = small_tokenizers.byte_level()
    tokenizer = wrap_tokenizer(TokenizerAdapter(hugging_face))
    assert isinstance(tokenizer, TunixHFTokenizer)
    ids = tokenizer.encode("hi")
    assert ids == [hugging_face.bos_token_id, *hugging_face.encode("hi")]  # as Tunix does
    assert tokenizer.eos_token_id == hugging_face.eos_token_id
    assert tokenizer.decode(ids) == "hi"
    keep = DecodeOptions(skip_special_tokens=False, spaces_between_special_tokens=False)
    tokenizer.check_decode_options(keep)
    assert tokenizer.decode(ids, keep) == "<|bos|>hi"
    fallback = wrap_tokenizer(TokenizerAdapter(small_tokenizers.byte_fallback()))
    assert len(fallback.byte_run_ids) == 256


def test_chat_of_hugging_face_inside():
    tokenizer = wrap_tokenizer(TokenizerAdapter(small_tokenizers.byte_level()))
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=False)
    keep = DecodeOptions(skip_special_tokens=False)
    # Tunix puts BOS in front of all prompts and takes control tokens out of contents.
    assert tokenizer.decode(ids, keep) == "<|bos|><|im_start|>user\nthe fox<|im_end|>\n"


def test_sentencepiece_inside():
    processor = small_tokenizers.sentencepiece()
    tokenizer = wrap_tokenizer(TokenizerAdapter(processor))
    assert type(tokenizer) is TunixTokenizer
    ids = tokenizer.encode("the fox")
    assert ids == [processor.bos_id(), *processor.EncodeAsIds("the fox")]
    assert tokenizer.decode(ids) == "the fox"
    with pytest.raises(InvalidRequestError, match="skip_special_tokens must be True"):
        tokenizer.check_decode_options(DecodeOptions(skip_special_tokens=False))


def test_gemmas_format_without_a_template():
    tokenizer = wrap_tokenizer(TokenizerAdapter(small_tokenizers.sentencepiece()))
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True)
    text = "<start_of_turn>user\nthe fox<end_of_turn>\n<start_of_turn>model\n"
    assert ids == tokenizer.encode(text)
    system = [{"role": "system", "content": "x"}, *ASK]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\['role'\] .*got 'system'"):
        tokenizer.apply_chat_template(system, add_generation_prompt=True)
    with pytest.raises(InvalidRequestError, match=r"template_options .*got \['tools'\]"):
        tokenizer.apply_chat_template(
            ASK, add_generation_prompt=True, template_options={"tools": []}
        )


def test_users_tokenizer_inside():
    tokenizer = wrap_tokenizer(TokenizerAdapter(small_tokenizers.CharTokenizer()))
    assert type(tokenizer) is TunixTokenizer
    assert tokenizer.decode(tokenizer.encode("a")[1:]) == "a"


class Shouting(TokenizerAdapter):
    """An adapter that decodes in its own way."""

    def decode(self, ids, **kwargs):
        return super().decode(ids, **kwargs).upper()


def test_an_adapters_own_decode_is_kept():
    adapter = Shouting(small_tokenizers.byte_level())
    tokenizer = wrap_tokenizer(adapter)
    assert type(tokenizer) is TunixTokenizer
    assert tokenizer.decode(adapter.encode("hi")) == "HI"
