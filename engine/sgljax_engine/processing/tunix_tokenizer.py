"""The engine's interface over Tunix's tokenizers, and over those of SentencePiece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.chat_template import check_gemma_fallback, check_messages, render
from sgljax_engine.processing.hf_tokenizer import HFTokenizer
from sgljax_engine.processing.tokenizer import DEFAULT_DECODE_OPTIONS, DecodeOptions, check_bools


class TunixTokenizer:
    """A tokenizer with Tunix's methods. Prompts start with BOS, if it has a positive id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._processor = _processor(tokenizer)
        self._num_pieces = None if self._processor is None else self._processor.GetPieceSize()

    @property
    def eos_token_id(self) -> int | None:
        eos = self._tokenizer.eos_id()
        return eos if eos is not None and eos >= 0 else None

    @property
    def byte_run_ids(self) -> Mapping[int, int]:
        """Empty: no run of byte tokens is known to be decoded as a whole."""
        return {}

    @property
    def special_tokens(self) -> Sequence[str]:
        """Empty: such a tokenizer does not name them."""
        return ()

    @property
    def response_template(self) -> Any:
        """None: such a tokenizer has no folder."""
        return None

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
        """None: such a tokenizer does not show its template."""
        return None

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a SentencePiece token that is text; other tokenizers do not show them."""
        processor = self._processor
        if processor is None or not 0 <= token < processor.GetPieceSize():
            return None
        if processor.IsControl(token) or processor.IsUnknown(token) or processor.IsUnused(token):
            return None
        piece = processor.IdToPiece(token)
        if processor.IsByte(token):  # <0x0A>
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def encode(self, text: str) -> list[int]:
        return self._with_bos(self._tokenizer.encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def encode_conversation(self, text: str) -> list[int]:
        """Token ids of a rendered conversation, after one BOS like all prompts of Tunix."""
        ids, bos = self._with_bos(self.encode_rendered(text)), self._tokenizer.bos_id()
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _with_bos(self, tokens: Sequence[int]) -> list[int]:
        ids = [int(token) for token in tokens]
        bos: int | None = self._tokenizer.bos_id()
        if bos is None or bos <= 0 or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def check_decode_options(self, options: DecodeOptions) -> None:
        """Supports only the defaults."""
        check_bools(options)
        for field, default in DecodeOptions._field_defaults.items():
            value = getattr(options, field)
            if value != default:
                raise InvalidRequestError(
                    f"{field} must be {default} with a tokenizer of type "
                    f"{type(self._tokenizer).__name__}, got {value}; only Hugging Face tokenizers "
                    "have this option"
                )

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        self.check_decode_options(options)
        return self._tokenizer.decode(self._known(ids))

    def _known(self, ids: Sequence[int]) -> list[int]:
        # A model may have more tokens than its tokenizer, for padding. Hugging Face leaves them out
        # of the text, but SentencePiece raises an error.
        return [int(token) for token in ids if self._num_pieces is None or token < self._num_pieces]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        if not callable(getattr(self._tokenizer, "apply_chat_template", None)):
            raise InvalidRequestError(
                f"messages need a chat template, and a tokenizer of type "
                f"{type(self._tokenizer).__name__} has none; use a prompt or input_ids"
            )
        check_messages(messages)
        if _has_gemma_fallback(self._tokenizer):
            check_gemma_fallback(messages, template_options)
        text = render(
            self._tokenizer,
            messages,
            template_options,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"messages cannot be used: apply_chat_template(tokenize=False) of "
                f"{type(self._tokenizer).__name__} must return text, got {type(text).__name__}"
            )
        return text


class TunixHFTokenizer(TunixTokenizer):
    """Tunix's adapter over a Hugging Face tokenizer: the adapter encodes, the tokenizer decodes."""

    def __init__(self, adapter: Any, tokenizer: Any) -> None:
        super().__init__(adapter)
        self._hf = HFTokenizer(tokenizer)

    @property
    def byte_run_ids(self) -> Mapping[int, int]:
        return self._hf.byte_run_ids

    @property
    def special_tokens(self) -> Sequence[str]:
        return self._hf.special_tokens

    @property
    def response_template(self) -> Any:
        return self._hf.response_template

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
        return self._hf.get_chat_template(has_tools=has_tools)

    def token_bytes(self, token: int) -> bytes | None:
        return self._hf.token_bytes(token)

    def check_decode_options(self, options: DecodeOptions) -> None:
        self._hf.check_decode_options(options)

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        return self._hf.decode([int(token) for token in ids], options)

    def encode_rendered(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


class SentencePieceTokenizer(TunixTokenizer):
    """A bare SentencePiece processor; its methods have other names."""

    def encode(self, text: str) -> list[int]:
        return self._with_bos(self._tokenizer.EncodeAsIds(text))

    def encode_rendered(self, text: str) -> list[int]:
        return self._tokenizer.EncodeAsIds(text)

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        self.check_decode_options(options)
        return self._tokenizer.DecodeIds(self._known(ids))


def base_class(tokenizer: object, module: str, name: str) -> type | None:
    """The base class of that name, found without importing its module."""
    for base in type(tokenizer).__mro__:
        if (base.__module__, base.__name__) == (module, name):
            return base
    return None


def adapter_class(tokenizer: object) -> Any:
    """Tunix's `TokenizerAdapter`, if this is one; else None."""
    return base_class(tokenizer, "tunix.generate.tokenizer_adapter", "TokenizerAdapter")


def _processor(tokenizer: Any) -> Any:
    """The SentencePiece processor, inside Tunix's adapter or not; else None."""
    is_adapter = adapter_class(tokenizer) is not None
    processor = tokenizer.tokenizer if is_adapter else tokenizer
    return processor if hasattr(processor, "GetPieceSize") else None


def _has_gemma_fallback(tokenizer: Any) -> bool:
    """Whether Tunix's adapter would use Gemma's format, for lack of a template."""
    return adapter_class(tokenizer) is not None and not hasattr(
        tokenizer.tokenizer, "apply_chat_template"
    )
