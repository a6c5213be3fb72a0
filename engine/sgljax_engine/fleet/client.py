"""HTTP to the workers of a fleet, straight or through a router. On one event loop.

A request goes to a router, which chooses a worker, or to the worker that its session had, unless
that one is busier than others or has just failed. What fails is tried again, elsewhere if there is
an elsewhere: requests carry seeds, so another worker samples the same tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from sgljax_engine.errors import (
    EngineError,
    InvalidConfigError,
    InvalidRequestError,
    NonFiniteLogitsError,
)
from sgljax_engine.fleet.config import FleetConfig, FleetError

SESSION_HEADERS = ("x-smg-routing-key", "x-session-id")
"""Headers by which sglang-router and vllm-router find the worker of a session."""

_MAX_LOAD_GAP = 16
"""Requests more than the idlest worker that one may have and still keep its sessions."""

_COOL_OFF_S = 1.0
_FIRST_WAIT_S, _MAX_WAIT_S = 0.05, 5.0
_MAX_NONFINITE = 3
"""Attempts that end in NaN or infinity before it is taken for the weights' fault."""

_STILL_ENDS = "is the id of another request"
"""Part of the refusal of an id that an earlier attempt still has."""

_PROBE_S, _MAX_MISSED = 5.0, 3
"""Seconds between probes of an address with open requests, and how many it may not answer."""

_CONNECT_TIMEOUT_S = 5.0
_INFO_TIMEOUT_S = 10.0
_SHOWN_CHARS = 300
STATUS = "status "
"""Begins the problem of a worker that answered."""

_NONFINITE = f"{STATUS}500 nonfinite_logits"


class Reply(NamedTuple):
    """A worker's answer to a control call: its JSON, or why there is none."""

    url: str
    content: Any
    problem: str | None


@dataclasses.dataclass(slots=True, eq=False)
class _Target:
    """An address that requests go to.

    `resumes_s` is when it is asked again after a failure, by `time.monotonic`. `hung` is set for
    the requests that are open when it has stopped to answer.
    """

    url: str
    num_open: int = 0
    resumes_s: float = 0.0
    hung: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None


