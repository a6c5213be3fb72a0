"""Tokenizer folders by generation: published combinations of files and classes, and random ones."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from tests.folders import tokenizer_parts as parts

NUM_CASES = 220

TEXTS = (
    "Hello world",
    " Hello world",
    "  Hello  world  ",
    "Hello\nworld\n",
    "\n\n\nHello",
    "\r\nwindows\r\n\r\n",
    "\t\ttabs\t",
    "    return first + second",
    "def add(first, second):\n    return first + second\n",
    "for i in range(10):\n\tprint(i)",
    "1",
    "12",
    "123",
    "1234567",
    "12 123 1234 12345",
    "3.14159",
    "x1234y5678",
    "In 2024 there were 1234567 items.",
    "\u0661\u0662\u0663\u0664 \uff11\uff12\uff13\uff14",
    "It's they've WE'LL I'd IT'S",
    "hello, there! (again) [list] {dict}",
    "...!!!???",
    "a+b==c&&d||e",
    "https://example.org/path?query=1#part",
    "\u4f60\u597d\u4e16\u754c\uff0c\u5317\u4eac\u5927\u5b66\u3002",
    "Hello \u4f60\u597d world",
    "\u3053\u3093\u306b\u3061\u306f \u30ab\u30bf\u30ab\u30ca",
    "caf\u00e9",
    "cafe\u0301",
    "na\u00efve \u00fcber stra\u00dfe",
    "\ufb01ne \u2460 \u00bd",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "a\u00a0b\u2003c\u200bd",
    "\u2581under\u2581score",
    "\u0120Hello",
    "<0x41><0xFF>",
    "",
    " ",
    "[INST] Say hello [/INST]",
    "<s>[INST] Say hello [/INST] hello </s><s>[INST] again [/INST]",
    "<|begin_of_text|>Hello<|eot_id|>",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "Hello <s> world </s> ",
    "Hello<|eot_id|> world <|im_end|> ",
    "<think>\nwhat is 12 + 12?\n</think>\n\n24",
    "<think> <tool> x",
    "unused <unk> token",
    "a" * 40 + " " * 10 + "1" * 10,
)
"""50 texts: white space, digits, code, other scripts, special tokens and what looks like them."""

_CLASSES = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "PreTrainedTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "GPTNeoXTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "CohereTokenizerFast",
    "DeepseekTokenizer",
    "TokenizersBackend",
    None,
)

_MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    None,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerCase:
    """The files of one folder.

    Attributes:
        name: Name of the case, and of its folder.
        tokenizer: The contents of tokenizer.json.
        config: The contents of tokenizer_config.json.
        model_type: The field of config.json; None for a folder without the file.
    """

    name: str
    tokenizer: dict[str, Any]
    config: dict[str, Any]
    model_type: str | None

    def write(self, parent: Path) -> Path:
        """Writes the folder and returns its path."""
        folder = parent / self.name
        folder.mkdir()
        files = {"tokenizer.json": self.tokenizer, "tokenizer_config.json": self.config}
        if self.model_type is not None:
            files["config.json"] = {"model_type": self.model_type}
        for name, contents in files.items():
            (folder / name).write_text(json.dumps(contents), encoding="utf-8")
        return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Names of the parts of one folder; see `tokenizer_parts`.

    Attributes:
        family: "bytes" for byte-level vocabularies, "pieces" for those of SentencePiece.
        normalizer: Name of the normalizer.
        pre: Name of the pre-tokenizer.
        decoder: Name of the decoder.
        post: Name of the post-processor.
        cls: The `tokenizer_class`; None leaves it out.
        model_type: The model's type.
        flags: Flags of tokenizer_config.json.
        ignore_merges: Field of the model in tokenizer.json.
        added: Which tokens the `added_tokens_decoder` has: "all", "special" or "" without it.
        normalized: Field of the added tokens that are not special.
        strips: Whether an added token takes the white space beside it.
        llama_names: Whether BOS and EOS are `<s>` and `</s>`.
    """

    family: str
    normalizer: str
    pre: str
    decoder: str
    post: str
    cls: str | None
    model_type: str | None
    flags: dict[str, Any]
    ignore_merges: bool = False
    added: str = "all"
    normalized: bool = False
    strips: bool = False
    llama_names: bool = False

    def build(self, name: str) -> TokenizerCase:
        """The folder's files."""
        is_bytes = self.family == "bytes"
        tokens, merges = parts.byte_level_model() if is_bytes else parts.sentencepiece_model()
        bos, eos = ("<s>", "</s>") if self.llama_names else ("<|begin_of_text|>", "<|eot_id|>")
        in_model = ["<unk>", bos, eos, *tokens] if self.family == "pieces" else list(tokens)
        vocab = {token: index for index, token in enumerate(in_model)}
        named = ["<unk>", bos, eos] if self.family == "pieces" else [bos, eos]
        next_id = len(vocab)
        added = []
        for token in [*named, "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool>"]:
            special = "think" not in token and token != "<tool>"
            added.append(
                {
                    "id": vocab.get(
                        token, len(vocab) + len(added) - len(vocab.keys() & set(named))
                    ),
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": self.strips and token == "<tool>",
                    "normalized": self.normalized and not special,
                    "special": special,
                }
            )
            next_id += token not in vocab
        ids = {token["content"]: token["id"] for token in added}
        post = parts.post_processors((bos, ids[bos]), (eos, ids[eos]))[self.post]
        normalizers = parts.BYTE_NORMALIZERS if is_bytes else parts.PIECE_NORMALIZERS
        pre_tokenizers = parts.BYTE_PRE_TOKENIZERS if is_bytes else parts.PIECE_PRE_TOKENIZERS
        decoders = parts.BYTE_DECODERS if is_bytes else parts.PIECE_DECODERS
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": normalizers[self.normalizer],
            "pre_tokenizer": pre_tokenizers[self.pre],
            "post_processor": post,
            "decoder": decoders[self.decoder],
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None if is_bytes else "<unk>",
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": not is_bytes,
                "byte_fallback": not is_bytes,
                "ignore_merges": self.ignore_merges,
                "vocab": vocab,
                "merges": [f"{left} {right}" for left, right in merges],
            },
        }
        config: dict[str, Any] = {"bos_token": bos, "eos_token": eos, **self.flags}
        if not is_bytes:
            config["unk_token"] = "<unk>"
        if self.cls is not None:
            config["tokenizer_class"] = self.cls
        if self.added:
            config["added_tokens_decoder"] = {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in added
                if self.added == "all" or token["special"]
            }
        return TokenizerCase(
            name=name, tokenizer=tokenizer, config=config, model_type=self.model_type
        )


