"""Splits a model's thoughts off what it says, as the text comes."""

from __future__ import annotations

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """New text of both kinds."""

    reasoning: str
    content: str

    def __add__(self, other: Split) -> Split:  # type: ignore[override]
        """Both texts, each behind the one of its kind."""
        return Split(self.reasoning + other.reasoning, self.content + other.content)


class ReasoningSplitter:
    """Text between `<think>` at the start and `</think>` is reasoning, all else content.

    Nothing is lost but the two marks.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        """Starts before the first text.

        Args:
            starts_inside: Whether the prompt ends with `<think>`.
        """
        self._mark = CLOSE if starts_inside else OPEN
        self._is_inside = starts_inside
        self._is_done = False
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Whether the thoughts have started and not ended."""
        return self._is_inside and not self._is_done

    def feed(self, text: str) -> Split:
        """Takes text, and gives what is certain to be of one kind."""
        if self._is_done:
            return Split("", text)
        self._held += text
        if not self._is_inside and not self._open():
            return self._end_if_not(OPEN)
        before, mark, after = self._held.partition(CLOSE)
        if mark:
            self._is_done, self._held = True, ""
            return Split(before, after)
        kept = held_back(before, CLOSE)
        self._held = before[len(before) - kept :]
        return Split(before[: len(before) - kept], "")

    def end(self) -> Split:
        """The text that was held back."""
        held, self._held = self._held, ""
        return Split(held, "") if self._is_inside and not self._is_done else Split("", held)

    def _open(self) -> bool:
        """Whether the thoughts begin; takes the mark away."""
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._is_inside, self._held = True, start[len(OPEN) :]
        return self._is_inside

    def _end_if_not(self, mark: str) -> Split:
        """All is content, unless the text may still become the mark."""
        if mark.startswith(self._held.lstrip()):
            return Split("", "")
        self._is_done = True
        return Split("", self.end().content)


def held_back(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the start of a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def split(text: str, *, starts_inside: bool) -> Split:
    """A whole text."""
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    return splitter.feed(text) + splitter.end()
