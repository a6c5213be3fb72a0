"""Writes the tables of fields of docs/server.md from the classes of the request bodies.

    python docs/make_server_fields.py

A test compares the page with `render(page)`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sgljax_engine import FOREIGN_FIELDS, ForeignField, SamplingParams
from sgljax_engine.server.fields import Body, SamplingFields
from sgljax_engine.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    StreamOptions,
)
from sgljax_engine.server.sglang.schemas import GenerateReqInput, SGLangSampling

OUTPUT = Path(__file__).with_name("server.md")
BODIES: dict[str, type[Body]] = {
    "sampling_params": SGLangSampling,
    "/generate": GenerateReqInput,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "stream_options": StreamOptions,
}
"""Bodies in the page, by what it calls them."""

_BEGIN, _END = "<!-- fields: made by docs/make_server_fields.py -->\n", "<!-- end of fields -->\n"
_SAMPLING_TEXT = """### Sampling

In `sampling_params` on `/generate`, and in the body itself on the routes of OpenAI.
[sampling.md](sampling.md) has the ranges.
"""
_FOREIGN_TEXT = """### Accepted when empty, refused else

Clients send these with values that ask for nothing: null, false, an empty text or list or object,
and what is named here. Any other value gets status 400, and the message says what to do instead.
"""


def render(text: str) -> str:
    """The text of docs/server.md with its tables of fields made anew."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + "\n" + "\n".join(_sections()) + "\n" + _END + tail


def _sections() -> Iterator[str]:
    docs = _sampling_docs()
    shared = SamplingFields.model_fields
    yield _SAMPLING_TEXT
    yield _table("field", {name: _first_sentence(docs[name]) for name in shared})
    more = [name for name in SGLangSampling.model_fields if name not in shared]
    yield _table(
        "field of `sampling_params` alone",
        {name: _first_sentence(docs[name]) for name in more if name in docs}
        | _described(SGLangSampling, [name for name in more if name not in docs]),
    )
    yield "### `/generate`\n"
    yield _table("field", _described(GenerateReqInput))
    yield "### `/v1/completions` and `/v1/chat/completions`\n"
    yield _table("field of both", _described(OpenAIRequest, without=shared))
    openai = OpenAIRequest.model_fields
    yield _table("field of `/v1/completions`", _described(CompletionRequest, without=openai))
    yield _table("field of `/v1/chat/completions`", _described(ChatRequest, without=openai))
    yield _FOREIGN_TEXT
    for title, body in BODIES.items():
        yield "\n".join(
            [
                f"| in {_code(title)} | also accepted | instead |",
                "|---|---|---|",
                *_foreign(body),
                "",
            ]
        )


def _sampling_docs() -> dict[str, str]:
    path = Path(__file__).with_name("make_sampling_table.py")
    spec = importlib.util.spec_from_file_location("make_sampling_table", path)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker.attribute_docs(SamplingParams)


def _described(
    body: type[Body], names: Any = None, without: Mapping[str, Any] | None = None
) -> dict[str, str]:
    fields = body.model_fields
    chosen = [name for name in names or fields if name not in (without or {})]
    for name in chosen:
        assert fields[name].description, f"{body.__name__}.{name} has no description"
    return {name: fields[name].description or "" for name in chosen}


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {text} |" for name, text in rows.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *lines, ""])


def _foreign(body: type[Body]) -> Iterator[str]:
    groups: dict[str, list[ForeignField]] = {}
    for field in body.foreign.values():
        groups.setdefault(field.instead, []).append(field)
    for instead, fields in groups.items():
        names = ", ".join(f"`{field.name}`" for field in fields)
        yield f"| {names} | {', '.join(filter(None, map(_also, fields)))} | {instead} |"


def _also(field: ForeignField) -> str:
    values = [_code(_json(value)) for value in field.neutral]
    values += [] if field.takes_false else ["not false"]
    return f"{field.name} {', '.join(values)}" if values else ""


def _json(value: Any) -> str:
    return repr(value).replace("'", '"').replace("True", "true")


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].removesuffix(".")


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    assert SGLangSampling.foreign.keys() < FOREIGN_FIELDS.keys()
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
