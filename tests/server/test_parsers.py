"""Thoughts and tool calls are found however the text is cut into pieces, and no text is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgljax_engine.server.openai.calls import Call
from sgljax_engine.server.openai.reader import AnswerReader
from sgljax_engine.server.openai.reasoning import ReasoningSplitter, Split, split
from sgljax_engine.server.openai.tools import TOOL_FORMATS, find_format

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
    st.sampled_from(
        [f"<tool_call>{ADD_JSON}</tool_call>", "\n", "a", "<tool", "<tool_call>", "</tool_call>",
         '{"name": "f", "arguments": {"t": "', '"}}', '\\"', "{", "}", '"']
    )
).map("".join)  # fmt: skip


def qwen():
    return TOOL_FORMATS["qwen"].make_parser({})


def llama():
    return TOOL_FORMATS["llama"].make_parser({})


def coder():
    types = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}}
    return TOOL_FORMATS["qwen_coder"].make_parser({"f": {"properties": types}})


def check(make_parser, text, content, calls):
    """The same whole and in pieces of every size that matters."""
    assert parsed(make_parser(), [text]) == (content, calls)
    for size in range(1, 9):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert parsed(make_parser(), parts) == (content, calls), size


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
            # A tag inside of a string is no boundary.
            ('<tool_call>{"name": "f", "arguments": {"t": "a </tool_call> b"}}</tool_call>',
             "", [Call("f", '{"t": "a </tool_call> b"}')]),
            ('<tool_call>{"name": "f", "arguments": {"t": "a \\"</tool_call>"}}</tool_call>',
             "", [Call("f", '{"t": "a \\"</tool_call>"}')]),
            ('<tool_call>{"name": "f", "arguments": {"t": "<tool_call>"}}</tool_call>!',
             "!", [Call("f", '{"t": "<tool_call>"}')]),
            # A broken block does not take the next one along.
            (f'<tool_call>{{"bro"ken": "x</tool_call> <tool_call>{ADD_JSON}</tool_call> end',
             '<tool_call>{"bro"ken": "x</tool_call> end', [ADD]),
            (f"<tool_call>{ADD_JSON}}}</tool_call>x", f"<tool_call>{ADD_JSON}}}</tool_call>x", []),
        ],
    )  # fmt: skip
    def test_a_text(self, text, content, calls):
        check(qwen, text, content, calls)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ("null", "{}"),
            ('""', "{}"),
            ('" "', "{}"),
            ('"null"', "{}"),
            ("{}", "{}"),
            ('"{\\"x\\": 1}"', '{"x": 1}'),
            ('{"t": "a\nb"}', '{"t": "a\\nb"}'),
            ('"hello"', None),
            ("[1]", None),
            ("3", None),
            ('{"x": NaN}', None),
            ('{"x": 1e999}', None),
            (f'{{"x": {"9" * 5000}}}', None),
            (f'{{"x": {"[" * 5000}{"]" * 5000}}}', None),
        ],
    )
    def test_arguments_are_an_object_or_there_is_no_call(self, arguments, expected):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        calls = [] if expected is None else [Call("f", expected)]
        assert parsed(qwen(), [text]) == ("" if calls else text, calls)

    @given(CALLS, st.lists(st.integers(0, 300)))
    def test_pieces_do_not_matter(self, text, cuts):
        assert parsed(qwen(), pieces(text, cuts)) == parsed(qwen(), [text])

    @given(TAGGED)
    def test_text_without_calls_is_whole(self, text):
        content, calls = parsed(qwen(), [text])
        assert not calls
        assert content == text


XML = """<tool_call>
<function=f>
<parameter=a>
3
</parameter>
<parameter=b>
x </parameter> y

