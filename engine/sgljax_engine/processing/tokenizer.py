"""One small interface over the tokenizers that users bring.

Accepted: Hugging Face tokenizers, `sentencepiece.SentencePieceProcessor`, and any object with
Tunix's tokenizer methods (`encode`, `decode`, `bos_id()`, `eos_id()`, `pad_id()`), Tunix's own
`TokenizerAdapter` among them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sgljax_engine.errors import InvalidConfigError, InvalidRequestError
from sgljax_engine.processing.chat_template import check_gemma_fallback, check_messages, render
from sgljax_engine.sampling_params import SamplingParams

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class DecodeOptions(NamedTuple):
    """How token ids become text.

    Attributes:
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: False asks the tokenizer for no spaces between special
            tokens. Slow tokenizers of transformers 4 add them by default; those of transformers 5
            and all fast ones never do and ignore the option.
    """

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


DEFAULT_DECODE_OPTIONS = DecodeOptions()


def decode_options(params: SamplingParams) -> DecodeOptions:
    """The decoding options of a request."""
    return DecodeOptions(params.skip_special_tokens, params.spaces_between_special_tokens)


class Tokenizer(Protocol):
    """The tokenizer interface of the engine. The detokenizer thread calls `decode`."""

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id, if there is one."""
        ...

    @property
    def byte_run_ids(self) -> Mapping[int, int]:
        """The byte of each byte-fallback token, if a run of such tokens is decoded as a whole.

        In such a tokenizer one invalid byte turns its whole run into U+FFFD, valid characters
        included, so the text of a run is not final before its end. Empty for all other tokenizers.
        """
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """Names of the special tokens, as far as they are known."""
        ...

    @property
    def response_template(self) -> Any:
        """The response template of the tokenizer's folder; None without one."""
        ...

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
        """The source of the chat template, in Jinja; None without one.

        Args:
            has_tools: Whether it renders tools; some tokenizers have a template for that.
        """
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for, a part of a character too; None if not known."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's special tokens."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation, which has all its special tokens."""
        ...

    def encode_conversation(self, text: str) -> list[int]:
        """Token ids of a rendered conversation, from its start."""
        ...

    def check_decode_options(self, options: DecodeOptions) -> None:
        """Raises InvalidRequestError with field and value for unsupported options."""
        ...

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        """Text of token ids, without any clean-up of spaces."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation; arguments and errors are those of `apply_chat_template`."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the tokenizer's own chat template.

        Args:
            messages: Dicts with a `role` and a `content`, both text. A message with `tool_calls`
                may lack content.
            add_generation_prompt: End with the header of an assistant message.
            template_options: More arguments for the template (`enable_thinking`, `tools`, ...).

        Raises:
            InvalidRequestError: for malformed messages, for a tokenizer without a template, and
                when the template refuses the conversation.
        """
        ...


class HFTokenizer:
    """A Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Wraps a `transformers.PreTrainedTokenizerBase`."""
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id, if there is one."""
        return self._tokenizer.eos_token_id

    @property
    def byte_run_ids(self) -> Mapping[int, int]:
        """The byte of each byte-fallback token, if a run of such tokens is decoded as a whole."""
        return self._byte_run_ids

    @functools.cached_property
    def _byte_run_ids(self) -> Mapping[int, int]:
        # Found by trial, since a tokenizer's decoder is not public.
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self._tokenizer.convert_tokens_to_ids(names)
        if None in ids or self._tokenizer.convert_ids_to_tokens(ids) != names:
            return {}
        is_whole_run = self.decode([ids[ord("a")], ids[0xFF]]) == "\ufffd\ufffd"
        return {token: byte for byte, token in enumerate(ids)} if is_whole_run else {}

    @property
    def special_tokens(self) -> Sequence[str]:
        """Names of the special tokens."""
        return self._special_tokens

    @functools.cached_property
    def _special_tokens(self) -> Sequence[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = [token.content for token in added if token.special]
        return list(dict.fromkeys([*names, *self._tokenizer.all_special_tokens]))

    @property
    def response_template(self) -> Any:
        """The response template of the tokenizer's folder; None without one."""
        # transformers has it as an attribute from 5.13 on; before, with what else the folder sets.
        found = getattr(self._tokenizer, "response_template", None)
        return found or getattr(self._tokenizer, "init_kwargs", {}).get("response_template")

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
        """The source of the chat template; of several, the one that transformers renders."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, list):  # as in tokenizer_config.json
            template = {each["name"]: each["template"] for each in template}
        if isinstance(template, dict):
            default = template.get("default")
            template = template.get("tool_use", default) if has_tools else default
        return template if isinstance(template, str) else None

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for, a part of a character too; None if not known."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return None
        if name in self._added_names:
            return name.encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if self._is_byte_level:
            known = _byte_level_codes()
            return bytes(known[c] for c in name) if all(c in known for c in name) else None
        return name.replace(_METASPACE, " ").encode() if self._is_metaspace else None

    @functools.cached_property
    def _added_names(self) -> frozenset[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return frozenset(token.content for token in added)

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        # Found by trial, since a tokenizer's decoder is not public.
        return self._writes("\u0120a", " a") and not self._is_metaspace

    @functools.cached_property
    def _is_metaspace(self) -> bool:
        return self._writes(f"{_METASPACE}a", " a")

    def _writes(self, name: str, text: str) -> bool:
        """Whether a token of a name is written as a text, behind another token."""
        write = getattr(self._tokenizer, "convert_tokens_to_string", None)
        try:
            return write is not None and write(["a", name]) == f"a{text}"
        except (KeyError, ValueError):
            return False

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's special tokens."""
        return list(self._tokenizer.encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation, without further special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_conversation(self, text: str) -> list[int]:
        """Token ids of a rendered conversation; its template adds all special tokens, BOS too."""
        return self.encode_rendered(text)

    def check_decode_options(self, options: DecodeOptions) -> None:
        """Supports all options, which must be bools."""
        _check_bools(options)

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        """Text of token ids, without any clean-up of spaces.

        This overrides the tokenizer's own `clean_up_tokenization_spaces`: the clean-up removes
        spaces that the model wrote, and later changes the text of a prefix.
        """
        try:
            return self._decode(list(ids), options)
        except (IndexError, TypeError):
            # A model may have more tokens than its tokenizer, for padding. Fast tokenizers leave
            # them out of the text, and others fail in one of these ways.
            size = len(self._tokenizer)
            known = [token for token in ids if token < size]
            if len(known) == len(ids):
                raise
            return self._decode(known, options)

    def _decode(self, ids: list[int], options: DecodeOptions) -> str:
        changed: dict[str, bool] = {}
        if not options.spaces_between_special_tokens:
            changed["spaces_between_special_tokens"] = False
        return self._tokenizer.decode(
            ids,
            skip_special_tokens=options.skip_special_tokens,
            clean_up_tokenization_spaces=False,
            **changed,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation, rendered with the tokenizer's own chat template."""
        return render(
            self._tokenizer,
            messages,
            template_options,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the tokenizer's own chat template."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_options=template_options,
        )
        return self.encode_conversation(text)


class TunixTokenizer:
    """A tokenizer with Tunix's methods. Prompts start with BOS, if it has a positive id."""

    def __init__(self, tokenizer: Any) -> None:
        """Wraps the tokenizer."""
        self._tokenizer = tokenizer
        self._num_pieces = _num_pieces(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id, if there is one."""
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
        """None: such a tokenizer does not show its tokens."""
        return None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, after one BOS."""
        return self._with_bos(self._tokenizer.encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation."""
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
        _check_bools(options)
        for field, default in DecodeOptions._field_defaults.items():
            value = getattr(options, field)
            if value != default:
                raise InvalidRequestError(
                    f"{field} must be {default} with a tokenizer of type "
                    f"{type(self._tokenizer).__name__}, got {value}; only Hugging Face tokenizers "
                    "have this option"
                )

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        """Text of token ids."""
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
        """Text of a conversation, rendered with the tokenizer's own chat template."""
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

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the tokenizer's own chat template."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_options=template_options,
        )
        return self.encode_conversation(text)


class TunixHFTokenizer(TunixTokenizer):
    """Tunix's adapter over a Hugging Face tokenizer: the adapter encodes, the tokenizer decodes."""

    def __init__(self, adapter: Any, tokenizer: Any) -> None:
        """Wraps the adapter and the tokenizer inside it."""
        super().__init__(adapter)
        self._hf = HFTokenizer(tokenizer)

    @property
    def byte_run_ids(self) -> Mapping[int, int]:
        """The byte of each byte-fallback token, if a run of such tokens is decoded as a whole."""
        return self._hf.byte_run_ids

    @property
    def special_tokens(self) -> Sequence[str]:
        """Names of the special tokens."""
        return self._hf.special_tokens

    @property
    def response_template(self) -> Any:
        """The response template of the tokenizer's folder; None without one."""
        return self._hf.response_template

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
        """The source of the chat template; None without one."""
        return self._hf.get_chat_template(has_tools=has_tools)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for; None if not known."""
        return self._hf.token_bytes(token)

    def check_decode_options(self, options: DecodeOptions) -> None:
        """Supports all options, which must be bools."""
        self._hf.check_decode_options(options)

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        """Text of token ids, without any clean-up of spaces."""
        return self._hf.decode([int(token) for token in ids], options)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation, without further special tokens."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


class SentencePieceTokenizer(TunixTokenizer):
    """A bare SentencePiece processor; its methods have other names."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, after one BOS."""
        return self._with_bos(self._tokenizer.EncodeAsIds(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation."""
        return self._tokenizer.EncodeAsIds(text)

    def decode(self, ids: Sequence[int], options: DecodeOptions = DEFAULT_DECODE_OPTIONS) -> str:
        """Text of token ids."""
        self.check_decode_options(options)
        return self._tokenizer.DecodeIds(self._known(ids))


def wrap_tokenizer(tokenizer: Any) -> Tokenizer:
    """Wraps a user's tokenizer, or raises InvalidConfigError saying what is accepted."""
    adapter = _adapter_class(tokenizer)
    if adapter is not None:
        # An adapter has all attributes of the tokenizer inside it, so it is checked first. An
        # adapter with its own decode method keeps it.
        if type(tokenizer).decode is adapter.decode:
            inner = tokenizer.tokenizer
            if _adapter_class(inner) is not None:  # Tunix's command line wraps twice
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


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The Hugging Face tokenizer of a model folder; None when the folder has none."""
    if not any((Path(folder) / name).exists() for name in _TOKENIZER_FILES):
        return None
    with _without_advice():
        from transformers import AutoTokenizer  # heavy, and only needed here

    return HFTokenizer(AutoTokenizer.from_pretrained(str(folder)))


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Imports transformers without its note that PyTorch is missing: only tokenizers are used."""

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(is_no_advice)


def _base_class(tokenizer: object, module: str, name: str) -> type | None:
    """The base class of that name, found without importing its module."""
    for base in type(tokenizer).__mro__:
        if (base.__module__, base.__name__) == (module, name):
            return base
    return None


def _adapter_class(tokenizer: object) -> Any:
    return _base_class(tokenizer, "tunix.generate.tokenizer_adapter", "TokenizerAdapter")


def _is_hugging_face(tokenizer: object) -> bool:
    module = "transformers.tokenization_utils_base"
    return _base_class(tokenizer, module, "PreTrainedTokenizerBase") is not None


@functools.cache
def _byte_level_codes() -> Mapping[str, int]:
    """The byte that each character of a byte-level token stands for, after GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    codes = {chr(byte): byte for byte in shown}
    return codes | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


def _num_pieces(tokenizer: Any) -> int | None:
    """The size of a SentencePiece vocabulary, inside Tunix's adapter or not; else None."""
    is_adapter = _adapter_class(tokenizer) is not None
    processor = tokenizer.tokenizer if is_adapter else tokenizer
    return processor.GetPieceSize() if hasattr(processor, "GetPieceSize") else None


def _has_gemma_fallback(tokenizer: Any) -> bool:
    """Whether Tunix's adapter would use Gemma's format, for lack of a template."""
    return _adapter_class(tokenizer) is not None and not hasattr(
        tokenizer.tokenizer, "apply_chat_template"
    )


def _check_bools(options: DecodeOptions) -> None:
    for field, value in options._asdict().items():
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{field} must be True or False, got {value!r}")
