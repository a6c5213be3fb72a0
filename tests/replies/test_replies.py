"""Replies are divided right, however their text is cut into pieces, and no text is lost."""

from __future__ import annotations

import base64
import collections
import functools
import gc
import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgljax_engine import InvalidConfigError
from sgljax_engine.replies import parser as response_parser
from sgljax_engine.replies.formats import find_format, known_template
from sgljax_engine.replies.parser import ResponseParser, Split
from sgljax_engine.replies.response_template import CALLS, load_template
from sgljax_engine.replies.values import Call
from tests.replies.forms import (
    FORMS,
    NUM_REPLIES,
    TOOLS,
    deepseek,
    digest,
    make_reply,
    normal_form,
)
from tests.replies.templates import templates

GOLDENS = Path(__file__).parents[1] / "golden" / "response_parser.json"
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
TYPES = {
    "a": {"type": "integer"},
    "b": {"type": "string"},
    "c": {"type": "object"},
    "d": {"type": "boolean"},
    "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "f": {"$ref": "#/$defs/Size"},
    "g": {"type": "number"},
    "h": {},
}
OWN = {
    "f": {"properties": TYPES, "$defs": {"Size": {"type": "integer"}}},
    "g": {},
    "add": {"properties": {"x": {"type": "integer"}}},
}
ADD = Call("add", '{"x": 1}')
JSON = '{"name": "add", "arguments": {"x": 1}}'
LLAMA = '{"name": "add", "parameters": {"x": 1}}'
THINKING = FORMS["qwen3"].head + "<think>\n"

DIFFERENCES = {
    "a mark in a string": "a closing mark inside a string of JSON or XML ends nothing",
    "a string in a union": "where the schema allows a string, a string stays one",
    "a Python value": "an object in Python's spelling is an object",
    "a repeated mark": "a second opening mark is no part of the thoughts",
    "thoughts without a mark": "a bare closing mark ends thoughts",
    "unclosed thoughts": "calls in thoughts that never end are calls",
    "no call": "what is no call stays content; the other parser raises, or drops it",
    "text behind calls": "content on both sides of calls is kept; the other keeps the last",
    "untidy XML": "functions without tags, several in a block, arguments without an end",
    "no closing mark": "a call that a stop string ended is one; XML's last tag needs no mark",
    "cut": "an unfinished call is content; the other raises, or leaves out arguments",
    "JSON without a closing mark": "ends with its value, so that several calls are found",
}
"""Traits of replies that we read otherwise than transformers on purpose, and what we do."""


def parser(name, *, prompt="", schemas=None, **options):
    found = find_format(FORMS[name].template)
    schemas = OWN if schemas is None else schemas
    has_calls = CALLS in found.template.fields
    return ResponseParser(
        found.template,
        prompt=prompt,
        schemas=schemas if has_calls else None,
        names=schemas if found.only_known else None,
        waits=found.opens_thoughts,
        **options,
    )


def parsed(reader, parts):
    found = functools.reduce(Split.__add__, [reader.feed(part) for part in parts], Split("", ""))
    return found + reader.end(), reader.calls