def _bytes(pre: str, cls: str | None, model_type: str | None, **changed: Any) -> Recipe:
    fields: dict[str, Any] = {"normalizer": "none", "decoder": "bytes", "post": "bytes"}
    fields |= {"flags": {}} | changed
    return Recipe(family="bytes", pre=pre, cls=cls, model_type=model_type, **fields)


def _pieces(normalizer: str, pre: str, cls: str | None, model_type: str, **changed: Any) -> Recipe:
    fields: dict[str, Any] = {"decoder": "llama", "post": "bos", "llama_names": True}
    fields |= {"flags": {}} | changed
    return Recipe(
        family="pieces", normalizer=normalizer, pre=pre, cls=cls, model_type=model_type, **fields
    )


_BOS = {"add_bos_token": True, "add_eos_token": False}
_NO_BOS = {"add_bos_token": False, "add_eos_token": False}

# Combinations as published: the files' parts, the class and the flags beside them.
PUBLISHED: dict[str, Recipe] = {
    "deepseek_r1_distill_llama": _bytes(
        "llama3",
        "LlamaTokenizerFast",
        "llama",
        post="bytes_bos",
        ignore_merges=True,
        added="",
        flags={**_BOS, "legacy": True},
    ),
    "deepseek_r1_distill_qwen": _bytes(
        "qwen2", "LlamaTokenizerFast", "qwen2", normalizer="nfc", post="bos", added="", flags=_BOS
    ),
    "deepseek_r1_0528_qwen3": _bytes(
        "qwen2", "LlamaTokenizerFast", "qwen3", normalizer="nfc", post="bos", flags=_BOS
    ),
    "deepseek_llm": _bytes(
        "deepseek_llm",
        "LlamaTokenizerFast",
        "llama",
        normalizer="empty",
        added="",
        flags={**_BOS, "legacy": True},
    ),
    "deepseek_v3": _bytes(
        "deepseek_v3",
        "LlamaTokenizerFast",
        "deepseek_v3",
        normalizer="empty",
        post="bos",
        added="",
        flags={**_BOS, "legacy": True},
    ),
    "xlam": _bytes("deepseek_llm", "LlamaTokenizer", "llama", normalizer="empty", flags=_BOS),
    "llama2": _pieces("llama2", "none", "LlamaTokenizer", "llama", flags={"legacy": False}),
    "llama2_legacy": _pieces("llama2", "none", "LlamaTokenizerFast", "llama", flags={**_BOS}),
    "llama2_metaspace": _pieces(
        "none", "first", "LlamaTokenizer", "llama", flags={**_BOS, "legacy": False}
    ),
    "mistral": _pieces(
        "llama2", "none", "LlamaTokenizer", "mistral", flags={**_BOS, "legacy": True}
    ),
    "mistral_prefix": _pieces(
        "llama2", "none", "LlamaTokenizer", "mistral", flags={**_BOS, "add_prefix_space": True}
    ),
    "code_llama": _pieces("llama2", "none", "CodeLlamaTokenizer", "llama", flags=_BOS),
    "yi": _pieces("llama2", "none", "LlamaTokenizer", "llama", flags=_NO_BOS),
    "llama3": _bytes(
        "llama3", "PreTrainedTokenizerFast", "llama", post="bytes_bos", ignore_merges=True
    ),
    "llama3_no_bos": _bytes(
        "llama3", "PreTrainedTokenizerFast", "llama", post="bytes_bos", flags=_NO_BOS
    ),
    "qwen2": _bytes(
        "qwen2",
        "Qwen2Tokenizer",
        "qwen2",
        normalizer="nfc",
        flags={"add_prefix_space": False, **_NO_BOS},
    ),
    "qwen3": _bytes("qwen2", "Qwen2Tokenizer", "qwen3", normalizer="nfc", flags=_NO_BOS),
    "qwen2_by_three": _bytes("llama3", "Qwen2Tokenizer", "qwen2", normalizer="nfc"),
    "gemma": _pieces("gemma", "gemma", "GemmaTokenizer", "gemma", decoder="gemma", flags=_BOS),
    "gemma3": _pieces(
        "gemma", "gemma", "GemmaTokenizer", "gemma3_text", decoder="gemma", flags=_BOS
    ),
    "smollm": _bytes("smollm", "GPT2Tokenizer", "llama", flags={"add_prefix_space": False}),
    "new_class": _bytes("llama3", "TokenizersBackend", "llama", post="bos"),
}


