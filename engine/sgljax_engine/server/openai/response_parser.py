"""Divides a reply into thoughts, content and tool calls by a response template, as its text comes.

It differs from transformers' `ResponseParser`, whose templates it reads, on purpose:

- A closing mark inside a string of JSON, or inside an argument of XML, ends nothing.
- What is no call stays content, and text outside of all fields is content. Nothing is lost.
- White space is kept, but for what stands between calls.
- `</think>` without `<think>` ends thoughts that began with the reply.
- Calls in thoughts that are never closed are calls.
- JSON ends with its value where a template has no mark for it.

Each character is looked at a fixed number of times, however many marks there are.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from sgljax_engine.server.openai.response_template import (
    CALLS,
    CONTENT,
    MAX_MARK,
    REASONING,
    Field,
    Mark,
    ResponseTemplate,
    literal_mark,
)
from sgljax_engine.server.openai.response_values import Call, JsonEnd, Schemas, read_calls

THINK = "<think>"
"""The opening mark of thoughts that answers may quote: it counts at their start alone."""

_SEPARATORS = "; \n\r\t"
_WORD = regex.compile(r"\S")


class Split(NamedTuple):
    """New text of both kinds."""

    reasoning: str
    content: str

    def __add__(self, other: Split) -> Split:  # type: ignore[override]
        """Both texts, each behind the one of its kind."""
        return Split(self.reasoning + other.reasoning, self.content + other.content)


class _Watch:
    """Marks that are looked for together, and the field of each; None for what is dropped."""

    def __init__(self, marks: Mapping[Mark, Field | None]) -> None:
        self.marks = marks
        self.starts = _any_of([start for mark in marks for start in mark.starts])


class _Watches(NamedTuple):
    """What is looked for, by where the parser is.

    `plain` holds at the end of a text with an unfinished call, `late` behind thoughts, `first`
    before them, `drafts` in thoughts with an unfinished call. `closes` has what ends each field,
    `tag_starts` the start of a call's arguments, where these are tags.
    """

    plain: _Watch
    late: _Watch
    first: _Watch
    drafts: _Watch
    closes: Mapping[str, _Watch]
    tag_starts: regex.Pattern[str] | None


@functools.lru_cache(maxsize=64)  # hundreds of special tokens take 20 ms
def _watches(
    template: ResponseTemplate, dropped: tuple[str, ...], *, thinks: bool, has_calls: bool
) -> _Watches:
    fields = template.fields
    thoughts = fields.get(REASONING) if thinks else None
    calls = fields.get(CALLS) if has_calls else None
    content = fields.get(CONTENT)
    drops = [literal_mark(sorted(dropped))] if dropped else []
    drops += [content.close] if content is not None and content.close is not None else []
    plain = _Watch(dict.fromkeys(drops))
    late = _Watch({**_opens(calls, content), **plain.marks})
    tag_starts = None
    if calls is not None and calls.tag_starts:
        tag_starts = _any_of([*calls.tag_starts, *_starts(calls.close)])
    return _Watches(
        plain=plain,
        late=late,
        first=_Watch({**_opens(thoughts), **late.marks}),
        drafts=_Watch({**_closes(thoughts), **_opens(calls), **plain.marks}),
        closes={f.name: _Watch(_closes(f)) for f in (thoughts, calls, content) if f},
        tag_starts=tag_starts,
    )


class ResponseParser:
    """Reads one output. All pieces together give what the whole text does.

    Attributes:
        calls: The calls found so far.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        prompt: str = "",
        schemas: Schemas | None = None,
        names: Collection[str] | None = None,
        dropped: Collection[str] = (),
        thinks: bool = True,
        max_calls: int | None = None,
    ) -> None:
        """Starts behind a prompt.

        Args:
            template: Says what stands where.
            prompt: The end of it may open a field.
            schemas: Of the tools' parameters; None leaves calls in the content.
            names: The names that calls may have; None for any.
            dropped: Special tokens that are no text.
            thinks: False leaves thoughts in the content.
            max_calls: Calls to give back; None for all.
        """
        self._schemas, self._names = schemas or {}, names
        self._thoughts = template.fields.get(REASONING) if thinks else None
        watches = _watches(template, tuple(dropped), thinks=thinks, has_calls=schemas is not None)
        self._plain, self._late, self._first = watches.plain, watches.late, watches.first
        self._drafts, self._closes = watches.drafts, watches.closes
        self._tag_starts = watches.tag_starts
        self.calls: list[Call] = []
        self._max_calls = max_calls
        self._new: dict[str, list[str]] = {REASONING: [], CONTENT: []}
        self._text = template.message_start(prompt)
        self._num_prompt = 0  # characters of the text that are not the reply's
        self._at = self._scanned = 0  # where text is not given out yet, and not searched yet
        self._field: Field | None = None
        self._open_at = self._body_at = 0
        self._space_to = 0  # up to where text that ends in space was looked at
        self._captures: Mapping[str, str] = {}
        self._json: JsonEnd | None = None
        self._first_close: tuple[int, int] | None = None
        self._words_kind = CONTENT
        self._lead = ""  # white space before the first word, which is no content before a call
        self._has_words = self._is_after_call = self._is_plain = self._is_simple = False
        self._is_draft = self._is_fresh = False
        # Whether thoughts may have started without their mark.
        self._is_open = self._thoughts is not None and THINK in _starts(self._thoughts.open)
        self._take_prompt()

    def _take_prompt(self) -> None:
        self._run(is_end=False)
        if self._is_open and self._text.strip():
            self._is_open = False
            self._run(is_end=False)
        if self._field is None or self._field.name != CALLS:
            self._at = self._scanned = len(self._text)
        self._num_prompt = len(self._text)
        self._new, self._lead, self.calls = {REASONING: [], CONTENT: []}, "", []

    def stop_tags(self) -> tuple[str, str] | None:
        """What thoughts begin and end with; None if there are none to come."""
        if self._thoughts is None or self._thoughts.close is None:
            return None
        closing = self._thoughts.close.starts[0]
        if self._field is self._thoughts:
            return "", closing
        has_thoughts = self._first is self._late or self._has_words
        return None if has_thoughts else (_starts(self._thoughts.open)[0], closing)

    def feed(self, text: str) -> Split:
        """Takes new text; returns what is certain."""
        # Nothing else refers to the text here, so that Python appends in place.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
        self._run(is_end=False)
        return self._taken()

    def end(self) -> Split:
        """Returns what was held back."""
        self._run(is_end=True)
        if self._lead and not self.calls:
            self._new[CONTENT].append(self._lead)
        return self._taken()

    def _taken(self) -> Split:
        new, self._new = self._new, {REASONING: [], CONTENT: []}
        return Split("".join(new[REASONING]), "".join(new[CONTENT]))

    def _run(self, *, is_end: bool) -> None:
        while self._step(is_end):
            pass
        cut = self._at if self._field is None or self._field.name != CALLS else self._open_at
        if 2 * cut > len(self._text):
            self._text = self._text[cut:]
            self._num_prompt = max(0, self._num_prompt - cut)
            self._at, self._scanned = self._at - cut, self._scanned - cut
            self._space_to = max(0, self._space_to - cut)
            self._open_at, self._body_at = self._open_at - cut, self._body_at - cut
            if self._json is not None:
                self._json.shift(cut)
            if self._first_close is not None:
                self._first_close = self._first_close[0] - cut, self._first_close[1] - cut

    def _step(self, is_end: bool) -> bool:
        """Takes the next part of the text; False when more must come."""
        if self._is_open:
            return self._step_undecided(is_end)
        if self._field is None:
            return self._step_outside(is_end)
        if self._field.name != CALLS:
            return self._step_text(self._field, is_end)
        if self._json is not None:
            return self._step_json(self._field, self._json, is_end)
        return self._step_call(self._field, is_end)

    def _find(self, watch: _Watch, is_end: bool) -> tuple[int, regex.Match[str] | None, Any]:
        """The next mark's place, match and mark; without one, the place up to which none is."""
        text = self._text
        while found := watch.starts.search(text, self._scanned, partial=not is_end):
            place = self._scanned = found.start()
            if found.partial:
                return place, None, None
            best: tuple[regex.Match[str], Mark] | None = None
            for mark in watch.marks:
                match = mark.match(text, place, is_end=is_end)
                if match is True:
                    return place, None, None
                if match is not None and (best is None or match.end() > best[0].end()):
                    best = match, mark
            if best is not None:
                return place, *best
            self._scanned = place + 1
        self._scanned = len(text)
        return len(text), None, None

    def _word(self, start: int) -> int | None:
        """Where the first word behind a place begins; None without one."""
        found = _WORD.search(self._text, max(start, self._space_to))
        if found is None:
            self._space_to = len(self._text)
        return None if found is None else found.start()

    def _step_undecided(self, is_end: bool) -> bool:
        """The reply started without thoughts: a closing mark says that they were thoughts."""
        assert self._thoughts is not None
        assert self._thoughts.open is not None
        word = self._word(self._at)
        opening = (
            None if word is None else self._thoughts.open.match(self._text, word, is_end=is_end)
        )
        if opening is True or (word is None and not is_end):
            return False
        place, match, _ = self._find(self._closes[REASONING], is_end)
        if opening is None and match is None and not is_end:
            return False
        if opening is None and match is not None:
            before, mark, behind = self._text[self._at : place].partition(THINK)
            if mark:  # words stand before them
                self._emit(CONTENT, before)
            self._emit(REASONING, behind if mark else before)
            self._at = match.end()
        if opening is None:
            self._first = self._late
        self._is_open, self._scanned = False, self._at
        return True

    def _step_outside(self, is_end: bool) -> bool:
        may_think = not self._has_words or THINK not in self._first.starts.pattern
        watch = self._plain if self._is_plain else self._first if may_think else self._late
        place, match, mark = self._find(watch, is_end)
        self._emit(CONTENT, self._text[self._at : place])
        self._at = place
        if match is None:
            return False
        self._field = watch.marks[mark]
        self._open_at, self._captures = place, _groups(match)
        self._at = self._scanned = self._body_at = match.end()
        field = self._field
        self._is_fresh = field is not None
        self._first_close = None
        if field is not None and field.form == "json" and not self._is_simple:
            self._json = JsonEnd(self._body_at, field.args.get("string_delims", ()))
        if field is self._thoughts and field is not None:
            self._lead = ""
            if THINK in _starts(field.open):
                self._first = self._late
        return True

    def _step_text(self, field: Field, is_end: bool) -> bool:
        if self._is_fresh and field is self._thoughts and field.open is not None:
            word = self._word(self._at)
            if word is None and not is_end:
                return False
            again = None if word is None else field.open.match(self._text, word, is_end=is_end)
            if again is True:
                return False
            if again:
                self._at = self._scanned = again.end()
                return True
        self._is_fresh = False
        closes = self._closes[field.name]
        watch = self._drafts if field is self._thoughts and not self._is_draft else closes
        place, match, mark = self._find(watch, is_end)
        if not self._is_draft:
            self._emit(field.name, self._text[self._at : place])
            self._at = place
        if match is None:
            if not (is_end and self._is_draft):
                return False
            # Thoughts that never end are no draft: the calls in them are calls.
            self._field, self._is_draft, self._words_kind = None, False, REASONING
            self._scanned = self._at
            return True
        self._scanned = max(match.end(), place + 1)
        target = watch.marks[mark]
        if target is not None and target.name == CALLS:
            self._is_draft = True
            return True
        if self._is_draft:
            self._emit(field.name, self._text[self._at : place])
        self._at = match.end()
        if target is not None:
            self._field, self._is_draft = None, False
        return True

    def _step_json(self, field: Field, json: JsonEnd, is_end: bool) -> bool:
        json.scan(self._text)
        if json.is_broken:
            return self._end_call(None, json.position)
        if json.end is None:
            if is_end:
                self._json, self._is_simple, self._scanned = None, True, self._body_at
            return is_end
        if field.close is None:
            return self._end_call(json.end, json.end)
        word = self._word(json.end)
        if word is None:
            return is_end and self._end_call(json.end, len(self._text))
        closing = field.close.match(self._text, word, is_end=False)
        if closing is True and is_end:
            closing = field.close.match(self._text, word, is_end=True)
            if closing is None:  # the mark itself was cut
                return self._end_call(json.end, len(self._text))
        if closing is True:
            return False
        if closing is None:
            return self._end_call(None, json.end)
        return self._end_call(json.end, closing.end(), closing)

    def _step_call(self, field: Field, is_end: bool) -> bool:
        if self._is_fresh and self._tag_starts is not None:
            word = self._word(self._body_at)
            if word is None and not is_end:
                return False
            if word is not None and not self._tag_starts.match(self._text, word, partial=True):
                return self._end_call(None, self._body_at)
        self._is_fresh = False
        tag_end = field.tag_end
        place, match, _ = self._find(self._closes[CALLS], is_end)
        if match is not None:
            is_one = match.end() - place <= max(map(len, _starts(field.close)))
            if tag_end and is_one and not self._is_simple and not self._ends_in(tag_end, place):
                self._first_close = self._first_close or match.span()
                self._scanned = match.end()
                return True
            rest = self._text[match.end() : match.end() + MAX_MARK].strip()
            is_start = rest and any(start.startswith(rest) for start in _starts(field.close))
            end = len(self._text) if is_end and is_start else match.end()  # the mark was cut
            return self._end_call(place, end, match)
        if not is_end:
            return False
        self._is_simple = True
        if self._first_close is not None:
            return self._end_call(*self._first_close)
        if tag_end and self._ends_in(tag_end, len(self._text)):
            return self._end_call(len(self._text), len(self._text))
        self._field, self._is_plain = None, True
        self._at = self._scanned = max(self._open_at, self._num_prompt)
        return True

    def _ends_in(self, tag: str, place: int) -> bool:
        """Whether the call's text up to a place is empty, or ends in a tag."""
        while place > self._body_at and self._text[place - 1].isspace():
            place -= 1
        return place == self._body_at or self._text.endswith(tag, self._body_at, place)

    def _end_call(
        self, body_end: int | None, end: int, closing: regex.Match[str] | None = None
    ) -> bool:
        """Ends the call's text, which is no call if `body_end` is None."""
        assert self._field is not None
        captures = {**self._captures, **(_groups(closing) if closing else {})}
        found: list[Call] = []
        if body_end is not None:
            try:
                body = self._text[self._body_at : body_end]
                found = read_calls(self._field, body, captures, self._schemas)
            except (ValueError, TypeError, KeyError, RecursionError, TimeoutError):
                found = []
        if found and (self._names is None or all(call.name in self._names for call in found)):
            self.calls = (self.calls + found)[: self._max_calls]
            self._is_after_call, self._lead = True, ""
        else:
            self._emit(CONTENT, self._text[max(self._open_at, self._num_prompt) : end])
        self._field = self._json = None
        self._at = self._scanned = end
        return True

    def _emit(self, kind: str, text: str) -> None:
        kind = self._words_kind if kind == CONTENT else kind
        if (kind == CONTENT or self._words_kind == REASONING) and self._is_after_call:
            text = text.lstrip(_SEPARATORS)
            self._is_after_call = not text
        if kind == CONTENT and not self._has_words and not self.calls:
            text, self._lead = self._lead + text, ""
            if not text.strip():
                self._lead = text
                return
        self._has_words |= kind == CONTENT and bool(text.strip())
        self._new[kind].append(text)


def _any_of(texts: Sequence[str]) -> regex.Pattern[str]:
    return regex.compile("|".join(map(regex.escape, texts)) or r"(?!)")


def _starts(mark: Mark | None) -> tuple[str, ...]:
    return () if mark is None else mark.starts


def _opens(*fields: Field | None) -> dict[Mark, Field | None]:
    return {field.open: field for field in fields if field and field.open}


def _closes(field: Field | None) -> dict[Mark, Field | None]:
    return {field.close: field} if field and field.close else {}


def _groups(match: regex.Match[str]) -> dict[str, str]:
    return {name: text for name, text in match.groupdict().items() if text is not None}