def in_pieces(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def check(name, text, content, calls, reasoning="", prompt=""):
    """The same whole and in pieces of every size that matters."""
    expected = Split(reasoning, content), calls
    assert parsed(parser(name, prompt=prompt), [text]) == expected
    for size in range(1, 9):
        assert parsed(parser(name, prompt=prompt), in_pieces(text, size)) == expected, size


def read_reply(name, reply, parts):
    (reasoning, content), calls = parsed(parser(name, prompt=reply.prompt, schemas=SCHEMAS), parts)
    return reasoning, content, [(call.name, json.loads(call.arguments)) for call in calls]


def check_replies(name, seeds, sizes):
    """Each reply means what it was made of, in pieces too. Returns how many are like the golden's.

    A difference to the golden has a name, and does not excuse anything: `check_meaning` says what
    ours must be.

    Args:
        name: A format.
        seeds: Numbers of replies.
        sizes: The sizes of pieces for a number.
    """
    packed = base64.b85decode(json.loads(GOLDENS.read_text())["answers"][name])
    known = [int.from_bytes(packed[at : at + 2], "big") for at in range(0, len(packed), 2)]
    counts = collections.Counter()
    for seed in seeds:
        reply = make_reply(name, seed)
        whole = read_reply(name, reply, [reply.text])
        for size in sizes(seed):
            assert read_reply(name, reply, in_pieces(reply.text, size)) == whole, (seed, size)
        check_meaning(reply, *whole)
        if digest(normal_form(*whole)) == known[seed]:
            counts["equal"] += 1
        else:
            assert reply.traits & DIFFERENCES.keys(), f"{seed}: {reply}"
            counts["differs by name"] += 1
    return counts


def check_meaning(reply, reasoning, content, calls):
    """A whole reply is what it was made of; a cut one begins so, and its end is left as it is."""
    expected = normal_form(reply.reasoning, reply.content, reply.calls)
    if not reply.is_cut:
        assert normal_form(reasoning, content, calls) == expected, reply
        return
    assert reply.num_complete <= len(calls) <= len(reply.calls), reply
    num_whole = max(0, len(calls) - 1)
    assert tuple(calls[:num_whole]) == reply.calls[:num_whole], reply
    if calls:  # tags that a cut took away are arguments that are left out
        (name, arguments), (given, full) = calls[-1], reply.calls[num_whole]
        assert name == given, reply
        assert arguments.items() <= full.items() if reply.is_xml else arguments == full, reply
    if "thoughts without a mark" in reply.traits and not reasoning:  # it was cut in them
        assert content == reply.text, reply
        return
    check_beginning(reply, reasoning, reply.reasoning)
    check_beginning(reply, content, reply.content)


def check_beginning(reply, ours, full):
    """A text begins as the whole one does; what it has beyond that is the reply's end."""
    ours, full = ours.strip(), full.strip()
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, full, strict=False))
    rest = ours[len(list(pairs)) :].strip()
    assert reply.text.rstrip().endswith(rest), (ours, full, reply)


class TestGenerated:
    @pytest.mark.parametrize("name", FORMS)
    def test_replies(self, name):
        counts = check_replies(name, range(100), lambda seed: [1 + seed % 8])
        assert counts["equal"] >= 40, counts

    @pytest.mark.soak
    @pytest.mark.parametrize("name", FORMS)
    def test_all_replies(self, name):
        counts = check_replies(name, range(NUM_REPLIES), lambda _: range(1, 9))
        assert sum(counts.values()) == NUM_REPLIES
        assert counts["equal"] >= 0.45 * NUM_REPLIES, counts

    def test_goldens_are_of_our_templates(self):
        assert json.loads(GOLDENS.read_text())["templates"] == json.loads(json.dumps(templates()))

    @pytest.mark.parametrize("trait", DIFFERENCES)
    def test_every_difference_occurs(self, trait):
        assert any(trait in make_reply(name, n).traits for name in FORMS for n in range(200))


MARKS = ["<think>", "</think>", "<th", "a", "\n", "{", "}", '"', '\\"', ";", " ", "\ufffd"]
PARTS = {
    "qwen3": [f"<tool_call>{JSON}</tool_call>", "<tool_call>", "</tool_call>", "<tool", JSON],
    "qwen3.5": [
        "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=b>",
        "</parameter>", "<para",
    ],
    "llama3": [LLAMA, "<|python_tag|>", "<|py"],
    "gemma4": [
        '<|tool_call>call:add{x:1}<tool_call|>', "<|channel>", "thought\n", "<channel|>",
        "<|tool_call>call:f{", '<|"|>', "<tool_call|>", "<|",
    ],
    "mistral": ["[TOOL_CALLS]", f"[{JSON}]", "[TOOL"],
    "deepseek": [
        deepseek("<|tool calls begin|>"), deepseek("<|tool call begin|>"), deepseek("<|tool sep|>"),
        "function", "f\n```json\n", "{}", "\n```", deepseek("<|tool call end|>"), deepseek("<|to"),
    ],
    "gpt-oss": [
        "<|start|>assistant", "<|channel|>", "analysis", "commentary to=functions.f", "final",
        "<|message|>", "<|end|>", "<|call|>", "{}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@settings(deadline=None)
@given(data=st.data())
def test_pieces_do_not_matter(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS[name] + MARKS))))
    cuts = data.draw(st.lists(st.integers(0, 300)))
    prompt = FORMS[name].head + data.draw(st.sampled_from(["", "<think>\n", "<think>\n</think>"]))
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = parsed(parser(name, prompt=prompt), [text])
    assert parsed(parser(name, prompt=prompt), parts) == whole
    if not whole[1]:  # nothing but marks of thoughts and messages is left out
        left = "".join(whole[0]).split()
        assert not collections.Counter("".join(left)) - collections.Counter(text)


