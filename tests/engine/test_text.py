"""The text of a request as its tokens arrive, against decoding every prefix."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.detokenizer import Detokenizer
from sgljax_engine.processing.incremental_text import StopMatch, TextStream
from sgljax_engine.processing.tokenizer import DEFAULT_DECODE_OPTIONS, DecodeOptions
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.types import FinishReason, Request
from tests.engine import small_tokenizers
from tests.tiers import tiered

MAKERS = {
    "byte_level": small_tokenizers.byte_level,
    "byte_fallback": small_tokenizers.byte_fallback,
    "metaspace": small_tokenizers.metaspace,
    "word_suffix": small_tokenizers.word_suffix,
    "sentencepiece": small_tokenizers.sentencepiece,
    "sentencepiece_no_bytes": lambda: small_tokenizers.sentencepiece(byte_fallback=False),
}
EVERY_KIND = pytest.mark.parametrize("kind", tiered(MAKERS, ["byte_level", "byte_fallback"]))
HF_KINDS = ("byte_level", "byte_fallback", "metaspace", "word_suffix")
REPLACEMENT = "\ufffd"
TEXTS = [
    "the quick brown fox",
    "  two  spaces \n\n and lines\n",
    "\u4e2d\u6587 \u00e9\u00e8 \U0001f600\U0001f468\u200d\U0001f469",
    " ",
    "\ufffd \ufffd\ufffdx",
    "a" * 70,
    " " * 70,
    "\u4e2d" * 40,
]


def make(kind):
    tokenizer = MAKERS[kind]()
    size = tokenizer.GetPieceSize() if hasattr(tokenizer, "GetPieceSize") else len(tokenizer)
    return wrap_tokenizer(tokenizer), size


class Expected(NamedTuple):
    text: str
    match: StopMatch | None


def visible(tokenizer, ids, options):
    """The text of a prefix without what the next bytes may replace."""
    byte_of = tokenizer.byte_run_ids
    if not byte_of:
        text = tokenizer.decode(ids, options)
        kept = len(text)
        while kept > max(0, len(text) - 3) and text[kept - 1] == REPLACEMENT:
            kept -= 1
        return text[:kept]
    anchor = tokenizer.encode(".")
    run = bytearray()
    for token in reversed(ids):
        if token in byte_of:
            run.insert(0, byte_of[token])
        elif tokenizer.decode([*anchor, token], options) != tokenizer.decode(anchor, options):
            break
    try:
        run.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return visible(tokenizer, ids[:-1], options)
    return tokenizer.decode(ids, options)


def oracle(tokenizer, ids, options, stop, include_stop, min_tokens):
    """Decodes every prefix."""
    floor = len(visible(tokenizer, ids[:min_tokens], options))
    whole = tokenizer.decode(ids, options)
    for n in range(min_tokens + 1, len(ids) + 1):
        candidates = [visible(tokenizer, ids[:n], options)]
        if n == len(ids):
            candidates.append(whole)
        for text in candidates:
            found = []
            for s in stop:
                begin = text.find(s, max(0, floor - len(s) + 1))
                if begin >= 0:
                    found.append((begin + len(s), begin, s))
            if found:
                end, begin, s = min(found)
                return Expected(text[: end if include_stop else begin], StopMatch(n, s))
    return Expected(whole, None)


def stream(tokenizer, ids, chunks, options=DEFAULT_DECODE_OPTIONS, **stops):
    """All text, the pieces it came in, and the match."""
    text_stream = TextStream(tokenizer, options, **stops)
    pieces = []
    at = 0
    for size in [*chunks, len(ids)]:
        text_stream.add(ids[at : at + size])
        at += size
        pieces.append(text_stream.take())
    pieces.append(text_stream.finish())
    assert text_stream.finish() == text_stream.take() == ""
    return Expected("".join(pieces), text_stream.match), pieces


@st.composite
def outputs(draw, kind):
    tokenizer, size = make(kind)
    random_ids = st.lists(st.integers(0, size - 1), max_size=60)
    texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
    encoded = st.builds(tokenizer.encode, texts)
    repeated = st.builds(lambda i, n: [i] * n, st.integers(0, size - 1), st.integers(1, 120))
    parts = [random_ids, encoded, repeated]
    if kind in ("byte_fallback", "sentencepiece"):
        first = 3 if kind == "byte_fallback" else 4
        high = st.sampled_from([0x20, 0x41, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80])
        parts.append(st.lists(high.map(lambda b: b + first), max_size=12))
        parts.append(st.text(max_size=8).map(lambda t: [b + first for b in t.encode()]))
    return [token for part in draw(st.lists(st.one_of(parts), max_size=4)) for token in part]


options_of = st.builds(DecodeOptions, st.booleans(), st.booleans())
chunkings = st.lists(st.integers(0, 9), max_size=80)
quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)


@EVERY_KIND
@quick
@given(data=st.data())
def test_text_equals_one_decode(kind, data):
    tokenizer, _ = make(kind)
    ids = data.draw(outputs(kind))
    options = data.draw(options_of) if kind in HF_KINDS else DEFAULT_DECODE_OPTIONS
    chunks = data.draw(chunkings)
    result, _ = stream(tokenizer, ids, chunks, options)
    assert result == Expected(tokenizer.decode(ids, options), None)
    # With a stop string that never comes, tokens are decoded one by one.
    one_by_one, _ = stream(tokenizer, ids, chunks, options, stop=("\0never",))
    assert one_by_one == result


@EVERY_KIND
@quick
@given(data=st.data())
def test_text_is_given_out_as_soon_as_it_is_final(kind, data):
    tokenizer, _ = make(kind)
    ids = data.draw(outputs(kind))
    text_stream = TextStream(tokenizer)
    taken = ""
    for n, token in enumerate(ids, 1):
        text_stream.add([token])
        taken += text_stream.take()
        if not tokenizer.byte_run_ids:
            assert taken == visible(tokenizer, ids[:n], DEFAULT_DECODE_OPTIONS)
    assert tokenizer.decode(ids).startswith(taken)


@EVERY_KIND
@quick
@given(data=st.data())
def test_stop_strings_equal_a_search_of_every_prefix(kind, data):
    tokenizer, _ = make(kind)
    ids = data.draw(outputs(kind))
    options = data.draw(options_of) if kind in HF_KINDS else DEFAULT_DECODE_OPTIONS
    whole = tokenizer.decode(ids, options)
    assume(whole)
    spans = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 6))
    taken_from_text = spans.map(lambda span: whole[span[0] : sum(span)])
    other = st.text(alphabet="ab the\n\u4e2d\ufffd", min_size=1, max_size=3)
    stop = tuple(data.draw(st.lists(st.one_of(taken_from_text, other), min_size=1, max_size=3)))
    include_stop = data.draw(st.booleans())
    min_tokens = data.draw(st.one_of(st.just(0), st.integers(0, len(ids))))
    expected = oracle(tokenizer, ids, options, stop, include_stop, min_tokens)
    result, _ = stream(
        tokenizer,
        ids,
        data.draw(chunkings),
        options,
        stop=stop,
        include_stop=include_stop,
        min_tokens=min_tokens,
    )
    assert result == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "sentencepiece"])
def test_invalid_utf8_is_not_held_back(kind):
    tokenizer, size = make(kind)
    bad = next(
        i
        for i in range(3, size)
        if tokenizer.decode([i, i, i, i]) == REPLACEMENT * 4 and tokenizer.decode([i]) == "\ufffd"
    )
    text_stream = TextStream(tokenizer)
    num_chars = 0
    for n in range(200):
        assert n - 3 <= num_chars <= n
        text_stream.add([bad])
        num_chars += len(text_stream.take())
    assert num_chars + len(text_stream.finish()) == 200


def test_a_byte_run_waits_until_it_ends_or_is_broken():
    tokenizer, _ = make("byte_fallback")
    byte = {value: token for token, value in tokenizer.byte_run_ids.items()}
    run = [byte[b] for b in "\u4e2d\u6587".encode()]
    text_stream = TextStream(tokenizer)
    text_stream.add(run)
    assert text_stream.take() == ""
    text_stream.add([byte[0xFF]])
    assert text_stream.take() == REPLACEMENT * 7
    text_stream.add([*run, *tokenizer.encode("a")])
    assert text_stream.take() == REPLACEMENT * 6 + "a"
    text_stream.add(run)
    assert text_stream.take() == ""
    text_stream.add(tokenizer.encode("b"))
    assert text_stream.take() == "\u4e2d\u6587b"
    # A stop string is found in it at once all the same.
    newline = TextStream(tokenizer, stop=("\n",))
    newline.add([*tokenizer.encode("a"), byte[ord("\n")]])
    assert newline.match == StopMatch(2, "\n")
    assert newline.take() == "a"


@EVERY_KIND
@settings(quick, max_examples=20)
@given(data=st.data())
def test_text_behind_a_prompt(kind, data):
    """Prompt and output add up to one decode, whole and in pieces."""
    tokenizer, _ = make(kind)
    prompt, ids = data.draw(outputs(kind)), data.draw(outputs(kind))
    assume(prompt)
    request = Request(
        rid="a", prompt_ids=prompt, params=SamplingParams(), seed=0, output_ids=list(ids)
    )
    detokenizer = Detokenizer(tokenizer)
    whole = detokenizer.text(request, FinishReason("length"))
    text_stream = detokenizer.stream(request)
    assert text_stream is not None
    text = ""
    for token in ids:
        text_stream.add([token])
        text += text_stream.take()
    assert text + text_stream.finish() == whole
    before, both = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    if both.startswith(before):
        assert before + whole == both
    elif not tokenizer.byte_run_ids:  # the output completes a character
        begin, end = before.rstrip(REPLACEMENT), whole.lstrip(REPLACEMENT)
        assert re.search(f"{re.escape(begin)}{REPLACEMENT}*{re.escape(end)}", both)
    request.params = SamplingParams(decode_behind_prompt=False)
    assert detokenizer.text(request, FinishReason("length")) == tokenizer.decode(ids)


def test_a_space_between_prompt_and_output():
    """The decoders of Llama 2 and T5 strip the first space of a text."""
    for kind in ("byte_fallback", "metaspace"):
        tokenizer, _ = make(kind)
        hf = MAKERS[kind]()
        the, a = hf.convert_tokens_to_ids([f"{small_tokenizers.SPACE}the", "a"])
        request = Request(
            rid="a", prompt_ids=[1, a], params=SamplingParams(), seed=0, output_ids=[the, a]
        )
        assert Detokenizer(tokenizer).text(request, FinishReason("length")) == " thea"


class TestStopsBehindThoughts:
    """However the text is cut into tokens."""

    @pytest.mark.parametrize(
        ("text", "tags", "expected"),
        [
            ("a 9 b</think> c 9 d", ("", "</think>"), "a 9 b</think> c "),
            ("9 a", ("", "</think>"), "9 a"),
            ("<think>9</think>x9", ("<think>", "</think>"), "<think>9</think>x"),
            (" \n<think>9</think>9", ("<think>", "</think>"), " \n<think>9</think>"),
            ("<th 9", ("<think>", "</think>"), "<th "),
            ("9 <think>9", ("<think>", "</think>"), ""),
            ("<th", ("<think>", "</think>"), "<th"),
            ("<think>9", ("<think>", "</think>"), "<think>9"),
        ],
    )
    def test_a_text(self, text, tags, expected):
        ids = [ord(char) for char in text]
        tokenizer = wrap_tokenizer(small_tokenizers.CharTokenizer())
        for chunks in ([], [1] * len(ids), [3] * len(ids)):
            found, _ = stream(tokenizer, ids, chunks, stop=["9"], reasoning_tags=tags)
            assert found.text == expected

    def test_a_stop_string_that_the_opening_mark_begins_with(self):
        ids = [ord(char) for char in "<b>"]
        tokenizer = wrap_tokenizer(small_tokenizers.CharTokenizer())
        tags = ("<think>", "</think>")
        found, _ = stream(tokenizer, ids, [1, 1, 1], stop=["<"], reasoning_tags=tags)
        assert found.text == ""


def test_only_a_possible_stop_string_waits():
    tokenizer = wrap_tokenizer(small_tokenizers.CharTokenizer())
    text_stream = TextStream(tokenizer, stop=("END", "x\n"))
    seen = []
    for char in "aEENb\n":
        text_stream.add([ord(char)])
        seen.append(text_stream.take())
    assert seen == ["a", "", "E", "", "ENb", "\n"]
    text_stream.add(list(map(ord, "EN")))
    assert text_stream.take() == ""
    assert text_stream.finish() == "EN"
    with pytest.raises(RuntimeError, match="after finish"):
        text_stream.add([65])


@pytest.mark.parametrize("stop", ["abc", ("a", ""), (b"a",), (1,)])
def test_bad_stop_strings(stop):
    with pytest.raises(InvalidRequestError, match="stop must be a list of non-empty strings"):
        TextStream(wrap_tokenizer(small_tokenizers.CharTokenizer()), stop=stop)


def test_bad_min_tokens():
    with pytest.raises(InvalidRequestError, match="min_tokens must be >= 0, got -1"):
        TextStream(wrap_tokenizer(small_tokenizers.CharTokenizer()), min_tokens=-1)


class Counted:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.byte_run_ids = tokenizer.byte_run_ids
        self.num_ids = 0

    def decode(self, ids, options):
        self.num_ids += len(ids)
        return self.tokenizer.decode(ids, options)


def collapsed(kind):
    """What models emit that have collapsed: the same thing for ever."""
    tokenizer, size = make(kind)
    words = tokenizer.encode("a\u4e2d the x")
    return [words, *([i] for i in range(0, size, 1 + size // 40))]


@pytest.mark.parametrize("kind", tiered(MAKERS, ["byte_level"]))
def test_work_per_token_is_bounded(kind):
    tokenizer, _ = make(kind)
    n = 600
    for prefix in ([], tokenizer.encode("the")):
        for unit in collapsed(kind):
            ids = (prefix + unit * n)[:n]
            counted = Counted(tokenizer)
            result, _ = stream(counted, ids, [1] * n, stop=("\0never",))
            assert result.text == tokenizer.decode(ids)
            assert counted.num_ids < 100 * n, unit
