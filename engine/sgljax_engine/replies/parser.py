"""Divides a reply into thoughts, content and tool calls by a response template, as its text comes.

It differs from transformers' `ResponseParser`, whose templates it reads, on purpose:

- A closing mark inside a string of JSON, or inside an argument of XML, ends nothing.
- What is no call stays content, and text outside of all fields is content. Nothing is lost.
- White space is kept, but for what stands between calls.
- `</think>` without `<think>` ends thoughts, if prompts of the format open them.
- Calls in thoughts that are never closed are calls.
- JSON ends with its value where a template has no mark for it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import regex

from sgljax_engine.replies.marks import Found, Watch, watches_of
from sgljax_engine.replies.response_template import (
    CALLS,
    CONTENT,
    REASONING,
    Field,
    Mark,
    ResponseTemplate,
)
from sgljax_engine.replies.values import Call, JsonEnd, Schemas, read_calls

_SEPARATORS = "; \n\r\t"
_WORD = regex.compile(r"\S")


class Split(NamedTuple):
    """New text of both kinds."""

    reasoning: str
    content: str

    def __add__(self, other: Split) -> Split:  # type: ignore[override]
        return Split(self.reasoning + other.reasoning, self.content + other.content)


class ResponseParser:
    """Reads one output, in time linear in its length. All pieces together give what the whole does.

    The end of the prompt may open a field. Without schemas or `thinks`, calls or thoughts stay in
    the content; `dropped` are special tokens that are no text. `waits`: a reply may begin in its
    thoughts without a mark, so nothing is certain until they end. `calls` has at most `max_calls`.
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
        waits: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._schemas, self._names = schemas or {}, names
        self._thoughts = template.fields.get(REASONING) if thinks else None
        self._watches = watches_of(
            template, tuple(dropped), thinks=thinks, has_calls=schemas is not None
        )
        self.calls: list[Call] = []
        self._max_calls = max_calls
        self._text = template.message_start(prompt)
        self._at = self._scanned = 0  # where text is not given out yet, and not searched yet
        self._field: Field | None = None
        self._open_at = self._body_at = 0
        self._space_to = 0  # up to where text that ends in space was looked at
        self._opening: regex.Match[str] | None = None
        self._json: JsonEnd | None = None
        self._first_close: tuple[int, int] | None = None
        self._draft = ""  # what the held text of thoughts is if they never end
        self._words_kind = CONTENT
        self._has_words = self._has_thought = self._is_after_call = False
        self._is_fresh = self._is_plain = self._is_simple = self._is_end = False
        self._new: dict[str, list[str]] = {REASONING: [], CONTENT: []}
        self._lead: list[str] = []  # white space before the first word: no content before a call
        self._run()
        if self._field is None or self._field.name != CALLS:
            self._at = self._scanned = len(self._text)
        self._num_prompt = len(self._text)
        self._lead, self.calls = [], []
        if waits and self._thoughts is not None and not self._text.strip():
            self._field, self._draft, self._is_fresh = self._thoughts, CONTENT, True

    def stop_tags(self) -> tuple[str, str] | None:
        """What thoughts begin and end with; None if there are none to come."""
        field = self._thoughts
        if field is None or field.open is None or field.close is None:
            return None
        if self._field is field and not self._draft:
            return "", field.close.starts[0]
        has_begun = self._has_thought or self._has_words
        return None if has_begun else (field.open.starts[0], field.close.starts[0])

    def feed(self, text: str) -> Split:
        """Takes new text; returns what is certain."""
        # Nothing else refers to the text here, so that Python appends in place.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
        return self._run()

    def end(self) -> Split:
        """Returns what was held back."""
        self._is_end = True
        return self._run()

    def _run(self) -> Split:
        """Takes parts of the text until more must come; returns what is new."""
        is_on = True
        while is_on:
            field = self._field
            if field is None:
                is_on = self._step_outside()
            elif field.name != CALLS:
                is_on = self._step_text(field)
            elif self._json is not None:
                is_on = self._step_json(field, self._json)
            else:
                is_on = self._step_call(field)
        if self._is_end and not self.calls:
            self._new[CONTENT] += self._lead
        new, self._new = self._new, {REASONING: [], CONTENT: []}
        return Split("".join(new[REASONING]), "".join(new[CONTENT]))

    def _find(self, watch: Watch) -> Found:
        found = watch.find(self._text, self._scanned, is_end=self._is_end)
        self._scanned = found.start
        return found

    def _next(self, mark: Mark, start: int) -> regex.Match[str] | bool | None:
        """The mark behind white space: None if something else is there, True while that is open."""
        text = self._text
        word = _WORD.search(text, max(start, self._space_to))
        if word is None:
            self._space_to = len(text)
            return None if self._is_end else True
        return mark.match(text, word.start(), is_end=self._is_end)

    def _step_outside(self) -> bool:
        watches, is_late = self._watches, self._has_words or self._has_thought
        watch = watches.plain if self._is_plain else watches.late if is_late else watches.first
        place, match, field = self._find(watch)
        self._emit(CONTENT, self._text[self._at : place])
        self._at = place
        if match is None:
            return False
        if watch is watches.first and self._has_words:  # there are words before the mark
            return True
        self._open_at, self._opening = place, match
        self._at = self._scanned = self._body_at = match.end()
        self._field, self._is_fresh, self._first_close = field, True, None
        if field is not None and field is self._thoughts:
            self._has_thought = True
            self._lead = []
        elif field is not None and field.form == "json" and not self._is_simple:
            self._json = JsonEnd(self._body_at, field.args["string_delims"])
        return True

    def _step_text(self, field: Field) -> bool:
        if self._is_fresh and field is self._thoughts and field.open is not None:
            again = self._next(field.open, self._at)
            if again is True:
                return False
            if again:  # a mark that models repeat
                self._at = self._scanned = again.end()
                self._draft, self._has_thought = "", True
                return True
            self._is_fresh = False
        is_open = field is self._thoughts and not self._draft
        place, match, target = self._find(
            self._watches.drafts if is_open else self._watches.closes[field.name]
        )
        if match is None and self._draft:
            if self._is_end:
                self._field, self._words_kind, self._draft = None, self._draft, ""
                self._scanned, self._has_thought = self._at, True
            return self._is_end
        self._emit(field.name, self._text[self._at : place])
        self._at = place
        if match is None:
            return False
        self._scanned = max(match.end(), place + 1)
        if target is not None and target.name == CALLS:
            self._draft = REASONING  # thoughts that never end are no draft: their calls are calls
            return True
        self._at = match.end()
        if target is not None:
            self._field, self._draft, self._has_thought = None, "", True
        return True

    def _step_json(self, field: Field, json: JsonEnd) -> bool:
        json.scan(self._text)
        if json.is_broken:
            return self._end_call(None, json.position)
        if json.end is None:
            if self._is_end:  # strings may be wrong: the next mark is the end
                self._json, self._is_simple, self._scanned = None, True, self._body_at
            return self._is_end
        if field.close is None:
            return self._end_call(json.end, json.end)
        closing = self._next(field.close, json.end)
        if closing is True:
            return False
        if closing:
            return self._end_call(json.end, closing.end(), closing)
        is_cut = self._is_end and field.close.may_go_on(self._text, json.end)
        return self._end_call(json.end if is_cut else None, len(self._text) if is_cut else json.end)

    def _step_call(self, field: Field) -> bool:
        """Takes a call whose arguments are tags, or whose JSON does not end."""
        if self._is_fresh and field.tags is not None:
            tag = self._next(field.tags, self._body_at)
            if tag is True:
                return False
            if tag is None and self._space_to < len(self._text):
                return self._end_call(None, self._body_at)
        self._is_fresh = False
        place, match, _ = self._find(self._watches.closes[CALLS])
        if match is not None and field.close is not None:
            is_one = match[0] in field.close.starts
            if is_one and not self._is_simple and not self._ends_in(field.tag_end, place):
                if self._text[place - 1] == "\n":  # else more likely text of an argument
                    self._first_close = self._first_close or match.span()
                self._scanned = match.end()
                return True
            is_cut = self._is_end and field.close.may_go_on(self._text, match.end())
            return self._end_call(place, len(self._text) if is_cut else match.end(), match)
        if not self._is_end:
            return False
        self._is_simple = True
        if self._first_close is not None:
            return self._end_call(*self._first_close)
        if field.tag_end and self._text.rstrip().endswith(field.tag_end):
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
        found: list[Call] = []
        if body_end is not None:
            marks = [mark for mark in (self._opening, closing) if mark is not None]
            named = {k: v for mark in marks for k, v in mark.groupdict().items() if v is not None}
            body = self._text[self._body_at : body_end]
            found = read_calls(self._field, body, named, self._schemas)
        if found and (self._names is None or all(call.name in self._names for call in found)):
            self.calls += found
            del self.calls[len(self.calls) if self._max_calls is None else self._max_calls :]
            self._is_after_call, self._lead = True, []
        else:
            self._emit(CONTENT, self._text[max(self._open_at, self._num_prompt) : end])
        self._field = self._json = None
        self._at = self._scanned = end
        return True

    def _emit(self, kind: str, text: str) -> None:
        if kind == CONTENT and self._is_after_call:
            text = text.lstrip(_SEPARATORS)
            self._is_after_call = not text
        kind = self._words_kind if kind == CONTENT else kind
        if kind == CONTENT and not self._has_words:
            self._lead.append(text)
            if not text or text.isspace():
                return
            text, self._lead, self._has_words = "".join(self._lead), [], True
        self._new[kind].append(text)