class TestThoughts:
    @pytest.mark.parametrize(
        ("text", "is_open", "expected"),
        [
            ("<think>a</think>b", False, Split("a", "b")),
            ("\n<think>a</think>b</think>", False, Split("a", "b</think>")),
            ("a</think>b", True, Split("a", "b")),
            ("a</think>b", False, Split("", "a</think>b")),
            ("<think><think>a</think>b", False, Split("a", "b")),
            ("<think>a</think>b", True, Split("a", "b")),
            ("a<think>b</think>c", False, Split("", "a<think>b</think>c")),
            ("a</thin", True, Split("a</thin", "")),
            ("<think>a", False, Split("a", "")),
            ("a<think>b", False, Split("", "a<think>b")),
            ("<thi", False, Split("", "<thi")),
            ("", False, Split("", "")),
            ("<think>\na\n</think>\n\nb\n", False, Split("\na\n", "\n\nb\n")),
        ],
    )
    def test_a_text(self, text, is_open, expected):
        prompt = THINKING if is_open else FORMS["qwen3"].head
        check("qwen3", text, expected.content, [], expected.reasoning, prompt)

    @pytest.mark.parametrize(
        ("text", "expected", "calls"),
        [
            (f"I add.<tool_call>{JSON}</tool_call>", Split("I add.", ""), [ADD]),
            (f"Or <tool_call>{JSON}</tool_call> hm", Split("Or hm", ""), [ADD]),
            (f"Or <tool_call>{JSON}</tool_call>?</think>No.",
             Split(f"Or <tool_call>{JSON}</tool_call>?", "No."), []),
            (f"Hm</think>Yes<tool_call>{JSON}</tool_call>", Split("Hm", "Yes"), [ADD]),
            ("Or <tool_call>{", Split("Or <tool_call>{", ""), []),
        ],
    )  # fmt: skip
    def test_calls_in_thoughts(self, text, expected, calls):
        check("qwen3", text, expected.content, calls, expected.reasoning, THINKING)

    def test_words_behind_closed_thoughts_come_at_once(self):
        reader = parser("qwen3", prompt=THINKING + "</think>")
        assert reader.feed("Yes, ") == Split("", "Yes, ")
        reader = parser("qwen3", prompt=FORMS["qwen3"].head, thinks=False)
        assert reader.feed("<think>") == Split("", "<think>")

    def test_words_come_at_once_where_the_model_opens_its_thoughts(self):
        reader = parser("qwen3", prompt=FORMS["qwen3"].head)
        for part in ("Ye", "s", ", ", "</think>", "no"):
            assert reader.feed(part) == Split("", part)

    @pytest.mark.parametrize("name", ["deepseek", "qwen3.5"])
    def test_words_wait_where_prompts_open_thoughts_and_this_one_does_not(self, name):
        reader = parser(name, prompt=FORMS[name].head)
        assert reader.feed("Yes, ") == Split("", "")
        assert reader.feed("</think>") == Split("Yes, ", "")
        assert reader.feed("no") == Split("", "no")
        check(name, "Yes, no", "Yes, no", [], prompt=FORMS[name].head)

    @pytest.mark.parametrize(
        ("end", "expected"),
        [
            # Qwen3; Qwen3-Thinking; Qwen3.5; DeepSeek-R1 of today, and the first.
            ("'<think>\\n\\n</think>\\n\\n' }}{%- endif %}", False),
            ("'<|im_start|>assistant\\n<think>\\n' }}", True),
            ("'<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}", True),
            (deepseek("'<|Assistant|><think>\\n'}}"), True),
            (deepseek("'<|Assistant|>'}}"), False),
        ],
    )
    def test_the_chat_template_says_whether_prompts_open_them(self, end, expected):
        history = "{{ '<think>' + message.reasoning + '</think>' }}"
        template = history + "{%- if add_generation_prompt %}{{- " + end
        assert find_format(template).opens_thoughts == expected

    def test_gemmas_are_not_content(self):
        text = "<|channel>thought\nhm\n<channel|>yes"
        check("gemma4", text, "yes", [], "hm\n", FORMS["gemma4"].head)

    def test_stop_tags(self):
        head = FORMS["qwen3"].head
        assert parser("qwen3", prompt=head).stop_tags() == ("<think>", "</think>")
        assert parser("qwen3", prompt=THINKING).stop_tags() == ("", "</think>")
        assert parser("qwen3", prompt=THINKING + "</think>\n").stop_tags() is None
        assert parser("qwen2.5").stop_tags() is None


