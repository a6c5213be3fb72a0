from __future__ import annotations

import json
from typing import Any

from sgljax_engine.processing.tokenizer_folder import find_tokenizer_json, read_backend
from sgljax_engine.processing.tunix_tokenizer import adapter_class

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_MODEL_FIELDS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")

_TRIALS = (
    "Hello world, it's (12345678) o'clock.",
    "  two  spaces\n\n\tand\r\n lines  ",
    "def add(first, second):\n    return first + second  # 3.14159",
    "a [INST] b [/INST] <unk> <pad> HELLO",
    "caf\u00e9 cafe\u0301 \ufb01 \u2460 na\u00efve stra\u00dfe",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f600\u200d\u2028 \u0661\u0662\u0663 x\u00a0y",
)


def find_tokenizer_difference(tokenizer: Any) -> str | None:
    """Says where a tokenizer differs from the tokenizer.json of its `name_or_path`.

    Args:
        tokenizer: A Hugging Face tokenizer, Tunix's adapter over one, or any other.

    Returns:
        The parts that differ, with a text and its ids; None for equal ids and texts, and for a
        tokenizer without such a file on this machine.

    Raises:
        InvalidConfigError: for a tokenizer.json that cannot be read.
    """
    while adapter_class(tokenizer) is not None:
        tokenizer = tokenizer.tokenizer
    used: Any = getattr(tokenizer, "backend_tokenizer", None)
    name = getattr(tokenizer, "name_or_path", None)
    if used is None or not name:
        return None
    path = find_tokenizer_json(name)
    if path is None:
        return None
    right = read_backend(path)
    mine, theirs = _describe(used), _describe(right)
    names = ", ".join(name for name in mine if mine[name] != theirs[name])
    if not names:  # most tokenizers
        return None
    for text in (*_TRIALS, *(f"a {token} b" for token in theirs["added_tokens"])):
        ids, right_ids = (each.encode(text, add_special_tokens=False).ids for each in (used, right))
        if ids != right_ids:
            return (
                f"{path} has another {names}: it reads {text!r} as {_short(right_ids)}, "
                f"{type(tokenizer).__name__} as {_short(ids)}"
            )
        decoded, right_text = used.decode(ids), right.decode(ids)
        if decoded != right_text:
            return (
                f"{path} has another {names}: it decodes {_short(ids)} as {right_text!r}, "
                f"{type(tokenizer).__name__} as {decoded!r}"
            )
    return None


def _describe(backend: Any) -> dict[str, Any]:
    """What ids and texts depend on, beside the vocabulary."""
    parts = {name: _part(getattr(backend, name)) for name in _PARTS}
    model = {name: getattr(backend.model, name, None) for name in _MODEL_FIELDS}
    added = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    return {**parts, "model": model, "added_tokens": added}


def _part(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _short(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ...]"