z
</parameter>
<parameter=c>
{"k": [1]}
</parameter>
</function>
</tool_call>"""
XML_CALL = Call("f", '{"a": 3, "b": "x </parameter> y\\n\\nz", "c": {"k": [1]}}')


class TestQwenCoder:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (XML, "", [XML_CALL]),
            (f"I do.\n{XML}\n{XML}\n", "I do.\n", [XML_CALL, XML_CALL]),
            ("<tool_call><function=now></function></tool_call>", "", [Call("now", "{}")]),
            ("<tool_call><function=f><parameter=b>null</parameter></function></tool_call>",
             "", [Call("f", '{"b": "null"}')]),
            ("<tool_call><function=f><parameter=a>many</parameter></function></tool_call>",
             "", [Call("f", '{"a": "many"}')]),
            ("<tool_call><function=f><parameter=b></tool_call></parameter></function></tool_call>.",
             ".", [Call("f", '{"b": "</tool_call>"}')]),
            ("<tool_call><function=f><parameter=a>1</function></tool_call>x",
             "<tool_call><function=f><parameter=a>1</function></tool_call>x", []),
            (XML[:-1], XML[:-1], []),
            (f"<tool_call>{ADD_JSON}</tool_call>", f"<tool_call>{ADD_JSON}</tool_call>", []),
        ],
    )  # fmt: skip
    def test_a_text(self, text, content, calls):
        check(coder, text, content, calls)


class TestLlama:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (LLAMA_JSON, "", [ADD]),
            (f"\n {LLAMA_JSON}\n", "", [ADD]),
            (f"<|python_tag|>{LLAMA_JSON}; {LLAMA_JSON}", "", [ADD, ADD]),
            ("{broken", "{broken", []),
            ("The sum is {x}", "The sum is {x}", []),
            (f"{LLAMA_JSON} and more", "and more", [ADD]),
            (f"{LLAMA_JSON}\n\nShall I go on?", "Shall I go on?", [ADD]),
            (f"{LLAMA_JSON}; {LLAMA_JSON} yes", "yes", [ADD, ADD]),
            (f"Let me see. <|python_tag|>{LLAMA_JSON}", "Let me see. ", [ADD]),
            (f"I call {LLAMA_JSON}.", "I call .", [ADD]),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
            ('{"name": "now", "parameters": null}', "", [Call("now", "{}")]),
            ('{"name": "f", "parameters": {"t": "}; {"}}', "", [Call("f", '{"t": "}; {"}')]),
            ('{"name": 1}', '{"name": 1}', []),
            ('He is {"name": "Bob"}', 'He is {"name": "Bob"}', []),
            (LLAMA_JSON[:-1], LLAMA_JSON[:-1], []),
            ("if (a) { return; }", "if (a) { return; }", []),
        ],
    )
    def test_a_text(self, text, content, calls):
        check(llama, text, content, calls)

    @example([LLAMA_JSON, "{", '"'], [39])  # ends in an object that is open
    @example([" a", "{", '"'], [2])
    @given(
        st.lists(
            st.sampled_from([LLAMA_JSON, "<|python_tag|>", "<|py", " a", "{", "}", '"', "; "])
        ),
        st.lists(st.integers(0, 100)),
    )
    def test_pieces_do_not_matter(self, parts, cuts):
        text = "".join(parts)
        assert parsed(llama(), pieces(text, cuts)) == parsed(llama(), [text])


class TestAnswer:
    """Thoughts, content and calls together."""

    @pytest.mark.parametrize(
        ("text", "expected", "calls"),
        [
            (f"I add.<tool_call>{ADD_JSON}</tool_call>", Split("I add.", ""), [ADD]),
            (f"Or <tool_call>{ADD_JSON}</tool_call> hm", Split("Or hm", ""), [ADD]),
            (f"Or <tool_call>{ADD_JSON}</tool_call>?</think>No.",
             Split(f"Or <tool_call>{ADD_JSON}</tool_call>?", "No."), []),
            (f"Hm</think>Yes<tool_call>{ADD_JSON}</tool_call>", Split("Hm", "Yes"), [ADD]),
            ("Or <tool_call>{", Split("Or <tool_call>{", ""), []),
            ("only thoughts </thi", Split("only thoughts </thi", ""), []),
        ],
    )  # fmt: skip
    def test_thoughts_that_the_prompt_opens(self, text, expected, calls):
        for size in (*range(1, 9), len(text)):
            reader = AnswerReader(ReasoningSplitter(starts_inside=True), qwen)
            found = Split("", "")
            for start in range(0, len(text), size):
                found += reader.feed(text[start : start + size])
            assert (found + reader.end(), reader.calls) == (expected, calls), size

    @given(
        st.lists(st.sampled_from(["</think>", "<think>", ADD_JSON, "<tool_call>", "</tool_call>",
                                  "<|python_tag|>", LLAMA_JSON, "a", " ", "{", '"'])),
        st.lists(st.integers(0, 300)),
        st.booleans(),
        st.sampled_from([qwen, llama, coder]),
    )  # fmt: skip
    def test_pieces_do_not_matter(self, parts, cuts, is_open, make_parser):
        text = "".join(parts)

        def read(pieces):
            reader = AnswerReader(ReasoningSplitter(starts_inside=is_open), make_parser)
            found = Split("", "")
            for piece in pieces:
                found += reader.feed(piece)
            return found + reader.end(), reader.calls

        assert read(pieces(text, cuts)) == read([text])

    def test_the_first_call_alone(self):
        reader = AnswerReader(None, qwen, max_calls=1)
        found = reader.feed(f"<tool_call>{ADD_JSON}</tool_call>" * 2) + reader.end()
        assert (found, reader.calls) == (Split("", ""), [ADD])


def test_the_template_says_the_format():
    assert find_format("... <tool_call> ...") is TOOL_FORMATS["qwen"]
    assert find_format("... <tool_call>\\n<function=f> ...") is TOOL_FORMATS["qwen_coder"]
    assert find_format("... <|python_tag|> ...") is TOOL_FORMATS["llama"]
    assert find_format('{"name": f, "parameters": {}}') is TOOL_FORMATS["llama"]
    assert find_format("{{ messages }}") is find_format(None) is None
