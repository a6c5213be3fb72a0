"""Tunix's own TokenizerAdapter in front of every kind of tokenizer."""

from __future__ import annotations

import pytest
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import InvalidRequestError
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.conversation import conversation_ids
from sgljax_engine.processing.tokenizer import DecodeOptions
from sgljax_engine.processing.tunix_tokenizer import TunixHFTokenizer, TunixTokenizer
from tests import tunix_reference as ref
from tests.adapter.helpers import new_rollout, rollout_config, tokens_of
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


def test_hugging_face_wrapped_twice_as_by_tunix_command_line():
    hugging_face = small_tokenizers.byte_level()
    tokenizer = wrap_tokenizer(TokenizerAdapter(TokenizerAdapter(hugging_face)))
    assert isinstance(tokenizer, TunixHFTokenizer)
    ids = [*tokenizer.encode("hi"), hugging_face.eos_token_id]
    assert tokenizer.decode(ids) == "hi"  # special tokens are left out


def test_chat_of_hugging_face_inside():
    tokenizer = wrap_tokenizer(TokenizerAdapter(small_tokenizers.byte_level()))
    ids = conversation_ids(tokenizer, ASK, add_generation_prompt=False)
    keep = DecodeOptions(skip_special_tokens=False)
    # Tunix puts BOS in front of all prompts and takes control tokens out of contents.
    assert tokenizer.decode(ids, keep) == "<|bos|><|im_start|>user\nthe fox<|im_end|>\n"


def test_sentencepiece_inside_leaves_ids_out_that_only_the_model_has():
    processor = small_tokenizers.sentencepiece()
    ids = processor.EncodeAsIds("the cat")
    tokenizer = wrap_tokenizer(TokenizerAdapter(processor))
    assert tokenizer.decode([*ids, processor.GetPieceSize()]) == processor.DecodeIds(ids)


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
    ids = conversation_ids(tokenizer, ASK, add_generation_prompt=True)
    text = "<start_of_turn>user\nthe fox<end_of_turn>\n<start_of_turn>model\n"
    assert ids == tokenizer.encode(text)
    system = [{"role": "system", "content": "x"}, *ASK]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\['role'\] .*got 'system'"):
        conversation_ids(tokenizer, system, add_generation_prompt=True)
    with pytest.raises(InvalidRequestError, match=r"template_options .*got \['tools'\]"):
        conversation_ids(tokenizer, ASK, add_generation_prompt=True, template_options={"tools": []})


class Shouting(TokenizerAdapter):
    """An adapter that decodes in its own way."""

    def decode(self, ids, **kwargs):
        return super().decode(ids, **kwargs).upper()


def test_an_adapters_own_decode_is_kept():
    adapter = Shouting(small_tokenizers.byte_level())
    tokenizer = wrap_tokenizer(adapter)
    assert type(tokenizer) is TunixTokenizer
    assert tokenizer.decode(adapter.encode("hi")) == "HI"


@pytest.fixture(scope="module")
def small_model():
    """A model whose every token each of the tokenizers can decode."""
    size = small_tokenizers.sentencepiece().GetPieceSize()
    assert size <= len(small_tokenizers.byte_level())
    return ref.make_tunix_qwen3(ref.CONFIGS["gqa2_tied"] | {"vocab_size": size})


@pytest.fixture(scope="module")
def by_ids(small_model):
    """A rollout of the same model whose texts are token ids."""
    rollout = new_rollout(small_model)
    yield rollout
    rollout.close()


def hugging_face_text(ids):
    tokenizer = small_tokenizers.byte_level()
    # Tunix's samplers leave special tokens in.
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


ROLLOUTS = {
    "Hugging Face": (small_tokenizers.byte_level, hugging_face_text),
    "SentencePiece": (
        small_tokenizers.sentencepiece,
        lambda ids: small_tokenizers.sentencepiece().DecodeIds(ids),
    ),
    "custom": (small_tokenizers.CharTokenizer, lambda ids: "".join(map(chr, ids))),
}


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [("Hugging Face", False), ("Hugging Face", True), ("SentencePiece", False), ("custom", True)],
)
def test_rollouts(small_model, by_ids, kind, adapted):
    """Prompts are encoded as Tunix does, and the output's text is what the tokenizer decodes."""
    make, text_of = ROLLOUTS[kind]
    adapter = TokenizerAdapter(make())
    texts = ["the quick", "quick! don't"]
    bos = adapter.bos_id()
    prompts = [[bos] * (bos > 0) + list(adapter.encode(text)) for text in texts]
    rollout = new_rollout(small_model, tokenizer=adapter if adapted else make())
    try:
        config = rollout_config(max_tokens_to_generate=24, return_logprobs=True)
        output = rollout.generate(texts, config)
    finally:
        rollout.close()
    for row, ids in zip(output.left_padded_prompt_tokens, prompts, strict=True):
        assert row.tolist() == [adapter.pad_id()] * (len(row) - len(ids)) + ids
    tokens = [row.tolist() for row in output.tokens]
    assert tokens == tokens_of(by_ids, prompts, max_tokens_to_generate=24)
    assert output.text == [text_of(ids) for ids in tokens]
    assert all(output.text)
    assert [len(row) for row in output.logprobs or ()] == [24, 24]
