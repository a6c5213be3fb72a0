"""What the routes of a server share: the engine, its tokens' texts, and threads."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.responses import Response

from sgljax_engine import Engine
from sgljax_engine.fleet.replica import Replica
from sgljax_engine.server.body import SMALL_BYTES, BodyLimits
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.generation import EventStream, Generation, Job, PieceStream
from sgljax_engine.server.responses import HTTPError, reply

_T = TypeVar("_T")

_NUM_THREADS = 4
"""More would only let more large requests take memory at a time."""

TEMPLATE_TIMEOUT_S = 30.0
"""Seconds for a chat template, and for tokenizing what it wrote."""

_FEW_ENTRIES = 1000
"""Tokens and log-probs that become JSON within about a millisecond."""

_MAX_LISTED = 20
"""Names that an error lists."""


class TokenTexts:
    """Texts and bytes of single tokens, kept by id. `special` has the texts of special tokens."""

    def __init__(self, engine: Engine) -> None:
        self.special = frozenset(engine.special_tokens)
        self._engine = engine
        self._found: dict[int, tuple[str, bytes | None]] = {}

    def __getitem__(self, token: int) -> str:
        """The text of a token, with its space; U+FFFD where it is a part of a character."""
        return self._find(token)[0]

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None for a part of a character that is not known."""
        return self._find(token)[1]

    def _find(self, token: int) -> tuple[str, bytes | None]:
        if token not in self._found:
            known = self._engine.token_bytes(token)
            if known is not None:
                self._found[token] = known.decode(errors="replace"), known
            else:
                text = self._engine.detokenize([token], skip_special_tokens=None)
                self._found[token] = text, None if "\ufffd" in text else text.encode()
        return self._found[token]


class TooSlowError(Exception):
    """Work took longer than it may."""


class _Interrupt(BaseException):
    """Raised in a thread whose work takes too long; no `except Exception` stops it."""


class _Work:
    """Work that may be interrupted. The lock says whether its thread still does it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._is_over = self._is_interrupted = False

    def __call__(self) -> object:
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return None
            self._thread_id = threading.get_ident()
        try:
            try:
                return work()
            except _Interrupt:
                self._is_interrupted = False  # it has come
                raise
            finally:
                with self._lock:
                    self._is_over = True
                while self._is_interrupted:  # it is on its way
                    pass
        except _Interrupt:
            return None

    def interrupt(self) -> None:
        """Ends the work, wherever Python code of it is. On the event loop."""
        with self._lock:
            self._work = None
            if self._thread_id is not None and not self._is_over:
                self._is_interrupted = True
                thread = ctypes.c_ulong(self._thread_id)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupt))


class Workers:
    """A few threads of the event loop, which end with it."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(_NUM_THREADS)

    async def run(self, work: Callable[[], _T], timeout_s: float | None = None) -> _T:
        """Does work on a thread; interrupts it when it takes too long, or its client is gone.

        TooSlowError comes after `timeout_s`, the wait for a thread included.
        """
        task = _Work(work)
        try:
            async with asyncio.timeout(timeout_s):
                return await anyio.to_thread.run_sync(
                    task, abandon_on_cancel=True, limiter=self._limiter
                )  # type: ignore[return-value]
        except TimeoutError:
            raise TooSlowError from None
        finally:
            task.interrupt()
            del work, task


class Call(Protocol):
    """A request that generates, in the dialect of its route."""

    @property
    def job(self) -> Job:
        """What it asks of the engine."""
        ...

    def answer(self, outputs: list[dict[str, Any]]) -> Any:
        """The whole reply, as JSON."""
        ...

    def events(self, pieces: PieceStream) -> AsyncIterator[str]:
        """The reply as server-sent events."""
        ...


class ServerContext:
    """One engine that is served. Clients may give weight versions labels."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        name = config.replica_name(config.port)
        self.replica = Replica(engine, name, config.weights_store)
        self.generation = Generation(engine, config, self.replica)
        self.token_texts = TokenTexts(engine)
        self.limits = BodyLimits.for_server(engine, config)
        self.workers = Workers()
        self.version_labels: dict[int, str] = {}

    @property
    def default_adapter(self) -> str | None:
        """The adapter of requests that name none: the store's, or that of the config."""
        follower = self.replica.follower
        return (follower and follower.adapter) or self.config.lora

    async def served_names(self) -> list[str]:
        state = await self.engine.async_get_internal_state()
        return list(dict.fromkeys([self.config.model_name, *state.adapters]))

    async def check_model(self, name: str | None) -> None:
        """Raises HTTPError with status 404 for a model that is not served."""
        if name in (None, self.config.model_name):
            return
        names = await self.served_names()
        if name not in names:
            served = ", ".join(map(repr, names[:_MAX_LISTED]))
            problem = f"the model {name!r} is not served; served: {served}"
            kind, code = "not_found_error", "model_not_found"
            raise HTTPError(404, problem, kind=kind, param="model", code=code)

    async def prepared(
        self, request: Request, make: Callable[[], _T], *, has_template: bool = False
    ) -> _T:
        """Calls a function that tokenizes; on another thread unless the request is small.

        A chat template is a program, which may take long whatever the request's size: then
        HTTPError 400.
        """
        if not has_template and request.state.num_bytes <= SMALL_BYTES:
            return make()
        try:
            return await self.workers.run(make, TEMPLATE_TIMEOUT_S if has_template else None)
        except TooSlowError:
            raise HTTPError(
                400, f"the chat template took more than {TEMPLATE_TIMEOUT_S} s for these messages"
            ) from None

    async def answer(
        self,
        request: Request,
        model: str | None,
        make: Callable[[], Call],
        *,
        stream: bool,
        has_template: bool = False,
    ) -> Response:
        """The reply to a request that generates, whole or as a stream."""
        await self.check_model(model)
        call = await self.prepared(request, make, has_template=has_template)
        if stream:
            pieces = await self.generation.stream(request, call.job)
            return EventStream(call.events(pieces), pieces, self.engine.weight_version)
        outputs = await self.generation.generate(request, call.job)
        versions = [output["meta_info"]["weight_version"] for output in outputs]
        known = [version for version in versions if version is not None]
        version = max(known, default=self.engine.weight_version)

        def write() -> Response:
            return reply(call.answer(outputs), version)

        if sum(map(_num_entries, outputs)) <= _FEW_ENTRIES:
            return write()
        return await self.workers.run(write)


def _num_entries(output: Mapping[str, Any]) -> int:
    count = len(output["output_ids"])
    for name, entries in output["meta_info"].items():
        if name.endswith("_logprobs") and entries:
            count += len(entries) * (len(entries[-1]) if isinstance(entries[-1], list) else 1)
    return count
