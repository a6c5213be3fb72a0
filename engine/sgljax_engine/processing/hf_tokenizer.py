from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sgljax_engine.processing.chat_template import render
from sgljax_engine.processing.tokenizer import DEFAULT_DECODE_OPTIONS, DecodeOptions, check_bools

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"


class HFTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def byte_run_ids(self) -> Mapping[int, int]:
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
        return self._special_tokens

    @functools.cached_property
    def _special_tokens(self) -> Sequence[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = [token.content for token in added if token.special]
        return list(dict.fromkeys([*names, *self._tokenizer.all_special_tokens]))

    @property
    def response_template(self) -> Any:
        # transformers has it as an attribute from 5.13 on; before, with what else the folder sets.
        found = getattr(self._tokenizer, "response_template", None)
        return found or getattr(self._tokenizer, "init_kwargs", {}).get("response_template")

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
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
        return list(self._tokenizer.encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_conversation(self, text: str) -> list[int]:
        return self.encode_rendered(text)

    def check_decode_options(self, options: DecodeOptions) -> None:
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
        return render(
            self._tokenizer,
            messages,
            template_options,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )


@functools.cache
def _byte_level_codes() -> Mapping[str, int]:
    """The byte that each character of a byte-level token stands for, after GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    codes = {chr(byte): byte for byte in shown}
    return codes | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
