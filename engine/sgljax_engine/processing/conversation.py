"""Prompts of conversations, token for token what the model was given and what it sampled.

Text that was sampled does not always have the token ids that a tokenizer gives it: a conversation
that is rendered and tokenized anew in every turn may differ from what the model saw ("drift"). So
an assistant message may carry its ids, and these are taken as they are. Host-only; no JAX.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.bounded_text import check_length, check_text
from sgljax_engine.processing.chat_template import check_messages
from sgljax_engine.processing.tokenizer import Tokenizer

ID_FIELDS = ("token_ids", "prompt_token_ids")
"""Fields of an assistant message: the ids that were sampled, and those of their prompt."""

MAX_TURNS = 256
"""Messages with ids in a conversation: each of them has the template rendered once."""

Message = Mapping[str, Any]


def conversation_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    template_options: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids of a conversation.

    The ids start with the prompt and the output of each assistant message that has `token_ids`;
    only what the template writes between and behind them is tokenized. A message's
    `prompt_token_ids`, if it has them, must be what this function finds for its prompt.

    Args:
        tokenizer: Renders and encodes.
        messages: Dicts with `role` and `content`; assistant messages may have `ID_FIELDS`.
        add_generation_prompt: End with the header of an assistant message.
        template_options: More variables for the template.
        max_tokens: A text that is sure to have more is refused before all of it is tokenized; None
            takes any.

    Raises:
        InvalidRequestError: for malformed messages or ids, for a prompt that is another one than
            `prompt_token_ids`, for a template that cannot be divided at a message, and for a text
            that is too long.
    """
    check_messages(messages)
    for message in messages:
        check_text(message.get("content") or "")
    plain = [_without_ids(each) for each in messages]
    template = _Template(tokenizer, plain, template_options, max_tokens)
    places = [i for i, message in enumerate(messages) if _carries_ids(i, message)]
    if len(places) > MAX_TURNS:
        raise InvalidRequestError(
            f"messages must have at most {MAX_TURNS} with token_ids, got {len(places)}"
        )
    if not places:
        return template.ids(len(messages), add_generation_prompt)
    ids = template.ids(places[0], True)
    for place, end in itertools.pairwise([*places, len(messages)]):
        message = messages[place]
        _check_prompt(place, message, ids)
        ids = ids + _ids_of(place, message, "token_ids")
        tail = template.tail(place, end, add_generation_prompt or end < len(messages))
        # The end-of-turn token is written by the template, and sampled unless the output was cut.
        ids += tail[1:] if ids[-1:] == tail[:1] else tail
    return ids


class _Template:
    """A conversation without ids, and the template that renders it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: list[Message],
        options: Mapping[str, Any] | None,
        max_tokens: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._options = options
        self._max_tokens = max_tokens
        self._mark = f"output{uuid.uuid4().hex}"  # no template changes it, and nothing holds it

    def ids(self, end: int, add_generation_prompt: bool) -> list[int]:
        """Token ids of the first messages."""
        if self._max_tokens is not None:
            self._rendered(self._messages[:end], add_generation_prompt)
        return self._tokenizer.apply_chat_template(
            self._messages[:end],
            add_generation_prompt=add_generation_prompt,
            template_options=self._options,
        )

    def tail(self, place: int, end: int, add_generation_prompt: bool) -> list[int]:
        """Token ids of what follows the content of a message, up to another one."""
        marked = {"role": self._messages[place]["role"], "content": self._mark}
        messages = [*self._messages[:place], marked, *self._messages[place + 1 : end]]
        text = self._rendered(messages, add_generation_prompt)
        if text.count(self._mark) != 1:
            raise InvalidRequestError(
                f"messages[{place}] has token_ids, but the chat template writes the content of "
                f"that message {text.count(self._mark)} times; it must be once"
            )
        return self._tokenizer.encode_rendered(text.partition(self._mark)[2])

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        text = self._tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_options=self._options,
        )
        if self._max_tokens is not None:
            check_length(self._tokenizer, text, self._max_tokens)
        return text


def _without_ids(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in ID_FIELDS}


def _carries_ids(place: int, message: Message) -> bool:
    given = [name for name in ID_FIELDS if message.get(name) is not None]
    if not given:
        return False
    if message["role"] != "assistant":
        raise InvalidRequestError(
            f"messages[{place}] must be an assistant's to have {given[0]}, "
            f"got role {message['role']!r}"
        )
    if "token_ids" not in given:
        raise InvalidRequestError(f"messages[{place}] has prompt_token_ids but no token_ids")
    return True


def _ids_of(place: int, message: Message, name: str) -> list[int]:
    array = np.asarray(message[name])
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidRequestError(
            f"messages[{place}][{name!r}] must be a list of integers, got {message[name]!r}"
        )
    return array.astype(np.int64).tolist()


def _check_prompt(place: int, message: Message, found: list[int]) -> None:
    if message.get("prompt_token_ids") is None:
        return
    given = _ids_of(place, message, "prompt_token_ids")
    if given == found:
        return
    pairs = enumerate(itertools.zip_longest(given, found))
    at = next(index for index, (one, other) in pairs if one != other)
    raise InvalidRequestError(
        f"messages[{place}]['prompt_token_ids'] are not the ids of the messages before it: they "
        f"differ at position {at} of {len(given)}. Send those messages, the template's options and "
        "the token_ids of earlier assistant messages as they were"
    )
