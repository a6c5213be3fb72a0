"""Variables of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sgljax_engine import InvalidRequestError
from sgljax_engine.server.openai.messages import Tool


class Continuable(Protocol):
    """A body that has a conversation."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """None where the client does not say it."""
        ...

    @property
    def continue_final_message(self) -> bool:
        """Whether the last message is to be continued."""
        ...


def generation_prompt(body: Continuable) -> bool:
    """Whether the prompt ends with the start of an answer."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def template_options(given: dict[str, Any] | None, tools: Sequence[Tool] | None) -> dict[str, Any]:
    """The client's variables, and the tools.

    Raises:
        InvalidRequestError: when the variables hold tools too.
    """
    options = dict(given or {})
    if tools and "tools" in options:
        raise InvalidRequestError("chat_template_kwargs must not set 'tools'; give tools")
    if tools:
        # `strict` is for servers: no model was trained to read it.
        left_out = {"function": {"strict"}}
        options["tools"] = [t.model_dump(exclude_none=True, exclude=left_out) for t in tools]
    return options
