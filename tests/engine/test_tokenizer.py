"""Text in, text out: every kind of tokenizer that users bring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import processors
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import Engine, EngineError, InvalidConfigError, InvalidRequestError
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.conversation import conversation_ids
from sgljax_engine.processing.hf_tokenizer import HFTokenizer
from sgljax_engine.processing.tokenizer import DecodeOptions
from sgljax_engine.processing.tokenizer_folder import load_tokenizer
from sgljax_engine.processing.tunix_tokenizer import SentencePieceTokenizer, TunixTokenizer
from tests.engine import small_tokenizers
from tests.engine.models import TINY, spread_weights
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden"
WRITES_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if loud %}!{% endif %}{% endfor %}"
)
ASK = [{"role": "user", "content": "hi"}]


def hugging_face(**options):
    """A byte-level tokenizer that puts BOS in front of all it encodes."""
    base = small_tokenizers.byte_level()
    rust = type(base.backend_tokenizer).from_str(base.backend_tokenizer.to_str())
    rust.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", base.bos_token_id)]
    )
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **special, **options)


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
    processor = small_tokenizers.sentencepiece(byte_fallback=False)
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


def test_hugging_face_decode_options():
    tokenizer = wrap_tokenizer(small_tokenizers.byte_level())
    eos = tokenizer.eos_token_id
    ids = [eos, eos, *tokenizer.encode("hi")]
    assert tokenizer.decode(ids) == "hi"
    keep = DecodeOptions(skip_special_tokens=False)
    # transformers 5 puts no spaces between special tokens, whatever is asked for.
    for options in (keep, keep._replace(spaces_between_special_tokens=False)):
        tokenizer.check_decode_options(options)
        assert tokenizer.decode(ids, options) == "<|eos|><|eos|>hi"


def test_spaces_are_not_cleaned_up():
    name = "clean_up_tokenization_spaces"
    forced = {name: True, f"{name}_for_bpe_even_though_it_will_corrupt_output": True}
    unclean = hugging_face(**forced)
    ids = unclean.encode("do n't , please .", add_special_tokens=False)
    assert unclean.decode(ids) == "don't, please."
    assert wrap_tokenizer(unclean).decode(ids) == "do n't , please ."


def test_transformers_sentencepiece_leaves_them_out_too(tmp_path):
    """Its own decode raises an error."""

    class Backend(SentencePieceBackend):
        vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012

    path = tmp_path / "tokenizer.model"
    path.write_bytes(small_tokenizers.sentencepiece().serialized_model_proto())
    own = Backend(vocab_file=str(path), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ids = own.encode("the fox", add_special_tokens=False)
    with pytest.raises(IndexError):
        own.decode([*ids, 10_000])
    tokenizer = wrap_tokenizer(own)
    assert tokenizer.decode([*ids, 10_000]) == tokenizer.decode(ids)
    assert tokenizer.decode([10_000]) == ""


def test_sentencepiece_leaves_ids_out_that_only_the_model_has():
    """A model's vocabulary may be padded; SentencePiece itself raises IndexError there."""
    processor = small_tokenizers.sentencepiece()
    ids = processor.EncodeAsIds("the cat")
    padded = [ids[0], processor.GetPieceSize() + 5, *ids[1:]]
    assert wrap_tokenizer(processor).decode(padded) == processor.DecodeIds(ids)


@pytest.mark.parametrize("make", [CharTokenizer, small_tokenizers.sentencepiece])
def test_decode_options_of_other_tokenizers(make):
    tokenizer = wrap_tokenizer(make())
    tokenizer.check_decode_options(DecodeOptions())
    for field in DecodeOptions._fields:
        options = DecodeOptions(**{field: False})
        for refuses in (tokenizer.check_decode_options, lambda o: tokenizer.decode([65], o)):
            with pytest.raises(InvalidRequestError, match=f"^{field} must be True .*got False"):
                refuses(options)


