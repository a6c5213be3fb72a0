"""Divides an answer into thoughts, content and tool calls, as the text comes."""

from __future__ import annotations

from collections.abc import Callable

from sgljax_engine.server.openai.calls import Call, ToolParser
from sgljax_engine.server.openai.reasoning import ReasoningSplitter, Split


class AnswerReader:
    """Reads one output. All pieces together give what the whole text does.

    A call that is drafted in thoughts is a thought. Thoughts that are never closed are no draft: a
    model that forgot the mark and called a tool has called it.
    """

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        make_parser: Callable[[], ToolParser] | None,
        *,
        max_calls: int | None = None,
    ) -> None:
        """Starts before the first text.

        Args:
            splitter: None leaves thoughts in the content.
            make_parser: Makes a parser of tool calls; None leaves them in the content.
            max_calls: Calls to give back; None for all.
        """
        self._splitter = splitter
        self._parser = None if make_parser is None else make_parser()
        self._drafts = None
        if splitter is not None and make_parser is not None:
            self._drafts = _Drafts(make_parser())
        self._max_calls = max_calls

    @property
    def calls(self) -> list[Call]:
        """The tool calls so far."""
        return [] if self._parser is None else self._parser.calls[: self._max_calls]

    def feed(self, text: str) -> Split:
        """Takes new text; returns what is certain."""
        if self._splitter is None:
            return Split("", self._content(text))
        new = self._splitter.feed(text)
        reasoning = new.reasoning
        if self._drafts is not None:
            reasoning = self._drafts.feed(reasoning)
            if not self._splitter.is_inside:
                reasoning += self._drafts.close()
        return Split(reasoning, self._content(new.content))

    def end(self) -> Split:
        """The text that was held back."""
        rest = Split("", "") if self._splitter is None else self._splitter.end()
        reasoning = rest.reasoning
        if self._drafts is not None and self._splitter is not None and self._splitter.is_inside:
            reasoning = self._drafts.feed(reasoning)
            more, calls = self._drafts.end()
            reasoning += more
            if self._parser is not None:
                self._parser.calls += calls
        content = self._content(rest.content)
        return Split(reasoning, content if self._parser is None else content + self._parser.end())

    def _content(self, text: str) -> str:
        return self._parser.feed(text) if text and self._parser is not None else text


class _Drafts:
    """Thoughts that may hold calls: gives them out up to the first call."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._held = ""  # behind what was given out
        self._behind_calls = ""  # of it, what the parser says is no call

    def feed(self, text: str) -> str:
        """Takes more thoughts; returns those before the first call."""
        if not text:
            return ""
        self._held += text
        plain = self._parser.feed(text)
        if self._parser.calls:
            self._behind_calls += plain
            return ""
        self._held = self._held[len(plain) :]
        return plain

    def close(self) -> str:
        """The rest of thoughts that were closed: drafts are thoughts."""
        held, self._held = self._held, ""
        return held

    def end(self) -> tuple[str, list[Call]]:
        """The rest of thoughts that never were closed, and the calls in them."""
        plain = self._behind_calls + self._parser.end()
        return (plain if self._parser.calls else self._held), self._parser.calls
