"""Reads requests and writes replies where no other client has to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.limits import SMALL_BYTES, TEMPLATE_TIMEOUT_S
from sgljax_engine.server.replies import HTTPError
from sgljax_engine.server.workers import TooSlowError

_T = TypeVar("_T")

_FEW_ENTRIES = 1000
"""Tokens and log-probs that become JSON within about a millisecond."""


async def prepared(
    request: Request, context: ServerContext, make: Callable[[], _T], *, has_template: bool = False
) -> _T:
    """Calls a function that tokenizes; on another thread unless the request is small.

    Other clients of the event loop would have to wait for it.

    Args:
        request: Its body was read.
        context: Has the threads.
        make: The function.
        has_template: A chat template is a program: it may take long whatever the request's size.

    Raises:
        HTTPError: 400 for a chat template that does not end.
    """
    if not has_template and request.state.num_bytes <= SMALL_BYTES:
        return make()
    try:
        return await context.workers.run(make, TEMPLATE_TIMEOUT_S if has_template else None)
    except TooSlowError:
        raise HTTPError(
            400, f"the chat template took more than {TEMPLATE_TIMEOUT_S} s for these messages"
        ) from None


async def written(
    context: ServerContext, outputs: Sequence[Mapping[str, Any]], make: Callable[[], Response]
) -> Response:
    """Calls a function that makes a reply of outputs; on another thread unless they are small."""
    if sum(map(_num_entries, outputs)) <= _FEW_ENTRIES:
        return make()
    return await context.workers.run(make)


def _num_entries(output: Mapping[str, Any]) -> int:
    count = len(output["output_ids"])
    for name, entries in output["meta_info"].items():
        if name.endswith("_logprobs") and entries:
            count += len(entries) * (len(entries[-1]) if isinstance(entries[-1], list) else 1)
    return count
