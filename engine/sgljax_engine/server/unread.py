"""Refuses what a client sends and no route reads: a control value without effect is no success."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping

from starlette.datastructures import QueryParams

from sgljax_engine.server.limits import SMALL_BYTES
from sgljax_engine.server.replies import HTTPError

_MAX_NAME_LEN = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """The names that a route reads.

    Attributes:
        query: Query parameters, and whether each may be given several times.
        body: Fields of the JSON body.
    """

    query: Mapping[str, bool]
    body: frozenset[str]

    def check_query(self, given: QueryParams) -> None:
        """Raises HTTPError 400 for a name that is not read, or whose value would not be."""
        for name in given:
            if name not in self.query:
                raise HTTPError(
                    400, f"unknown query parameter {_short(name)}{self._hint(name)}", param=name
                )
            count = len(given.getlist(name))
            if count > 1 and not self.query[name]:
                raise HTTPError(400, f"{name} must be given once, got {count}", param=name)

    def _hint(self, name: str) -> str:
        if name in self.body:
            return "; it is a field of the JSON body"
        near = difflib.get_close_matches(name[:_MAX_NAME_LEN], self.query, n=1)
        if near:
            return f"; did you mean {near[0]!r}?"
        return f"; the route reads {', '.join(map(repr, self.query)) or 'none'}"

    def check_no_body(self, body: bytes) -> None:
        """Raises HTTPError 400 for a body that asks for something, on a route without one."""
        try:
            given = json.loads(body) if body.strip() and len(body) <= SMALL_BYTES else body.strip()
        except (ValueError, RecursionError):
            given = body
        if not given:  # nothing, null or {}
            return
        if not isinstance(given, dict):
            raise HTTPError(400, f"the route reads no body, got {len(body)} bytes")
        name = next(iter(given))
        hint = "; it is a query parameter" if name in self.query else ""
        raise HTTPError(
            400, f"unknown field {_short(name)}: the route reads no body{hint}", param=name
        )


def _short(name: str) -> str:
    return repr(name[:_MAX_NAME_LEN])
