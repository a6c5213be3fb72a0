"""Checks and renders conversations with a tokenizer's chat template. Host-only; no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgljax_engine.errors import InvalidRequestError

_RESERVED_TEMPLATE_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of Hugging Face's `apply_chat_template` that would change its return type, or replace
the template by a program of the client's."""

_GEMMA_ROLES = ("user", "model")
"""The roles that the fallback template of Tunix's adapter renders; it drops all others."""


def check_messages(messages: object) -> None:
    """Refuses anything but dicts of text, since templates would print Python representations."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            "messages must be a list of at least one dict with 'role' and 'content', "
            f"got {messages!r}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{index}] must be a dict with 'role' and 'content', got {message!r}"
            )
        may_be_none = ("content",) if message.get("tool_calls") else ()
        for field in ("role", "content"):
            value = message.get(field)
            if value is None and field in may_be_none:
                continue
            if not isinstance(value, str):
                got = repr(value) if field in message else f"only {sorted(map(str, message))}"
                raise InvalidRequestError(f"messages[{index}][{field!r}] must be text, got {got}")


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any] | None,
    **arguments: bool,
) -> Any:
    check_messages(messages)
    options = dict(template_options or {})
    for name in options:
        if name in _RESERVED_TEMPLATE_OPTIONS:
            raise InvalidRequestError(
                f"template_options must not set {name!r}, got {options[name]!r}; it is not an "
                "argument of the template"
            )
    try:
        conversation = [dict(message) for message in messages]
        return tokenizer.apply_chat_template(conversation, **arguments, **options)
    except Exception as error:  # templates are foreign programs and may raise anything
        raise InvalidRequestError(f"the chat template cannot render messages: {error}") from error


def check_gemma_fallback(
    messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any] | None
) -> None:
    """Refuses messages that Tunix's fallback template would drop silently."""
    for index, message in enumerate(messages):
        if message["role"] not in _GEMMA_ROLES:
            raise InvalidRequestError(
                f"messages[{index}]['role'] must be one of {_GEMMA_ROLES}, which is all that the "
                f"template of Tunix's TokenizerAdapter renders, got {message['role']!r}"
            )
    if template_options:
        raise InvalidRequestError(
            f"template_options must be empty, since the template of Tunix's TokenizerAdapter "
            f"takes none, got {sorted(template_options)}"
        )
