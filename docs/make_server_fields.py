"""Writes the lists of fields of docs/server.md from the classes of the request bodies.

    python docs/make_server_fields.py

A test compares the page with `render(page)`.
"""

from __future__ import annotations

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

SGLANG_NAMES = {
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "structured_outputs",
    "regex": "structured_outputs",
    "ebnf": "structured_outputs",
}
"""SGLang's names of fields, which `sampling_params` takes beside the engine's."""

_BEGIN, _END = "<!-- fields: made by docs/make_server_fields.py -->\n", "<!-- end of fields -->\n"
_UNUSED = "accepted and not used"
_FOREIGN_TEXT = """Other fields of SGLang, vLLM and OpenAI are accepted with values that ask for
nothing: null, an empty text, list or object, mostly false, and their servers' defaults. Any other
value gets status 400 and a message that says what to do instead. Other names are refused.
"""


def render(text: str) -> str:
    """The text of docs/server.md with its lists of fields made anew."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + "\n" + "\n".join(_sections()) + "\n" + _END + tail


def _sections() -> Iterator[str]:
    openai = OpenAIRequest.model_fields
    yield "| in | fields |\n|---|---|"
    yield (
        "| `sampling_params` of `/generate` | those of [Sampling](sampling.md#supported), "
        + ", ".join(f"{_names_of(own)} for `{own}`" for own in dict.fromkeys(SGLANG_NAMES.values()))
        + " |"
    )
    yield _row("`/generate`", _described(GenerateReqInput))
    yield _row("bodies of OpenAI's routes", _described(OpenAIRequest))
    yield _row("`/v1/completions` alone", _described(CompletionRequest, without=openai))
    yield _row("`/v1/chat/completions` alone", _described(ChatRequest, without=openai))
    yield ""
    yield _FOREIGN_TEXT


def _names_of(own: str) -> str:
    return ", ".join(_code(name) for name, each in SGLANG_NAMES.items() if each == own)


def _described(body: type[Body], without: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Descriptions by field; those of sampling are where `SamplingParams` is described."""
    fields = body.model_fields
    chosen = [name for name in fields if name not in (without or {})]
    for name in chosen:
        is_sampling = name in SamplingFields.model_fields
        assert is_sampling or fields[name].description, f"{body.__name__}.{name} is not described"
    return {name: fields[name].description or "" for name in chosen}


def _row(where: str, texts: Mapping[str, str]) -> str:
    used = [_code(name) for name, text in texts.items() if text != _UNUSED]
    unused = [_code(name) for name, text in texts.items() if text == _UNUSED]
    end = f"; {_UNUSED}: {', '.join(unused)}" if unused else ""
    return f"| {where} | {', '.join(used)}{end} |"


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
