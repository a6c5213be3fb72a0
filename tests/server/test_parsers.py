"""Thoughts and tool calls are found however the text is cut into pieces, and no text is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgljax_engine.server.openai.reasoning import ReasoningSplitter, Split, split
from sgljax_engine.server.openai.tools import (
    TOOL_FORMATS,
    Call,
    LlamaParser,
    QwenParser,
    find_format,
)

ADD = Call("add", '{"x": 1}')
ADD_JSON = '{"name": "add", "arguments": {"x": 1}}'
LLAMA_JSON = '{"name": "add", "parameters": {"x": 1}}'


def pieces(text, cuts):
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def in_pieces(splitter, parts):
    found = [splitter.feed(part) for part in parts] + [splitter.end()]
    return Split("".join(s.reasoning for s in found), "".join(s.content for s in found))


def parsed(parser, parts):
    content = "".join([parser.feed(part) for part in parts] + [parser.end()])
    return content, parser.calls


TAGGED = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "a", "\n", "<tool_call>", "</tool_call>", "{"])
).map("".join)

CALLS = st.lists(
    st.sampled_from([f"<tool_call>{ADD_JSON}</tool_call>", "\n", "a", "<tool", "<tool_call>"])
).map("".join)


class TestReasoning:
    @pytest.mark.parametrize(
        ("text", "is_open", "expected"),
        [
            ("<think>a</think>b", False, Split("a", "b")),
            ("\n<think>a</think>b</think>", False, Split("a", "b</think>")),
            ("a</think>b", True, Split("a", "b")),
            ("a</thin", True, Split("a</thin", "")),
            ("<think>a", False, Split("a", "")),
            ("a<think>b</think>", False, Split("", "a<think>b</think>")),
            ("<thi", False, Split("", "<thi")),
            ("", False, Split("", "")),
        ],
    )
    def test_a_text(self, text, is_open, expected):
        assert split(text, starts_inside=is_open) == expected

    @given(TAGGED, st.lists(st.integers(0, 200)), st.booleans())
    def test_pieces_do_not_matter(self, text, cuts, is_open):
        found = in_pieces(ReasoningSplitter(starts_inside=is_open), pieces(text, cuts))
        assert found == split(text, starts_inside=is_open)
        left = text.replace("<think>", "").replace("</think>", "").split()
        assert sorted("".join(left)) == sorted(
            "".join("".join(found).replace("<think>", "").replace("</think>", "").split())
        )


class TestQwen:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (f"<tool_call>\n{ADD_JSON}\n</tool_call>", "", [ADD]),
            (f"Hm <tool_call>{ADD_JSON}</tool_call>\n<tool_call>{ADD_JSON}</tool_call>\n",
             "Hm ", [ADD, ADD]),
            ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
            ("<tool_call>[1]</tool_call>x", "<tool_call>[1]</tool_call>x", []),
            (f"<tool_call>{ADD_JSON}", f"<tool_call>{ADD_JSON}", []),
            ("no call <", "no call <", []),
            ('<tool_call>{"name": "f"}</tool_call>', "", [Call("f", "{}")]),
        ],
    )  # fmt: skip
    def test_a_text(self, text, content, calls):
        assert parsed(QwenParser(), [text]) == (content, calls)

    @given(CALLS, st.lists(st.integers(0, 300)))
    def test_pieces_do_not_matter(self, text, cuts):
        assert parsed(QwenParser(), pieces(text, cuts)) == parsed(QwenParser(), [text])

    @given(TAGGED)
    def test_text_without_calls_is_whole(self, text):
        content, calls = parsed(QwenParser(), [text])
        assert not calls
        assert content == text


class TestLlama:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (LLAMA_JSON, "", [ADD]),
            (f"<|python_tag|>{LLAMA_JSON}; {LLAMA_JSON}", "", [ADD, ADD]),
            ("{broken", "{broken", []),
            ("The sum is {x}", "The sum is {x}", []),
            (f"{LLAMA_JSON} and more", f"{LLAMA_JSON} and more", []),
            ('{"name": 1}', '{"name": 1}', []),
        ],
    )
    def test_a_text(self, text, content, calls):
        assert parsed(LlamaParser(), [text]) == (content, calls)

    @given(st.sampled_from([LLAMA_JSON, "<|python_tag|>" + LLAMA_JSON, "<|py", " a{"]),
           st.lists(st.integers(0, 100)))  # fmt: skip
    def test_pieces_do_not_matter(self, text, cuts):
        assert parsed(LlamaParser(), pieces(text, cuts)) == parsed(LlamaParser(), [text])


def test_the_template_says_the_format():
    assert find_format("... <tool_call> ...") is TOOL_FORMATS["qwen"]
    assert find_format("... <|python_tag|> ...") is TOOL_FORMATS["llama"]
    assert find_format('{"name": f, "parameters": {}}') is TOOL_FORMATS["llama"]
    assert find_format("{{ messages }}") is find_format(None) is None