def _draw(rng: random.Random) -> Recipe:
    """A random folder; each field is drawn by itself."""
    family = rng.choice(("bytes", "bytes", "pieces"))
    is_bytes = family == "bytes"
    decoders = parts.BYTE_DECODERS if is_bytes else parts.PIECE_DECODERS
    flags = {
        name: rng.choice((True, False))
        for name in ("add_bos_token", "add_eos_token", "legacy", "add_prefix_space")
        if rng.random() < 0.35
    }
    return Recipe(
        family=family,
        normalizer=rng.choice(
            list(parts.BYTE_NORMALIZERS if is_bytes else parts.PIECE_NORMALIZERS)
        ),
        pre=rng.choice(list(parts.BYTE_PRE_TOKENIZERS if is_bytes else parts.PIECE_PRE_TOKENIZERS)),
        decoder=rng.choice(list(decoders)),
        post=rng.choice(("none", "bytes", "bos", "bos_eos", "bytes_bos", "plain")),
        cls=rng.choice(_CLASSES),
        model_type=rng.choice(_MODEL_TYPES),
        flags=flags,
        ignore_merges=rng.random() < 0.4,
        added=rng.choice(("all", "all", "special", "")),
        normalized=rng.random() < 0.3,
        strips=rng.random() < 0.3,
        llama_names=rng.random() < 0.5,
    )


def all_cases() -> list[TokenizerCase]:
    """The published combinations and random ones, `NUM_CASES` in all."""
    rng = random.Random(57)
    recipes = dict(PUBLISHED)
    while len(recipes) < NUM_CASES:
        recipes[f"random_{len(recipes)}"] = _draw(rng)
    return [recipe.build(name) for name, recipe in recipes.items()]