class TestJson:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (f"<tool_call>\n{JSON}\n</tool_call>", "", [ADD]),
            (f"Hm <tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>\n",
             "Hm ", [ADD, ADD]),
            ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
            ("<tool_call>[1]</tool_call>x", "<tool_call>[1]</tool_call>x", []),
            (f"<tool_call><tool_call>{JSON}</tool_call>", "<tool_call>", [ADD]),
            ("no call <", "no call <", []),
            ('<tool_call>{"name": "f"}</tool_call>', "", [Call("f", "{}")]),
            ('<tool_call>{"name": "f", "arguments": {"t": "a </tool_call> b"}}</tool_call>',
             "", [Call("f", '{"t": "a </tool_call> b"}')]),
            ('<tool_call>{"name": "f", "arguments": {"t": "a \\"</tool_call>"}}</tool_call>',
             "", [Call("f", '{"t": "a \\"</tool_call>"}')]),
            ('<tool_call>{"name": "f", "arguments": {"t": "<tool_call>"}}</tool_call>!',
             "!", [Call("f", '{"t": "<tool_call>"}')]),
            # A broken block does not take the next one along.
            (f'<tool_call>{{"bro"ken": "x</tool_call> <tool_call>{JSON}</tool_call> end',
             '<tool_call>{"bro"ken": "x</tool_call> end', [ADD]),
            (f"<tool_call>{JSON}}}</tool_call>x", f"<tool_call>{JSON}}}</tool_call>x", []),
            # Cut behind the call, as by a stop string, and within it.
            (f"<tool_call>{JSON}", "", [ADD]),
            (f"<tool_call>{JSON}\n</tool_c", "", [ADD]),
            (f"<tool_call>{JSON[:-1]}", f"<tool_call>{JSON[:-1]}", []),
            ('<tool_call>{"name": "f", "arguments": {"d": "False", "e": "12345", "b": "7"}}',
             "", [Call("f", '{"d": false, "e": "12345", "b": "7"}')]),
            ('<tool_call>{"name": "f", "arguments": {"b": "\\u5317 \\ud83c\\udf27"}}</tool_call>',
             "", [Call("f", '{"b": "\u5317 \U0001f327"}')]),
            ('<tool_call>{"name": "f", "arguments": {"b": "\\ud83c"}}</tool_call>',
             "", [Call("f", '{"b": "\\ud83c"}')]),
        ],
    )  # fmt: skip
    def test_a_text(self, text, content, calls):
        check("qwen2.5", text, content, calls)

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
        assert parsed(parser("qwen2.5"), [text]) == (Split("", "" if calls else text), calls)

    def test_a_call_of_the_prompt_is_none_of_the_reply(self):
        block = f"<tool_call>{JSON}</tool_call>"
        reader = parser("qwen2.5", prompt=FORMS["qwen2.5"].head + block)
        assert parsed(reader, [f"\n{block}"]) == (Split("", ""), [ADD])
        reader = parser("qwen2.5", prompt=FORMS["qwen2.5"].head + block[:20])
        assert parsed(reader, [block[20:]]) == (Split("", ""), [ADD])

    def test_the_first_call_alone(self):
        text = f"<tool_call>{JSON}</tool_call>" * 2
        assert parsed(parser("qwen2.5", max_calls=1), [text]) == (Split("", ""), [ADD])


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


