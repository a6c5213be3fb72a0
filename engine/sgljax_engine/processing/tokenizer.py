"""One small interface over the tokenizers that users bring, and how token ids become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.sampling_params import SamplingParams


class DecodeOptions(NamedTuple):
    """How token ids become text.

    `spaces_between_special_tokens` False asks the tokenizer for no such spaces. Slow tokenizers of
    transformers 4 add them by default; those of transformers 5 and all fast ones never do.
    """

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


DEFAULT_DECODE_OPTIONS = DecodeOptions()


def decode_options(params: SamplingParams) -> DecodeOptions:
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
        """Text of a conversation, rendered with the tokenizer's own chat template.

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


def can_show_special_tokens(tokenizer: Tokenizer | None) -> bool:
    """Whether a tokenizer supports `skip_special_tokens=False`."""
    if tokenizer is None:
        return False
    try:
        tokenizer.check_decode_options(DecodeOptions(skip_special_tokens=False))
    except InvalidRequestError:
        return False
    return True


def check_bools(options: DecodeOptions) -> None:
    for field, value in options._asdict().items():
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{field} must be True or False, got {value!r}")