def test_byte_run_ids():
    runs = wrap_tokenizer(small_tokenizers.byte_fallback()).byte_run_ids
    assert {byte: token for token, byte in runs.items()} == {b: b + 3 for b in range(256)}
    for tokenizer in (
        small_tokenizers.byte_level(),
        small_tokenizers.metaspace(),
        small_tokenizers.sentencepiece(),
    ):
        assert wrap_tokenizer(tokenizer).byte_run_ids == {}


def test_chat_template():
    tokenizer = wrap_tokenizer(small_tokenizers.byte_level())
    keep = DecodeOptions(skip_special_tokens=False)
    ids = conversation_ids(tokenizer, ASK, add_generation_prompt=True)
    expected = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.decode(ids, keep) == expected + "<|im_start|>assistant\n"
    ids = conversation_ids(tokenizer, ASK, add_generation_prompt=False)
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids, keep) == expected


def test_chat_template_that_writes_bos():
    inner = hugging_face(chat_template=WRITES_BOS)
    tokenizer = wrap_tokenizer(inner)
    plain = tokenizer.encode("hi")
    assert plain[0] == inner.bos_token_id
    assert conversation_ids(tokenizer, ASK, add_generation_prompt=True) == plain
    loud = conversation_ids(
        tokenizer, ASK, add_generation_prompt=True, template_options={"loud": True}
    )
    assert loud == tokenizer.encode("hi!")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hi", "messages must be a list .*got 'hi'"),
        ([], r"messages must be a list .*got \[\]"),
        ({"role": "user"}, "messages must be a list .*got {'role'"),
        (["hi"], r"messages\[0\] must be a dict .*got 'hi'"),
        ([*ASK, {"content": "x"}], r"messages\[1\]\['role'\] must be text, got only \['content'\]"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] must be text, got only \['role'\]"),
        ([{"role": "user", "content": None}], r"\['content'\] must be text, got None"),
        ([{"role": "user", "content": [1]}], r"\['content'\] must be text, got \[1\]"),
    ],
)
def test_malformed_messages(messages, error):
    tokenizer = wrap_tokenizer(small_tokenizers.byte_level())
    with pytest.raises(InvalidRequestError, match=error):
        conversation_ids(tokenizer, messages, add_generation_prompt=True)


def test_tool_calls_need_no_content():
    tokenizer = wrap_tokenizer(hugging_face(chat_template="{{ messages[0].tool_calls[0] }}"))
    ids = conversation_ids(
        tokenizer,
        [{"role": "assistant", "content": None, "tool_calls": ["f"]}],
        add_generation_prompt=False,
    )
    assert tokenizer.decode(ids) == "f"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (hugging_face, "chat_template is not set"),
        (CharTokenizer, "messages need a chat template, .*CharTokenizer has none"),
        (small_tokenizers.sentencepiece, "messages need a chat template, .*SentencePieceProcessor"),
        (
            lambda: hugging_face(chat_template="{{ raise_exception('no systems here') }}"),
            "cannot render messages: no systems here",
        ),
    ],
)
def test_no_usable_template(make, error):
    with pytest.raises(InvalidRequestError, match=error):
        conversation_ids(wrap_tokenizer(make()), ASK, add_generation_prompt=True)


def test_template_options_that_are_not_the_templates():
    tokenizer = wrap_tokenizer(small_tokenizers.byte_level())
    with pytest.raises(InvalidRequestError, match="must not set 'tokenize', got False"):
        conversation_ids(
            tokenizer, ASK, add_generation_prompt=True, template_options={"tokenize": False}
        )


class ChatTokenizer(CharTokenizer):
    """Writes BOS both in its template and when it encodes."""

    def encode(self, text):
        return [self.bos, *super().encode(text)]

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert not tokenize
        text = chr(self.bos) + "".join(m["content"] for m in messages)
        return text + "?" * add_generation_prompt


def test_users_own_chat_template():
    tokenizer = wrap_tokenizer(ChatTokenizer())
    ids = conversation_ids(tokenizer, ASK, add_generation_prompt=True)
    assert ids == [1, *map(ord, "hi?")]
    with pytest.raises(InvalidRequestError, match="unexpected keyword argument 'loud'"):
        conversation_ids(
            tokenizer, ASK, add_generation_prompt=True, template_options={"loud": True}
        )


