"""The response template of a chat model: its folder's own, else one of ours for its chat template.

Ours are for Qwen 2.5, 3, 3-Coder and 3.5, Llama 3.x, Gemma 3 and 4, Mistral, DeepSeek and gpt-oss.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgljax_engine import Engine, InvalidConfigError, InvalidRequestError
from sgljax_engine.replies.grammars import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEP,
    STYLES,
    CallStyle,
    ReplyGrammars,
    deepseek_mark,
)
from sgljax_engine.replies.parser import ResponseParser
from sgljax_engine.replies.response_template import (
    CALLS,
    CONTENT,
    REASONING,
    ResponseTemplate,
    load_template,
)
from sgljax_engine.replies.values import Schemas

_log = logging.getLogger(__name__)

_CALL = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_FUNCTION = r"<function=(?P<name>[^<>\n]+)>"
_CHATML = "<|im_start|>assistant\n"
_OPENS_THOUGHTS = re.compile(r"<think>(?!(?:\s|\\n)*</think>)")
_THINK = {"open": "<think>", "close": "</think>"}


_DEEPSEEK_CALL = (
    rf"{CALL_BEGIN}(?:function{SEP}(?P<name>[^\n<]+)\n```json\n|(?P<name>[^\n<]+){SEP})"
)
_ASSISTANT, _OUTPUTS_END = deepseek_mark("<|Assistant|>"), deepseek_mark("<|tool outputs end|>")
_GEMMA_THINK = {"open_pattern": r"<\|channel>(?:thought\n?)?", "close": "<channel|>"}


def _harmony(header: str) -> str:
    """A message of gpt-oss with a header; the first has no start, which the prompt has."""
    message = rf"<\|channel\|>{header}[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    return rf"<\|start\|>assistant{message}|{message}"


_TO = r"to=functions\.(?P<name>[\w.-]+)"
_HARMONY_THINK = {"open_pattern": _harmony("analysis"), "close": "<|end|>"}
_HARMONY_CONTENT = {
    "open_pattern": _harmony("(?:final|commentary)(?![^<]*to=functions)"),
    "close": ["<|end|>", "<|return|>"],
}

_TOOLS: dict[str, dict[str, Any]] = {
    "json": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": _CALL,
    },
    "xml": {
        "open_pattern": rf"\s*<tool_call>\s*{_FUNCTION}|\s*{_FUNCTION}",
        "close_pattern": r"</function>(?:\s*</tool_call>)?|</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": (
                r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)"
                r"(?:\n?</parameter>(?=\s*(?:<parameter=|$))|\n[ \t]*(?=<parameter=)|\n?$)"
            )
        },
        "transform": _NAMED,
    },
    "llama": {
        "open_pattern": r"<\|python_tag\|>\s*(?=\{)|(?=\{\s*\")",
        "repeats": True,
        "content": "json",
        "transform": _CALL,
    },
    "gemma4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _NAMED,
    },
    "mistral": {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform_each": True,
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{arguments}"},
        },
    },
    "mistral_args": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]",
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    },
    "deepseek": {
        "open_pattern": rf"\s*{CALLS_BEGIN}\s*{_DEEPSEEK_CALL}|\s*{_DEEPSEEK_CALL}",
        "close_pattern": rf"```\s*{CALL_END}(?:\s*{CALLS_END})?|{CALL_END}(?:\s*{CALLS_END})?",
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    },
    "harmony": {
        "open_pattern": _harmony(rf"[^<]*?{_TO}")
        + rf"|<\|start\|>assistant {_TO}<\|channel\|>[^<]*"
        + r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
        "close": ["<|call|>", "<|end|>"],
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    },
}


class ReplyFormat(NamedTuple):
    """How a model's replies are read.

    `only_known`: calls must be of tools that were given, since nothing else tells them from other
    text. `opens_thoughts`: prompts of the chat template may end in the mark that opens thoughts,
    which models then leave out, even where it is missing. `style` says how calls are written.
    """

    template: ResponseTemplate
    only_known: bool = False
    opens_thoughts: bool = False
    style: CallStyle | None = None


class ReplyReading:
    """How the replies to one request are read; with special tokens where marks are such.

    Refuses tools whose calls no template describes. Without schemas there are no tools.
    """

    def __init__(
        self,
        engine: Engine,
        schemas: Schemas | None,
        *,
        thinks: bool,
        skips_special_tokens: bool,
    ) -> None:
        source = engine.get_chat_template(has_tools=schemas is not None)
        self._format = find_format(source, engine.response_template)
        if schemas is not None and CALLS not in self._format.template.fields:
            raise InvalidRequestError(
                "tools need a chat template in one of the formats of tool calls that are known, "
                "and the model's is in none"
            )
        self._schemas = schemas
        self._thinks = thinks
        fields = self._format.template.fields
        names = [REASONING] * thinks + [CALLS] * (schemas is not None) + [CONTENT]
        marks = "".join(fields[name].marks for name in names if name in fields)
        shown = [token for token in engine.special_tokens if token in marks]
        self.needs_special_tokens = bool(shown) and skips_special_tokens
        self._engine = engine
        self._dropped: list[str] = []
        if self.needs_special_tokens:
            self._dropped = [token for token in engine.special_tokens if token not in marks]

    def parser(self, prompt: str, *, max_calls: int | None = None) -> ResponseParser:
        """A parser of one output behind a prompt."""
        return ResponseParser(
            self._format.template,
            prompt=prompt,
            schemas=self._schemas,
            names=self._schemas if self._format.only_known else None,
            dropped=self._dropped,
            thinks=self._thinks,
            waits=self._format.opens_thoughts,
            max_calls=max_calls,
        )

    @property
    def has_thoughts(self) -> bool:
        """Whether the format has marks of thoughts."""
        return REASONING in self._format.template.fields

    def thought_tags(self, prompt: str, *, in_content: bool) -> tuple[str, str] | None:
        """What thoughts behind a prompt begin and end with; `in_content` if they stay in it too."""
        template, waits = self._format.template, self._format.opens_thoughts
        thinks = self._thinks or in_content
        tags = ResponseParser(template, prompt=prompt, waits=waits, thinks=thinks).stop_tags()
        style = self._format.style
        if tags is not None and tags[0] and style is not None and style.thoughts:
            return style.thoughts, tags[1]
        return tags

    @property
    def grammars(self) -> ReplyGrammars:
        """Writes grammars of such replies."""
        return ReplyGrammars(self._engine, self._format.style, self._format.template)


def find_format(chat_template: str | None, own: Any = None) -> ReplyFormat:
    """How a model's replies are read, by `own` of its folder or the source of its chat template.

    Those of an unknown model are content as they are.
    """
    return _found(chat_template or "", None if own is None else json.dumps(own))


@functools.lru_cache(maxsize=64)
def _found(chat_template: str, own: str | None) -> ReplyFormat:
    opens = _OPENS_THOUGHTS.search(chat_template.rpartition("add_generation_prompt")[2]) is not None
    template = known_template(chat_template)
    calls = template["fields"].get(CALLS)
    name = next((each for each, tools in _TOOLS.items() if tools == calls), "")
    if name == "deepseek" and "```json" not in chat_template:
        name = "deepseek_bare"
    style = STYLES.get(name)
    if own is not None:
        try:
            return ReplyFormat(load_template(json.loads(own)), opens_thoughts=opens, style=style)
        except InvalidConfigError as error:
            _log.warning("%s; replies are read as the chat template says", error)
    return ReplyFormat(load_template(template), name == "llama", opens, style)


def known_template(text: str) -> dict[str, Any]:
    """Our response template for a chat template. An unknown one has no calls."""
    think = _THINK if "</think>" in text else None
    if "<|channel|>" in text and "<|message|>" in text:
        return _made(["<|start|>assistant"], _HARMONY_THINK, "harmony", _HARMONY_CONTENT)
    if "<|channel>" in text:
        return _made(["<|turn>model\n", "<tool_response|>"], _GEMMA_THINK, "gemma4")
    if _ASSISTANT in text:
        tools = "deepseek" if CALL_BEGIN in text else None
        return _made([_ASSISTANT, _OUTPUTS_END], think, tools)
    if "<tool_call>" in text:
        return _made([_CHATML], think, "xml" if "<function=" in text else "json")
    if "[TOOL_CALLS]" in text:
        think = {"open": "[THINK]", "close": "[/THINK]"} if "[THINK]" in text else think
        tools = "mistral_args" if "[ARGS]" in text else "mistral"
        return _made(["[/INST]", "[/TOOL_RESULTS]"], think, tools)
    if "<|python_tag|>" in text or '"parameters":' in text:
        return _made(["<|start_header_id|>assistant<|end_header_id|>\n\n"], think, "llama")
    return _made([_CHATML, "<start_of_turn>model\n"], think, None)


def _made(
    anchors: list[str],
    think: Mapping[str, Any] | None,
    tools: str | None,
    content: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    # Whatever begins a message: the end of a prompt may open its thoughts.
    pattern = "|".join([*map(re.escape, anchors), r"(?=<think>\s*$)"])
    fields = {REASONING: think, CALLS: _TOOLS[tools] if tools else None, CONTENT: content or {}}
    return {
        "start_anchor_pattern": pattern,
        "fields": {name: field for name, field in fields.items() if field is not None},
    }
