"""The engine's interface over a Hugging Face tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from sgljax_engine.processing.chat_template import render
from sgljax_engine.processing.tokenizer import DEFAULT_DECODE_OPTIONS, DecodeOptions, check_bools


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
    def chat_template(self) -> str | None:
        """The source of the chat template; of several, the default one."""
        return _template_source(self._tokenizer)

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
        check_bools(options)

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


def _template_source(tokenizer: Any) -> str | None:
    """The Jinja source of a Hugging Face tokenizer's chat template."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