class Panic(BaseException):
    """What a tokenizer written in Rust raises when it panics is no Exception either."""


def test_tokenizer_that_panics_fails_its_request_only():
    tokenizer = CharTokenizer()
    tokenizer.error = Panic
    weights = spread_weights()
    with Engine(model_config=TINY, weights=weights, tokenizer=tokenizer, **SMALL) as engine:
        params = {"temperature": 0, "max_new_tokens": 4}
        out = engine.generate(input_ids=[5], sampling_params=params)
        tokenizer.poison = out["output_ids"][0]
        with pytest.raises(EngineError, match=f"cannot decode {tokenizer.poison}"):
            engine.generate(input_ids=[5], sampling_params=params)
        tokenizer.poison = None
        assert engine.generate(input_ids=[5], sampling_params=params)["text"] == out["text"]


@pytest.mark.parametrize(
    ("make", "name", "expected"),
    [
        (small_tokenizers.byte_level, "\u0120", b" "),
        (small_tokenizers.byte_level, "\u00c3", b"\xc3"),
        (small_tokenizers.byte_fallback, "<0xC3>", b"\xc3"),
        (small_tokenizers.byte_fallback, "\u2581the", b" the"),
        (small_tokenizers.metaspace, "\u2581the", b" the"),
        (small_tokenizers.metaspace, "</s>", b"</s>"),
        (small_tokenizers.word_suffix, "the</w>", None),
    ],
)
def test_bytes_of_a_token(make, name, expected):
    """With its space, and of a part of a character; None where the decoder is not known."""
    inner = make()
    assert wrap_tokenizer(inner).token_bytes(inner.convert_tokens_to_ids(name)) == expected


def test_bytes_of_tokens_are_those_of_their_text():
    tokenizer = load_tokenizer(GOLDEN / "qwen3_gqa_tied")
    assert tokenizer is not None
    text = "the fox \u5317\u4eac \U0001f327!\n  a"
    found = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    assert b"".join(each or b"" for each in found) == text.encode()


def test_chat_templates_of_several_kinds():
    inner = hugging_face()
    tokenizer = wrap_tokenizer(inner)
    several = {"default": "plain", "tool_use": "tools"}
    listed = [{"name": name, "template": source} for name, source in several.items()]
    for template in (several, listed):
        inner.chat_template = template
        assert tokenizer.get_chat_template() == "plain"
        assert tokenizer.get_chat_template(has_tools=True) == "tools"
    inner.chat_template = {"default": "plain"}
    assert tokenizer.get_chat_template(has_tools=True) == "plain"
    inner.chat_template = None
    assert tokenizer.get_chat_template() is None


def test_a_folders_response_template(tmp_path):
    inner = hugging_face()
    inner.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    known = {"start_anchor": "A:", "fields": {"content": {}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "response_template": known}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.response_template == known
    assert wrap_tokenizer(inner).response_template is None
    assert "<|bos|>" in tokenizer.special_tokens
    assert TunixTokenizer(CharTokenizer()).special_tokens == ()


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("wrap", [lambda processor: processor, TokenizerAdapter])
def test_bytes_of_sentencepiece_tokens(byte_fallback, wrap):
    """Together they are the text; what is no text has none."""
    processor = small_tokenizers.sentencepiece(byte_fallback)
    tokenizer = wrap_tokenizer(wrap(processor))
    text = "the quick fox \u00e9\U0001f600" if byte_fallback else "the fox"
    pieces = [tokenizer.token_bytes(token) or b"" for token in processor.EncodeAsIds(text)]
    assert b"".join(pieces).decode() == f" {text}", "a word begins with a space"
    controls = (processor.bos_id(), processor.eos_id(), processor.unk_id())
    assert [tokenizer.token_bytes(token) for token in controls] == [None] * 3
    assert tokenizer.token_bytes(processor.GetPieceSize()) is None
