"""Grammars of whole replies: tool calls in each format of `formats.py`, and contents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgljax_engine import Engine, InvalidRequestError
from sgljax_engine.replies.lark import LarkWriter, check_outputs
from sgljax_engine.replies.notations import GemmaObjects, Schema, Tags
from sgljax_engine.replies.parser import ResponseParser
from sgljax_engine.replies.response_template import ResponseTemplate
from sgljax_engine.replies.values import Schemas

_BAR = "\uff5c"


def deepseek_mark(text: str) -> str:
    """DeepSeek's marks have a wide bar, and a block in place of spaces."""
    return text.replace("|", _BAR).replace(" ", "\u2581")


class CallStyle(NamedTuple):
    """How calls are written, in the form that models were trained on.

    Attributes:
        call: One call, with `{name}` and `{arguments}`, behind `mark`.
        mark: What begins calls; empty where nothing tells them from content.
        first: Behind the mark, before the first call.
        between: Between two calls.
        last: Behind all.
        notation: Form of the arguments: "json", "tags" or "gemma".
        others: More marks that a parser takes for calls.
        content: What content begins with.
        preamble: What words before calls stand between.
        again: What may come before all behind thoughts.
        thoughts: What opens thoughts, where a template has no one mark for it.
    """

    call: str
    mark: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    notation: str = "json"
    others: tuple[str, ...] = ()
    content: str = ""
    preamble: tuple[str, str] = ("", "")
    again: str = ""
    thoughts: str = ""

    @property
    def texts(self) -> str:
        """All that calls and content may begin, hold and end with."""
        outer = (self.mark, self.first, self.between, self.last, self.content, self.again)
        quotes = GemmaObjects.QUOTE if self.notation == "gemma" else ""
        return " ".join([self.call, *outer, *self.others, *self.preamble, quotes])

    def sample(self, name: str) -> str:
        """A call without arguments."""
        empty = "" if self.notation == "tags" else "{}"
        call = self.call.replace("{name}", name).replace("{arguments}", empty)
        return self.mark + self.first + call + self.last


CALLS_BEGIN = deepseek_mark("<|tool calls begin|>")
CALLS_END = deepseek_mark("<|tool calls end|>")
CALL_BEGIN = deepseek_mark("<|tool call begin|>")
CALL_END = deepseek_mark("<|tool call end|>")
SEP = deepseek_mark("<|tool sep|>")
_DEEPSEEK: dict[str, Any] = {"mark": CALLS_BEGIN, "last": CALLS_END, "others": (CALL_BEGIN,)}
_JSON_CALL = '{"name": "{name}", "arguments": {arguments}}'
_ASSISTANT = "<|start|>assistant"

STYLES: Mapping[str, CallStyle] = {
    "json": CallStyle(
        mark="<tool_call>", call=f"\n{_JSON_CALL}\n</tool_call>", between="\n<tool_call>"
    ),
    "xml": CallStyle(
        mark="<tool_call>",
        call="\n<function={name}>\n{arguments}</function>\n</tool_call>",
        between="\n<tool_call>",
        notation="tags",
        others=("<function=",),
    ),
    "llama": CallStyle(call='{"name": "{name}", "parameters": {arguments}}', between="; "),
    "gemma4": CallStyle(
        mark="<|tool_call>",
        call="call:{name}{arguments}<tool_call|>",
        between="<|tool_call>",
        notation="gemma",
    ),
    "mistral": CallStyle(mark="[TOOL_CALLS]", first=" [", call=_JSON_CALL, between=", ", last="]"),
    "mistral_args": CallStyle(
        mark="[TOOL_CALLS]", call="{name}[ARGS]{arguments}", between="[TOOL_CALLS]"
    ),
    "deepseek": CallStyle(
        call=f"{CALL_BEGIN}function{SEP}{{name}}\n```json\n{{arguments}}\n```{CALL_END}",
        between="\n",
        **_DEEPSEEK,
    ),
    "deepseek_bare": CallStyle(
        call=f"{CALL_BEGIN}{{name}}{SEP}{{arguments}}{CALL_END}", **_DEEPSEEK
    ),
    "harmony": CallStyle(
        mark="<|channel|>commentary to=functions.",
        call="{name} <|constrain|>json<|message|>{arguments}<|call|>",
        between=f"{_ASSISTANT}<|channel|>commentary to=functions.",
        content="<|channel|>final<|message|>",
        preamble=("<|channel|>commentary<|message|>", f"<|end|>{_ASSISTANT}"),
        again=_ASSISTANT,
        thoughts="<|channel|>analysis<|message|>",
    ),
}
"""Styles by the names that `formats.py` has for the forms of calls."""

_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_NEW_LINES = r"/\n{1,2}/"
"""What models write behind their thoughts."""


