"""Variables of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgljax_engine import InvalidRequestError
from sgljax_engine.server.openai.messages import Tool


def template_options(given: dict[str, Any] | None, tools: Sequence[Tool] | None) -> dict[str, Any]:
    """The client's variables, and the tools.

    Raises:
        InvalidRequestError: when the variables hold tools too.
    """
    options = dict(given or {})
    if tools and "tools" in options:
        raise InvalidRequestError("chat_template_kwargs must not set 'tools'; give tools")
    if tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    return options
