"""Parts of tokenizer.json files: vocabularies, normalizers, pre-tokenizers, decoders and ends."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenizers import pre_tokenizers

Part = dict[str, Any] | None

CORPUS = (
    "Hello world, hello there! The quick brown fox jumps over the lazy dog.",
    "In 2024 there were 1234567 items at 3.14159 each; 100 200 300 400 500 and 12 12 12.",
    "def add(first, second):\n    return first + second\n\n\nfor i in range(10):\n\tprint(i)\n",
    "It's what they've said: we'll go, I'd say. IT'S NOT what you're after.",
    "\u4f60\u597d\u4e16\u754c\uff0c\u5317\u4eac\u5927\u5b66\u3002\u4f60\u597d\uff01",
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u0440\u0443\u0441\u0441\u043a\u0438\u0439",
    "  two  spaces   three    four\n\n\nlines\r\nwindows\r\n\ttab\t\ttabs ",
    "[INST] Say hello [/INST] hello </s><s>[INST] again [/INST]",
    "user\nWhat is 12345 + 6789?\nassistant\n19134",
    "x=12;y=123;z=1234;(12345678),(2024-12-31),f(123)=456,f(12)=45,f(1)=4",
)
"""Lines of which no character is missing in TEXTS' kinds: words, numbers, code, other scripts."""

# Split expressions as published with the models.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _merge(line: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in line:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def _train(lines: list[list[str]], num_merges: int) -> list[tuple[str, str]]:
    """Merges of byte-pair encoding, over whole lines: they cross words, digits and spaces."""
    merges = []
    for _ in range(num_merges):
        counts = Counter(pair for line in lines for pair in itertools.pairwise(line))
        pair = max(counts, key=lambda each: (counts[each], each))
        merges.append(pair)
        lines = [_merge(line, pair) for line in lines]
    return merges


@functools.cache
def byte_level_model() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens and merges over bytes, as GPT-2 spells them.

    The last tokens are words without merges: `ignore_merges` alone finds them.
    """
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lines = [list(spell.pre_tokenize_str(line)[0][0]) for line in CORPUS]
    merges = _train(lines, 300)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["\u0120assistant", "\u0120jumps", "Hello", "\u01206789"]
    tokens = dict.fromkeys([*alphabet, *("".join(pair) for pair in merges), *words])
    return tuple(tokens), tuple(merges)


@functools.cache
def sentencepiece_model() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens and merges over characters, with byte tokens, as converted from SentencePiece."""
    lines = [list("\u2581" + line.replace(" ", "\u2581")) for line in CORPUS[:4] + CORPUS[6:]]
    merges = _train(lines, 300)
    letters = sorted({letter for line in lines for letter in line})
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = dict.fromkeys([*byte_tokens, *letters, *("".join(pair) for pair in merges)])
    return tuple(tokens), tuple(merges)


def _split(pattern: str, behavior: str = "Isolated") -> Part:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": False,
    }


def _byte_level(*, prefix: bool = False, regex: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": regex,
    }


def _metaspace(scheme: str, *, split: bool) -> Part:
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}


def _pre(*parts: Part) -> Part:
    return {"type": "Sequence", "pretokenizers": list(parts)}


_DIGITS: Part = {"type": "Digits", "individual_digits": True}
_BY_THREE = _split(r"\p{N}{1,3}")
_CJK = _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")

BYTE_PRE_TOKENIZERS: dict[str, Part] = {
    "gpt2": _byte_level(regex=True),
    "gpt2_prefix": _byte_level(prefix=True, regex=True),
    "qwen2": _pre(_split(QWEN2), _byte_level()),
    "llama3": _pre(_split(LLAMA3), _byte_level()),
    "deepseek_llm": _pre(
        _split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _CJK, _DIGITS, _byte_level()
    ),
    "deepseek_v3": _pre(_BY_THREE, _CJK, _split(DEEPSEEK), _byte_level()),
    "by_three_qwen2": _pre(_BY_THREE, _split(QWEN2), _byte_level()),
    "smollm": _pre(_DIGITS, _byte_level(regex=True)),
}

BYTE_NORMALIZERS: dict[str, Part] = {
    "none": None,
    "nfc": {"type": "NFC"},
    "empty": {"type": "Sequence", "normalizers": []},
    "nfkc": {"type": "NFKC"},
    "lower": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
}

BYTE_DECODERS: dict[str, Part] = {
    "bytes": _byte_level(regex=True),
    "bytes_prefix": _byte_level(prefix=True),
}

_TO_METASPACE: Part = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_PREPEND: Part = {"type": "Prepend", "prepend": "\u2581"}
_FROM_METASPACE: Part = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_STRIP: Part = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

PIECE_NORMALIZERS: dict[str, Part] = {
    "llama2": {"type": "Sequence", "normalizers": [_PREPEND, _TO_METASPACE]},
    "gemma": _TO_METASPACE,
    "none": None,
    "nfkc": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, _PREPEND, _TO_METASPACE]},
}

PIECE_PRE_TOKENIZERS: dict[str, Part] = {
    "none": None,
    "first": _metaspace("first", split=False),
    "always": _metaspace("always", split=True),
    "never": _metaspace("never", split=False),
    "gemma": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
}


def _decoder(*more: Part) -> Part:
    decoders = [_FROM_METASPACE, {"type": "ByteFallback"}, {"type": "Fuse"}, *more]
    return {"type": "Sequence", "decoders": decoders}


PIECE_DECODERS: dict[str, Part] = {
    "llama": _decoder(_STRIP),
    "gemma": _decoder(),
    "metaspace": _metaspace("always", split=True),
}


def template(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> Part:
    """A post-processor that puts tokens before and after a text."""

    def side(number: int) -> list[dict[str, Any]]:
        def special(name: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": name, "type_id": number}}

        text = {"Sequence": {"id": "AB"[number], "type_id": number}}
        return [*(special(name) for name, _ in before), text, *(special(name) for name, _ in after)]

    return {
        "type": "TemplateProcessing",
        "single": side(0),
        "pair": side(0) + side(1),
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]}
            for name, token in (*before, *after)
        },
    }


def post_processors(bos: tuple[str, int], eos: tuple[str, int]) -> dict[str, Part]:
    """Post-processors of published files, for these two tokens."""
    return {
        "none": None,
        "bytes": _byte_level(regex=True),
        "bos": template([bos], []),
        "bos_eos": template([bos], [eos]),
        "bytes_bos": {
            "type": "Sequence",
            "processors": [_byte_level(regex=True), template([bos], [])],
        },
        "plain": template([], []),
    }
