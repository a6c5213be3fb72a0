"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import sentencepiece as spm
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

GOLDEN = Path(__file__).parents[1] / "golden"
LINES = ["the quick brown fox", "jumps over the lazy dog", "a  b   c. d, e! don't\tdo it"]
SPACE = "\u2581"


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

    def eos_id(self) -> Any:
        return 2

    def pad_id(self):
        return 0


@functools.cache
def byte_level():
    """Byte-level BPE, as Qwen and Llama 3 have."""
    return AutoTokenizer.from_pretrained(GOLDEN / "qwen3_gqa_tied")


@functools.cache
def sentencepiece(byte_fallback=True):
    """A raw SentencePiece processor, with words and, if asked for, all bytes."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=model,
        vocab_size=310 if byte_fallback else 60,
        byte_fallback=byte_fallback,
        pad_id=3,
        hard_vocab_limit=False,
        remove_extra_whitespaces=byte_fallback,
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def _fast(vocab, decoder, **model_options):
    rust = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", **model_options))
    rust.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@functools.cache
def byte_fallback():
    """Llama 2's decoder: a run of byte tokens is one piece, valid or not."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [SPACE, "a", "b", "c", f"{SPACE}the", f"{SPACE * 3}x", "ing", ".", "\u4e2d", "\ufffd"]
    vocab = {name: i for i, name in enumerate(names + words)}
    steps = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return _fast(vocab, decoders.Sequence(steps), byte_fallback=True)


@functools.cache
def metaspace():
    """T5's decoder: the first token loses its spaces."""
    words = [SPACE, "a", "b", f"{SPACE}the", f"{SPACE}{SPACE}", "\u4e2d", ".", f"{SPACE}x{SPACE}"]
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *words])}
    return _fast(vocab, decoders.Metaspace(SPACE, prepend_scheme="always"))


@functools.cache
def word_suffix():
    """CLIP's decoder: a word's space comes with the token after it."""
    words = ["a</w>", "b", "the</w>", ".</w>", "c", "</w>"]
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *words])}
    return _fast(vocab, decoders.BPEDecoder("</w>"))