class TestXml:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (XML, "", [XML_CALL]),
            (f"I do.\n{XML}\n{XML}\n", "I do.\n", [XML_CALL, XML_CALL]),
            ("<tool_call><function=now></function></tool_call>", "", [Call("now", "{}")]),
            ("<tool_call><function=f><parameter=b></tool_call></parameter></function></tool_call>.",
             ".", [Call("f", '{"b": "</tool_call>"}')]),
            ("<tool_call><function=f><parameter=a>1</function></tool_call>x",
             "x", [Call("f", '{"a": 1}')]),
            (f"<tool_call>{JSON}</tool_call>", f"<tool_call>{JSON}</tool_call>", []),
            # Without the outer tags, and several functions between them.
            ("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\nDone.",
             "Done.", [Call("f", '{"a": 1}')]),
            ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
             "<function=g>\n</function>\n</tool_call>",
             "", [Call("f", '{"a": 1}'), Call("g", "{}")]),
            # Without closing tags: at the end, between arguments, behind the last.
            ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
             "", [Call("f", '{"a": 1}')]),
            (XML[:-1], "", [XML_CALL]),
            ("<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n"
             "</function>\n</tool_call>", "", [Call("f", '{"a": 1, "b": "2"}')]),
            ("<function=f>\n<parameter=a>\n1\n</function>", "", [Call("f", '{"a": 1}')]),
            # A value that was cut is none.
            ("<tool_call>\n<function=f>\n<parameter=b>\n/ho",
             "<tool_call>\n<function=f>\n<parameter=b>\n/ho", []),
            ("use <function=f> to call", "use <function=f> to call", []),
            ("use <function=f> ", "use <function=f> ", []),
        ],
    )  # fmt: skip
    def test_a_text(self, text, content, calls):
        check("qwen3-coder", text, content, calls)

    @pytest.mark.parametrize(
        ("key", "text", "value"),
        [
            ("a", "007", 7),
            ("a", "3.0", 3),
            ("a", "many", "many"),
            ("b", "null", "null"),
            ("b", "True", "True"),
            ("c", "{'k': [True, None]}", {"k": [True, None]}),
            ("c", "word", "word"),
            ("d", "False", False),
            ("d", "1", True),
            ("e", "12345", "12345"),
            ("e", "None", None),
            ("f", "7", 7),
            ("g", "1.50", 1.5),
            ("g", "nan", "nan"),
            ("h", "12345", "12345"),
            ("unknown", "12345", "12345"),
        ],
    )
    def test_types(self, key, text, value):
        call = f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
        _, (found,) = parsed(parser("qwen3-coder"), [call])
        assert json.loads(found.arguments) == {key: value}


class TestLlama:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (LLAMA, "", [ADD]),
            (f"\n {LLAMA}\n", "", [ADD]),
            (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [ADD, ADD]),
            ("{broken", "{broken", []),
            ("The sum is {x}", "The sum is {x}", []),
            (f"{LLAMA} and more", "and more", [ADD]),
            (f"{LLAMA}\n\nShall I go on?", "Shall I go on?", [ADD]),
            (f"{LLAMA}; {LLAMA} yes", "yes", [ADD, ADD]),
            (f"Let me see. <|python_tag|>{LLAMA}", "Let me see. ", [ADD]),
            (f"I call {LLAMA}.", "I call .", [ADD]),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
            ('{"name": "g", "parameters": null}', "", [Call("g", "{}")]),
            ('{"name": "f", "parameters": {"t": "}; {"}}', "", [Call("f", '{"t": "}; {"}')]),
            ('{"name": 1}', '{"name": 1}', []),
            ('He is {"name": "Bob", "parameters": {}}', 'He is {"name": "Bob", "parameters": {}}',
             []),
            (LLAMA[:-1], LLAMA[:-1], []),
            ("if (a) { return; }", "if (a) { return; }", []),
        ],
    )  # fmt: skip
    def test_a_text(self, text, content, calls):
        check("llama3", text, content, calls)


HOSTILE = {
    "opened blocks": "<tool_call>{",
    "blocks in strings": '<tool_call>{\\"',
    "strings in blocks": '<tool_call>{"""',
    "functions": "<function=f>",
    "open arguments": "<function=f>\n<parameter=a>\n1\n</function>\n",
    "ends in an argument": "<function=f><parameter=a></function>",
    "objects": '{"a":',
    "space": " ",
    "calls": f"<tool_call>{JSON}</tool_call>",
    "starts": "<tool_call><",
    "Gemma's": '<|tool_call>call:f{<|"|>',
    "messages": "<|start|>assistant<|channel|>commentary to=functions.f",
}
"""Parts of long texts that a parser might look at again and again."""