class FleetClient:
    """Sends requests to a fleet and control calls to its workers. Coroutines of one event loop."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._targets = [_Target(url) for url in config.urls]
        self._behind: dict[str, _Target] = {}  # workers behind routers
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._http = httpx.AsyncClient(
            # Proxies of the environment are not for workers of one's own.
            trust_env=False,
            limits=httpx.Limits(max_connections=config.max_in_flight, max_keepalive_connections=64),
            timeout=httpx.Timeout(config.request_timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        )
        self._random = random.Random()
        self.num_retries = 0

    async def close(self) -> None:
        """Closes the connections; what is under way has been cancelled before."""
        await self._http.aclose()

    # ------------------------------------------------------------------ requests

    async def ask(
        self, path: str, body: Mapping[str, Any], session: str, read: Callable[[Any], Any]
    ) -> Any:
        """Posts a body until a worker's answer can be read; returns what `read` makes of it.

        Args:
            path: Of the route.
            body: JSON; any attempt may be answered, and each gives the same.
            session: Bodies of one session meet the same prefix cache.
            read: Makes the result of the answer's JSON; ValueError, KeyError and TypeError are
                taken for a worker's failure.

        Raises:
            InvalidRequestError: when a worker refuses the body.
            InvalidConfigError: when a key is missing or wrong.
            NonFiniteLogitsError: when several attempts ended in NaN or infinity.
            FleetError: when there was no answer for `outage_timeout_s`.
        """
        async with self._slots:
            return await self._ask(self._targets, path, body, session, read)

    async def ask_a_worker(
        self, path: str, body: Mapping[str, Any], session: str, read: Callable[[Any], Any]
    ) -> Any:
        """`ask` for a route that routers do not know: straight to a worker."""
        async with self._slots:
            urls = await self.worker_urls()
            known = {target.url: target for target in (*self._targets, *self._behind.values())}
            targets = [known.get(url) or _Target(url) for url in urls]
            self._behind = {target.url: target for target in targets}
            return await self._ask(targets or self._targets, path, body, session, read)

    async def _ask(
        self,
        targets: Sequence[_Target],
        path: str,
        body: Mapping[str, Any],
        session: str,
        read: Callable[[Any], Any],
    ) -> Any:
        headers = self._headers(self._config.api_key) | dict.fromkeys(SESSION_HEADERS, session)
        failing_since_s, wait_s, num_nonfinite = math.inf, _FIRST_WAIT_S, 0
        while True:
            target = _pick(targets, session)
            target.num_open += 1
            try:
                reply = await self._post(target, path, body, headers)
                if reply.status_code == 200:
                    result = read(reply.json())
                    target.resumes_s = 0.0
                    return result
                problem = _problem(reply)
                self._refuse_for_good(reply, problem)
                num_nonfinite += problem.startswith(_NONFINITE)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}".strip()
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, EngineError):
                    raise
                problem = f"an unreadable answer: {type(error).__name__}: {error}"
            finally:
                target.num_open -= 1
            if num_nonfinite >= _MAX_NONFINITE:
                raise NonFiniteLogitsError(f"{num_nonfinite} workers, at last {problem}")
            failing_since_s = min(failing_since_s, time.monotonic())
            if time.monotonic() - failing_since_s >= self._config.outage_timeout_s:
                raise FleetError(
                    f"no worker of {', '.join(self._config.urls)} answered {path} within "
                    f"outage_timeout_s={self._config.outage_timeout_s}; at last {target.url}: "
                    f"{problem}"
                )
            self.num_retries += 1
            target.resumes_s = time.monotonic() + _COOL_OFF_S
            await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    async def _post(
        self, target: _Target, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> httpx.Response:
        """Posts a body; raises ReadTimeout once the address has stopped to answer at all."""
        if target.watch is None or target.watch.done():
            target.watch = asyncio.create_task(self._watch(target))
        post = asyncio.create_task(self._http.post(target.url + path, json=body, headers=headers))
        hung = asyncio.create_task(target.hung.wait())
        try:
            await asyncio.wait({post, hung}, return_when=asyncio.FIRST_COMPLETED)
            if post.done():
                return post.result()
            raise httpx.ReadTimeout("its /health does not answer")
        finally:
            hung.cancel()
            post.cancel()
            await asyncio.wait({post})

    async def _watch(self, target: _Target) -> None:
        """Probes an address while it has requests; gives them up when it has stopped to answer."""
        num_missed = 0
        await asyncio.sleep(_PROBE_S)
        while target.num_open:
            (reply,) = await self.tell([target.url], "/health", None, _PROBE_S)
            answers = reply.problem is None or reply.problem.startswith(STATUS)
            num_missed = 0 if answers else num_missed + 1
            if num_missed == _MAX_MISSED:
                target.hung.set()
                target.hung, num_missed = asyncio.Event(), 0
            await asyncio.sleep(_PROBE_S)

    def _refuse_for_good(self, reply: httpx.Response, problem: str) -> None:
        """Raises for an answer that every worker would give."""
        status = reply.status_code
        if _STILL_ENDS in problem:  # an attempt that was given up, on the same worker
            return
        if status in (401, 403):
            raise InvalidConfigError(f"fleet's api_key is refused: {problem}")
        if status in (400, 413, 422):
            raise InvalidRequestError(f"a worker refuses the request: {problem}")

    # ------------------------------------------------------------------ control

    async def worker_urls(self) -> list[str]:
        """Addresses of all workers: those behind routers, and servers themselves.

        An address that does not answer is taken for a server.
        """
        lists = await asyncio.gather(*(self._workers_of(target.url) for target in self._targets))
        return list(dict.fromkeys(url for urls in lists for url in urls))

    async def _workers_of(self, url: str) -> list[str]:
        """Addresses behind a router, as sglang-router and vllm-router list them; else itself."""
        (reply,) = await self.tell([url], "/workers", None, _INFO_TIMEOUT_S)
        if reply.problem is None:
            return [str(worker["url"]).rstrip("/") for worker in reply.content["workers"]]
        return [url]

    async def tell(
        self, urls: Sequence[str], path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> list[Reply]:
        """Calls a control route of several workers at once; None as body reads it with GET."""

        async def one(url: str) -> Reply:
            key = self._config.api_key if body is None else self._config.admin_key
            try:
                reply = await self._http.request(
                    "GET" if body is None else "POST",
                    url + path,
                    json=body,
                    headers=self._headers(key),
                    timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
                )
                if reply.status_code == 200:
                    return Reply(url, reply.json() if _is_json(reply) else reply.text, None)
                return Reply(url, None, _problem(reply))
            except (httpx.HTTPError, ValueError) as error:
                return Reply(url, None, f"{type(error).__name__} {error}".strip())

        return list(await asyncio.gather(*map(one, urls)))

    async def tell_all(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> list[Reply]:
        """`tell` to all workers; returns the replies of those that did it.

        Raises:
            FleetError: when none did; says what each answered.
        """
        replies = await self.tell(await self.worker_urls(), path, body, timeout_s)
        done = [reply for reply in replies if reply.problem is None]
        if not done:
            raise FleetError(f"no worker did {path}: {problems(replies) or 'none is known'}")
        return done

    def _headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {key}"}


def problems(replies: Sequence[Reply]) -> str:
    """What the workers without an answer said, for messages; empty if all have one."""
    return "; ".join(f"{reply.url}: {reply.problem}" for reply in replies if reply.problem)


def _pick(targets: Sequence[_Target], session: str) -> _Target:
    """The address of a session, by rendezvous hashing among those that are not overloaded."""
    now_s = time.monotonic()
    targets = [each for each in targets if each.resumes_s <= now_s] or targets
    idlest = min(target.num_open for target in targets)
    targets = [each for each in targets if each.num_open <= idlest + _MAX_LOAD_GAP]
    return max(targets, key=lambda target: _weight(session, target.url))


def _weight(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session} {url}".encode(), digest_size=8).digest()


def _is_json(reply: httpx.Response) -> bool:
    return "json" in reply.headers.get("content-type", "")


def _problem(reply: httpx.Response) -> str:
    """The status of an answer, our servers' code for it, and its message."""
    try:
        error = reply.json()["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        code, message = reply.status_code, reply.text
    named = f" {code}" if isinstance(code, str) else ""
    return f"{STATUS}{reply.status_code}{named}: {str(message)[:_SHOWN_CHARS]}"
