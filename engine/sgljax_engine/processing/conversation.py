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

from sgljax_engine.checks import check_text
from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.bounded_text import check_length
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
    continue_final_message: bool = False,
    template_options: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids of a conversation.

    The ids start with the prompt and the output of each assistant message that has `token_ids`;
    only what the template writes between and behind them is tokenized. A message's
    `prompt_token_ids`, if it has them, must be what this function finds for its prompt.
    `continue_final_message` ends behind the content of the last message, an assistant's. A text
    that is sure to have more than `max_tokens` is refused before all of it is tokenized. Raises
    InvalidRequestError.
    """
    check_messages(messages)
    if continue_final_message:
        _check_continued(messages, add_generation_prompt=add_generation_prompt)
    for message in messages:
        check_text(message.get("content") or "")
    plain = [_without_ids(each) for each in messages]
    template = _Template(tokenizer, plain, template_options, max_tokens)
    indices = [i for i, message in enumerate(messages) if _carries_ids(i, message)]
    if len(indices) > MAX_TURNS:
        raise InvalidRequestError(
            f"messages must have at most {MAX_TURNS} with token_ids, got {len(indices)}"
        )
    last = len(messages) - 1
    if not indices:
        if continue_final_message:
            return template.open_ids(last)
        return template.ids(len(messages), add_generation_prompt)
    ids = template.ids(indices[0], True)
    for index, end in itertools.pairwise([*indices, len(messages)]):
        message = messages[index]
        _check_prompt(index, message, ids)
        ids = ids + _ids_of(index, message, "token_ids")
        if continue_final_message and index == last:
            return ids
        if continue_final_message and end == len(messages):
            tail = template.open_tail(index, last)
        else:
            tail = template.tail(index, end, add_generation_prompt or end < len(messages))
        # The end-of-turn token is written by the template, and sampled unless the output was cut.
        ids += tail[1:] if ids[-1:] == tail[:1] else tail
    return ids


def split_conversations(messages: Any) -> tuple[Sequence[Any], bool]:
    """The conversations of a `chat` call, and whether the caller gave a single one."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages:
        raise InvalidRequestError(
            "messages must be a list of at least one dict with 'role' and 'content', or a list of "
            f"such lists, got {messages!r}"
        )
    is_single = isinstance(messages[0], Mapping)
    return [messages] if is_single else messages, is_single


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
        # No template changes these, and nothing holds them.
        self._mark, self._last_mark = f"output{uuid.uuid4().hex}", f"output{uuid.uuid4().hex}"

    def ids(self, end: int, add_generation_prompt: bool) -> list[int]:
        text = self._rendered(self._messages[:end], add_generation_prompt)
        return self._tokenizer.encode_conversation(text)

    def tail(self, index: int, end: int, add_generation_prompt: bool) -> list[int]:
        """Token ids of what follows the content of a message, up to another one."""
        text = self._marked({index: self._mark}, end, add_generation_prompt)
        return self._tokenizer.encode_rendered(text.partition(self._mark)[2])

    def open_ids(self, last: int) -> list[int]:
        text = self._marked({last: self._last_mark}, last + 1, False).partition(self._last_mark)[0]
        return self._tokenizer.encode_conversation(text + self._content(last))

    def open_tail(self, index: int, last: int) -> list[int]:
        """The ids of `tail`, up to the end of the last message's content."""
        text = self._marked({index: self._mark, last: self._last_mark}, last + 1, False)
        text = text.partition(self._mark)[2].partition(self._last_mark)[0]
        return self._tokenizer.encode_rendered(text + self._content(last))

    def _content(self, last: int) -> str:
        text = self._messages[last]["content"] or ""
        if self._max_tokens is not None:
            check_length(self._tokenizer, text, self._max_tokens)
        return text

    def _marked(self, marks: Mapping[int, str], end: int, add_generation_prompt: bool) -> str:
        """The first messages as text, with marks instead of the contents of some."""
        messages = list(self._messages[:end])
        for index, mark in marks.items():
            messages[index] = {"role": messages[index]["role"], "content": mark}
        text = self._rendered(messages, add_generation_prompt)
        for index, mark in marks.items():
            if text.count(mark) != 1:
                why = "has token_ids" if mark == self._mark else "is to be continued"
                raise InvalidRequestError(
                    f"messages[{index}] {why}, but the chat template writes the content of that "
                    f"message {text.count(mark)} times; it must be once"
                )
        return text

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        text = self._tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_options=self._options,
        )
        if self._max_tokens is not None:
            check_length(self._tokenizer, text, self._max_tokens)
        return text


def _check_continued(messages: Sequence[Message], *, add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message=True needs add_generation_prompt=False, got True"
        )
    last = len(messages) - 1
    if messages[last]["role"] != "assistant" or messages[last].get("tool_calls"):
        raise InvalidRequestError(
            f"messages[{last}] must be an assistant's without tool_calls to be continued, got role "
            f"{messages[last]['role']!r}"
        )


def _without_ids(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in ID_FIELDS}


def _carries_ids(index: int, message: Message) -> bool:
    given = [name for name in ID_FIELDS if message.get(name) is not None]
    if not given:
        return False
    if message["role"] != "assistant":
        raise InvalidRequestError(
            f"messages[{index}] must be an assistant's to have {given[0]}, "
            f"got role {message['role']!r}"
        )
    if "token_ids" not in given:
        raise InvalidRequestError(f"messages[{index}] has prompt_token_ids but no token_ids")
    return True


def _ids_of(index: int, message: Message, name: str) -> list[int]:
    array = np.asarray(message[name])
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidRequestError(
            f"messages[{index}][{name!r}] must be a list of integers, got {message[name]!r}"
        )
    return array.astype(np.int64).tolist()


def _check_prompt(index: int, message: Message, found: list[int]) -> None:
    if message.get("prompt_token_ids") is None:
        return
    given = _ids_of(index, message, "prompt_token_ids")
    if given == found:
        return
    pairs = enumerate(itertools.zip_longest(given, found))
    at = next(i for i, (one, other) in pairs if one != other)
    raise InvalidRequestError(
        f"messages[{index}]['prompt_token_ids'] are not the ids of the messages before it: they "
        f"differ at position {at} of {len(given)}. Send those messages, the template's options and "
        "the token_ids of earlier assistant messages as they were"
    )
