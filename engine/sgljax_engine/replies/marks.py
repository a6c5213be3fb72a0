"""Marks of a response template that are looked for together, by where a parser is."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import regex

from sgljax_engine.replies.response_template import (
    CALLS,
    CONTENT,
    REASONING,
    Field,
    Mark,
    ResponseTemplate,
    literal_mark,
)

THINK = "<think>"
"""The opening mark of thoughts that answers may quote: it counts at their start alone."""


class Found(NamedTuple):
    """A mark, and the field that it opens or closes; without one, none begins before `start`."""

    start: int
    match: regex.Match[str] | None = None
    field: Field | None = None


class Watch:
    """Marks that are looked for together, and the field of each; None for what is dropped."""

    def __init__(self, marks: Iterable[tuple[Mark | None, Field | None]]) -> None:
        self._marks = [(mark, field) for mark, field in marks if mark is not None]
        starts = dict.fromkeys(start for mark, _ in self._marks for start in mark.starts)
        self.starts = regex.compile("|".join(map(regex.escape, starts)) or r"(?!)")
        self._beginning = functools.cache(self._find_beginning)

    def _find_beginning(self, start: str) -> list[tuple[Mark, Field | None, bool]]:
        """The marks that may begin with a text, and whether the text is the whole mark."""
        return [
            (mark, field, mark.growing is None and start in mark.starts)
            for mark, field in self._marks
            if any(a.startswith(start) or start.startswith(a) for a in mark.starts)
        ]

    def find(self, text: str, start: int, *, is_end: bool) -> Found:
        """The next mark: the longest one there."""
        while found := self.starts.search(text, start, partial=not is_end):
            start = found.start()
            if found.partial:
                return Found(start)
            best, end = None, -1
            for mark, field, is_whole in self._beginning(found[0]):
                match = found if is_whole else mark.match(text, start, is_end=is_end)
                if match is True:
                    return Found(start)
                if match and match.end() > end:
                    best, end = Found(start, match, field), match.end()
            if best is not None:
                return best
            start += 1
        return Found(len(text))


class Watches(NamedTuple):
    """What is looked for, by where the parser is.

    `plain` holds at the end of a text with an unfinished call, `first` before thoughts, `late`
    behind them and behind words, `drafts` in thoughts. `closes` has what ends each field.
    """

    plain: Watch
    first: Watch
    late: Watch
    drafts: Watch
    closes: Mapping[str, Watch]


@functools.lru_cache(maxsize=64)  # hundreds of special tokens take 20 ms
def watches_of(
    template: ResponseTemplate, dropped: tuple[str, ...], *, thinks: bool, has_calls: bool
) -> Watches:
    """What a parser of a template looks for, without the fields that it leaves in the content."""
    fields = template.fields
    thoughts = fields.get(REASONING) if thinks else None
    calls = fields.get(CALLS) if has_calls else None
    content = fields.get(CONTENT)
    plain = [(literal_mark(sorted(dropped)), None)] if dropped else []
    plain += [(content.close, None)] if content else []
    late = [(each.open, each) for each in (calls, content) if each] + plain
    first = [(thoughts.open, thoughts), *late] if thoughts else late
    drafts = [(calls.open, calls), *plain] if calls else plain
    return Watches(
        plain=Watch(plain),
        first=Watch(first),
        late=Watch(late if _is_quotable(thoughts) else first),
        drafts=Watch([(thoughts.close, thoughts), *drafts] if thoughts else []),
        closes={each.name: Watch([(each.close, each)]) for each in fields.values()},
    )


def _is_quotable(field: Field | None) -> bool:
    return field is not None and field.open is not None and THINK in field.open.starts