class ReplyGrammars:
    """Writes grammars of the replies to one request, as `structured_outputs`.

    All methods raise InvalidRequestError for what has no grammar, with the reason.
    """

    def __init__(self, engine: Engine, style: CallStyle | None, template: ResponseTemplate) -> None:
        self._engine, self._style, self._template = engine, style, template

    def content(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Replies of content that `outputs` describe, without calls."""
        if self._style is None or not self._style.content:
            return dict(outputs)
        return {"grammar": self._writer(self._style).content(outputs)}

    def calls(self, tools: Schemas, *, is_one: bool) -> dict[str, Any]:
        """Replies of at least one call of these tools, and nothing else."""
        if self._style is None or not self._is_read(self._style):
            raise InvalidRequestError(
                "the model cannot be made to call a tool: no grammar is known for the format of "
                "tool calls of its chat template"
            )
        return {"grammar": self._writer(self._style).calls(tools, is_one=is_one)}

    def mixed(
        self, tools: Schemas, outputs: Mapping[str, Any] | None, *, is_one: bool
    ) -> dict[str, Any] | None:
        """Replies of text, with calls behind it or without; None where nothing tells them apart.

        With `outputs`, replies of calls or of content that these describe.
        """
        style = self._style
        if style is None or not style.mark or not self._is_read(style):
            return None
        return {"grammar": self._writer(style).mixed(tools, outputs, is_one=is_one)}

    def _writer(self, style: CallStyle) -> ReplyWriter:
        engine = self._engine
        marks = [token for token in engine.special_tokens if token in style.texts]
        ids = {name: engine.tokenize(name, add_special_tokens=False) for name in marks}
        special = {name: found[0] for name, found in ids.items() if len(found) == 1}
        return ReplyWriter(style, special, frozenset(engine.model_config.eos_token_ids))

    def _is_read(self, style: CallStyle) -> bool:
        """Whether the template, which may be the folder's own, describes calls in a style."""
        parser = ResponseParser(self._template, schemas={"f": {}}, names=("f",))
        parser.feed(style.sample("f"))
        parser.end()
        return [call.name for call in parser.calls] == ["f"]


class ReplyWriter:
    """Writes the grammar of a reply in Lark.

    Args:
        style: How calls are written.
        special: Ids of the tokenizer's special tokens.
        end_ids: Tokens that end an output; a mark that is one of them ends the only call.
    """

    def __init__(
        self, style: CallStyle, special: Mapping[str, int], end_ids: frozenset[int]
    ) -> None:
        ends = [m for m, i in special.items() if i in end_ids and style.call.endswith(m)]
        self._is_single = bool(ends)
        self._style = style._replace(call=style.call.removesuffix(ends[0])) if ends else style
        self._writer = LarkWriter(special)

    def content(self, outputs: Mapping[str, Any]) -> str:
        """Content that is a message of its own."""
        head = self._writer.text(self._style.content)
        return self._writer.grammar(f"{self._again()} {head} {self._writer.content(outputs)}")

    def calls(self, tools: Mapping[str, Schema], *, is_one: bool) -> str:
        """At least one call."""
        mark = self._writer.text(self._style.mark) if self._style.mark else ""
        return self._writer.grammar(f"{self._again()} {mark} {self._calls(tools, is_one=is_one)}")

    def mixed(
        self, tools: Mapping[str, Schema], outputs: Mapping[str, Any] | None, *, is_one: bool
    ) -> str:
        """Text with or without calls, or calls or structured content; the style has a mark."""
        style, writer, again = self._style, self._writer, self._again()
        calls, mark = self._calls(tools, is_one=is_one), writer.text(style.mark)
        if outputs is not None:
            content = writer.content(outputs)
            if not style.content:
                return writer.grammar(f"{again} {mark} {calls} | {content}")
            head = writer.text(style.content)
            return writer.grammar(f"{again} ({mark} {calls} | {head} {content})")
        if not style.content:
            text = writer.free_text(style.others)
            return writer.grammar(f"{writer.text_until(text, style.mark)} {calls} | {text}")
        text = writer.free_text(())
        begin, end = style.preamble
        words = f"({writer.text(begin)} {writer.text_until(text, end)})?"
        content = f"{writer.text(style.content)} {text}"
        return writer.grammar(f"{again} ({words} {mark} {calls} | {content})")

    def _again(self) -> str:
        """What may stand between thoughts and the rest."""
        style = self._style
        if style.again:
            return f"({self._writer.text(style.again)})?"
        return f"{self._writer.rule('LINES', _NEW_LINES)}?"

    def _calls(self, tools: Mapping[str, Schema], *, is_one: bool) -> str:
        style, text = self._style, self._writer.text
        calls = [self._call(name, schema) for name, schema in tools.items()]
        call = self._writer.rule("call", " | ".join(calls))
        more = "" if is_one or self._is_single else f"({text(style.between)} {call})*"
        parts = [text(style.first) * bool(style.first), call, more, text(style.last)]
        return " ".join(each for each in parts if each not in ("", '""'))

    def _call(self, name: str, schema: Schema) -> str:
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"the name of a tool must have 1 to 128 letters, digits, '_', '-' and '.' for its "
                f"calls to be guided, got {name!r}"
            )
        before, after = self._style.call.replace("{name}", name).split("{arguments}")
        arguments = self._arguments(name, schema)
        parts = [self._writer.text(before), arguments, self._writer.text(after) if after else ""]
        return " ".join(each for each in parts if each)

    def _arguments(self, name: str, schema: Schema) -> str:
        where = f"the parameters of the tool {name!r}"
        if schema.get("type", "object") != "object":
            raise InvalidRequestError(
                f"{where} must have the type 'object', got {schema['type']!r}"
            )
        whole = {"type": "object", **(schema or {"additionalProperties": False})}
        check_outputs({"json": whole}, where)
        if self._style.notation == "tags":
            return Tags(self._writer, name, whole).arguments()
        if self._style.notation == "gemma":
            return GemmaObjects(self._writer, name, whole).arguments()
        return self._writer.json(whole)
