"""Which wrapper a user's tokenizer gets.

Accepted: Hugging Face tokenizers, `sentencepiece.SentencePieceProcessor`, and any object with
Tunix's tokenizer methods (`encode`, `decode`, `bos_id()`, `eos_id()`, `pad_id()`), Tunix's own
`TokenizerAdapter` among them.
"""

from __future__ import annotations

import logging
from typing import Any

from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.processing.hf_tokenizer import HFTokenizer
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.processing.tokenizer_check import find_tokenizer_difference
from sgljax_engine.processing.tunix_tokenizer import (
    SentencePieceTokenizer,
    TunixHFTokenizer,
    TunixTokenizer,
    adapter_class,
    base_class,
)

logger = logging.getLogger(__name__)


def take_tokenizer(tokenizer: Any) -> Tokenizer:
    """Wraps a user's tokenizer, with a warning if its own tokenizer.json reads texts otherwise."""
    wrapped = wrap_tokenizer(tokenizer)
    try:
        difference = find_tokenizer_difference(tokenizer)
    except InvalidConfigError as error:
        difference = str(error)
    if difference is not None:
        logger.warning(
            "The tokenizer may not be the one that the model was trained with: %s. "
            "sgljax_engine.load_hf_tokenizer(folder) reads the file, newer releases of "
            "transformers read more of them",
            difference,
        )
    return wrapped


def wrap_tokenizer(tokenizer: Any) -> Tokenizer:
    adapter = adapter_class(tokenizer)
    if adapter is not None:
        # An adapter has all attributes of the tokenizer inside it, so it is checked first. An
        # adapter with its own decode method keeps it.
        if type(tokenizer).decode is adapter.decode:
            inner = tokenizer.tokenizer
            if adapter_class(inner) is not None:  # Tunix's command line wraps twice
                return wrap_tokenizer(inner)
            if _is_hugging_face(inner):
                return TunixHFTokenizer(tokenizer, inner)
        return TunixTokenizer(tokenizer)
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


def _is_hugging_face(tokenizer: object) -> bool:
    module = "transformers.tokenization_utils_base"
    return base_class(tokenizer, module, "PreTrainedTokenizerBase") is not None
