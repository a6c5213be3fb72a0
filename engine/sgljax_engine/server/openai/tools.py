"""Finds tool calls in what a model says: a registry of formats, by what the chat template writes.

Constrained decoding is not implemented, so a model may write a call that is none: such text stays
content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sgljax_engine.server.openai.calls import ToolParser
from sgljax_engine.server.openai.llama_calls import LlamaParser
from sgljax_engine.server.openai.tagged_calls import JsonBlock, TaggedParser, XmlBlock

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""


class ToolFormat(NamedTuple):
    """A format of tool calls.

    Attributes:
        is_used_by: Whether a chat template asks for this format.
        make_parser: A parser of one output, for tools with these schemas.
    """

    is_used_by: Callable[[str], bool]
    make_parser: Callable[[Schemas], ToolParser]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen_coder": ToolFormat(
        lambda template: "<tool_call>" in template and "<function=" in template,
        lambda schemas: TaggedParser(lambda: XmlBlock(schemas)),
    ),
    "qwen": ToolFormat(
        lambda template: "<tool_call>" in template, lambda schemas: TaggedParser(JsonBlock)
    ),
    "llama": ToolFormat(
        lambda template: "<|python_tag|>" in template or '"parameters":' in template,
        lambda schemas: LlamaParser(),
    ),
}
"""Formats by name; the first that a template uses is taken. Add one with a line here."""


def find_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template asks for."""
    formats = TOOL_FORMATS.values()
    return next((each for each in formats if template and each.is_used_by(template)), None)
