"""Writes the lists of fields of docs/server.md from the classes of the request bodies.

    python docs/make_server_fields.py

A test compares the page with `render(page)`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sgljax_engine.server.chat import ChatRequest
from sgljax_engine.server.completions import CompletionRequest
from sgljax_engine.server.fields import Body, SamplingFields
from sgljax_engine.server.openai import OpenAIRequest, StreamOptions
from sgljax_engine.server.sglang import GenerateReqInput, SGLangSampling

OUTPUT = Path(__file__).with_name("server.md")
BODIES: dict[str, type[Body]] = {
    "sampling_params": SGLangSampling,
    "/generate": GenerateReqInput,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "stream_options": StreamOptions,
}
"""Bodies in the page, by what it calls them."""

SGLANG_NAMES = {"sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output"}
"""SGLang's names of fields, which `sampling_params` takes beside the engine's."""

_BEGIN, _END = "<!-- fields: made by docs/make_server_fields.py -->\n", "<!-- end of fields -->\n"
_FOREIGN_TEXT = """### Accepted when empty, refused else

Clients send these with values that ask for nothing: null, false, an empty text or list or object,
and the values in brackets. Any other value gets status 400 and a message that says why, and what to
do instead. In `sampling_params` they are those that [Sampling](sampling.md#refused) refuses, but
for the two names above.
"""


def render(text: str) -> str:
    """The text of docs/server.md with its lists of fields made anew."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + "\n" + "\n".join(_sections()) + "\n" + _END + tail


def _sections() -> Iterator[str]:
    shared = SamplingFields.model_fields
    yield "### Sampling\n"
    yield (
        "`sampling_params` of `/generate` has the fields of [Sampling](sampling.md#supported), "
        + " and ".join(f"`{name}` for `{own}`" for name, own in SGLANG_NAMES.items())
        + ". The bodies of OpenAI's routes have these themselves: "
        + ", ".join(map(_code, shared))
        + ".\n"
    )
    yield "### `/generate`\n"
    yield _list(_described(GenerateReqInput))
    yield "### `/v1/completions` and `/v1/chat/completions`\n"
    yield _list(_described(OpenAIRequest, without=shared))
    openai = OpenAIRequest.model_fields
    yield "`/v1/completions` alone:\n"
    yield _list(_described(CompletionRequest, without=openai))
    yield "`/v1/chat/completions` alone:\n"
    yield _list(_described(ChatRequest, without=openai))
    yield _FOREIGN_TEXT
    completion, chat = CompletionRequest.foreign, ChatRequest.foreign
    both = {name for name, field in completion.items() if chat.get(name) == field}
    in_each = {
        "In `/generate`": GenerateReqInput.foreign,
        "In both routes of OpenAI": {name: completion[name] for name in completion if name in both},
        "In `/v1/completions`": {name: completion[name] for name in completion if name not in both},
        "In `/v1/chat/completions`": {name: chat[name] for name in chat if name not in both},
        "In `stream_options`": StreamOptions.foreign,
    }
    named = _sampling_maker().named
    for title, fields in in_each.items():
        yield f"{title}: {', '.join(map(named, fields.values()))}.\n"


def _sampling_maker() -> Any:
    path = Path(__file__).with_name("make_sampling_table.py")
    spec = importlib.util.spec_from_file_location("make_sampling_table", path)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def _described(
    body: type[Body], names: Any = None, without: Mapping[str, Any] | None = None
) -> dict[str, str]:
    fields = body.model_fields
    chosen = [name for name in names or fields if name not in (without or {})]
    for name in chosen:
        assert fields[name].description, f"{body.__name__}.{name} has no description"
    return {name: fields[name].description or "" for name in chosen}


def _list(rows: Mapping[str, str]) -> str:
    return "\n".join([*(f"- `{name}`: {text}" for name, text in rows.items()), ""])


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
