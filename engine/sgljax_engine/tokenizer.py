"""One small interface over the tokenizers that users bring.

Accepted: Hugging Face tokenizers, `sentencepiece.SentencePieceProcessor`, and any object with
Tunix's tokenizer methods (`encode`, `decode`, `bos_id()`, `eos_id()`, `pad_id()`), Tunix's own
`TokenizerAdapter` among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sgljax_engine.errors import InvalidConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer. `decode` is called from the detokenizer thread."""

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id, if there is one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the tokenizer does."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        ...


class HFTokenizer:
    """A Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Wraps a `transformers.PreTrainedTokenizerBase`."""
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """See `Tokenizer`."""
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class TunixTokenizer:
    """A tokenizer with Tunix's methods. Prompts start with BOS, if it has a positive id."""

    def __init__(self, tokenizer: Any) -> None:
        """Wraps the tokenizer."""
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """See `Tokenizer`."""
        eos = self._tokenizer.eos_id()
        return eos if eos is not None and eos >= 0 else None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        ids = [int(token) for token in self._tokenizer.encode(text)]
        return self._with_bos(ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos: int | None = self._tokenizer.bos_id()
        if bos is None or bos <= 0 or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode([int(token) for token in ids])


class SentencePieceTokenizer(TunixTokenizer):
    """A bare SentencePiece processor, whose methods have other names."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._with_bos(list(self._tokenizer.EncodeAsIds(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.DecodeIds([int(token) for token in ids])


def wrap_tokenizer(tokenizer: Any) -> Tokenizer:
    """Wraps a user's tokenizer, or raises InvalidConfigError saying what is accepted."""
    if hasattr(tokenizer, "EncodeAsIds"):
        return SentencePieceTokenizer(tokenizer)
    if all(callable(getattr(tokenizer, name, None)) for name in ("bos_id", "eos_id", "pad_id")):
        return TunixTokenizer(tokenizer)
    if hasattr(tokenizer, "eos_token_id") and hasattr(tokenizer, "decode"):
        return HFTokenizer(tokenizer)
    raise InvalidConfigError(
        "tokenizer must be a Hugging Face tokenizer, a SentencePieceProcessor or an object with "
        f"encode, decode, bos_id, eos_id and pad_id, got {type(tokenizer).__name__}"
    )


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The Hugging Face tokenizer of a model folder; None when the folder has none."""
    if not any((Path(folder) / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # heavy, and needed by no other path

    return HFTokenizer(AutoTokenizer.from_pretrained(str(folder)))