class Counting:
    """A pattern that counts the characters that it looks at."""

    def __init__(self, pattern, counts):
        self._pattern, self._counts, self.pattern = pattern, counts, pattern.pattern

    def search(self, text, start=0, **options):
        found = self._pattern.search(text, start, **options)
        self._counts["characters"] += (len(text) if found is None else found.end()) - start
        return found


class TestWork:
    def work(self, name, text, size, monkeypatch):
        """Calls of functions, those in C too, and characters that searches looked at."""
        counts = collections.Counter()

        def see(frame, event, argument):
            counts["calls"] += event in ("call", "c_call")

        reader = parser(name, prompt=FORMS[name].head)
        found = reader._watches
        watches = [found.plain, found.first, found.late, found.drafts, *found.closes.values()]
        with monkeypatch.context() as patch:  # other parsers share what is patched
            patch.setattr(response_parser, "_WORD", Counting(response_parser._WORD, counts))
            for watch in dict.fromkeys(watches):
                patch.setattr(watch, "starts", Counting(watch.starts, counts))
            gc.disable()  # what ends other tests' objects is not counted
            sys.setprofile(see)
            try:
                for part in in_pieces(text, size):
                    reader.feed(part)
                reader.end()
            finally:
                sys.setprofile(None)
                gc.enable()
        return counts

    @pytest.mark.parametrize("kind", HOSTILE)
    @pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "llama3", "gemma4", "gpt-oss"])
    def test_is_linear(self, name, kind, monkeypatch):
        part = HOSTILE[kind]
        for size in (4, 10**9):
            short, long = (
                self.work(name, part * (num // len(part)), size, monkeypatch)
                for num in (3_000, 12_000)
            )
            for what in ("calls", "characters"):
                assert long[what] <= 4.5 * short[what] + 200, (what, size, short, long)


class TestFormats:
    @pytest.mark.parametrize("name", FORMS)
    def test_are_known_by_the_chat_template(self, name):
        has_calls = FORMS[name].call is not None
        assert (CALLS in find_format(FORMS[name].template).template.fields) == has_calls

    @pytest.mark.parametrize("template", ["{{ messages }}", None, ""])
    def test_an_unknown_one_is_content(self, template):
        reader = ResponseParser(find_format(template).template, schemas={})
        text = f"<think>a</think> <tool_call>{JSON}</tool_call>"
        assert parsed(reader, [text]) == (Split("", text), [])

    def test_the_folders_own_is_used(self):
        own = {
            "start_anchor": "A:",
            "fields": {
                "thinking": {"open": "(", "close": ")"},
                "content": {},
                "tool_calls": {
                    "open": "!", "close": "!", "content": "json", "repeats": True,
                    "transform": {"type": "function", "function": "{content}"},
                },
            },
        }  # fmt: skip
        reader = ResponseParser(find_format("<tool_call>", own).template, schemas={}, prompt="A:(")
        assert parsed(reader, [f"hm)yes!{JSON}!"]) == (Split("hm", "yes"), [ADD])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"fields": {"content": {}, "mood": {"open": "x"}}}, "field 'mood' is none of"),
            ({"fields": {"thinking": {"open_pattern": ".*x"}}}, "'.\\*x' has no literal start"),
            ({"fields": {"tool_calls": {"open": "x", "content": "kv-lines"}}}, "'kv-lines'"),
            ({"fields": {"content": {"shut": "x"}}}, "field 'content' has keys beside"),
            ({"version": 2}, "version 2"),
            ({"start_anchor": None}, "cannot be used"),
        ],
    )
    def test_one_that_cannot_be_used_is_refused(self, change, message, caplog):
        own = {"start_anchor": "A:", "fields": {"content": {}}, **change}
        with pytest.raises(InvalidConfigError, match=message):
            load_template(own)
        own["fields"] = {**own["fields"], "content": own["fields"].get("content", {})}
        assert find_format("<tool_call>", own).template.fields.keys() == {"tool_calls", "content"}
        assert "replies are read as the chat template says" in caplog.text

    def test_ours_are_in_transformers_form(self):
        for template in templates().values():
            assert load_template(json.loads(json.dumps(template))).fields
        assert known_template("<tool_call>")["fields"].keys() == {"tool_calls", "content"}
