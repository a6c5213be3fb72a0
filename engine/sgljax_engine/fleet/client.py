"""HTTP to the workers of a fleet, straight or through a router. On one event loop.

A request goes to a router, which chooses a worker, or to the worker that its session had, unless
that one is busier than others or has just failed. What fails is tried again, elsewhere if there is
an elsewhere: requests carry seeds, so another worker samples the same tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
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

_STILL_ENDS = "in use"
"""Part of the refusal of an id that an earlier attempt still has."""

_CONNECT_TIMEOUT_S = 5.0
_INFO_TIMEOUT_S = 10.0
_SHOWN_CHARS = 300


class Reply(NamedTuple):
    """A worker's answer to a control call: its JSON, or why there is none."""

    url: str
    content: Any
    problem: str | None


@dataclasses.dataclass(slots=True)
class _Target:
    """An address that requests go to."""

    url: str
    num_open: int = 0
    resumes_s: float = 0.0  # by `time.monotonic`; it is left alone before


class FleetClient:
    """Sends requests to a fleet and control calls to its workers. All methods: one event loop."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._targets = [_Target(url) for url in config.urls]
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
            return await self._ask(path, body, session, read)

    async def _ask(
        self, path: str, body: Mapping[str, Any], session: str, read: Callable[[Any], Any]
    ) -> Any:
        headers = self._headers(self._config.api_key) | dict.fromkeys(SESSION_HEADERS, session)
        began, wait_s, num_nonfinite = time.monotonic(), _FIRST_WAIT_S, 0
        while True:
            target = self._pick(session)
            target.num_open += 1
            try:
                reply = await self._http.post(target.url + path, json=body, headers=headers)
                if reply.status_code == 200:
                    result = read(reply.json())
                    target.resumes_s = 0.0
                    return result
                problem = _problem(reply)
                self._refuse_for_good(reply, problem)
                num_nonfinite += _is_nonfinite(reply)
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
            if time.monotonic() - began > self._config.outage_timeout_s:
                raise FleetError(
                    f"no worker of {', '.join(self._config.urls)} answered {path} within "
                    f"outage_timeout_s={self._config.outage_timeout_s}; at last {target.url}: "
                    f"{problem}"
                )
            self.num_retries += 1
            target.resumes_s = time.monotonic() + _COOL_OFF_S
            await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    def _refuse_for_good(self, reply: httpx.Response, problem: str) -> None:
        """Raises for an answer that every worker would give."""
        status = reply.status_code
        if _STILL_ENDS in problem:  # an attempt that was given up, on the same worker
            return
        if status in (401, 403):
            raise InvalidConfigError(f"fleet's api_key is refused: {problem}")
        if status in (400, 413, 422):
            raise InvalidRequestError(f"a worker refuses the request: {problem}")

    def _pick(self, session: str) -> _Target:
        """The address of a session, by rendezvous hashing among those that are not overloaded."""
        now_s = time.monotonic()
        targets = [each for each in self._targets if each.resumes_s <= now_s] or self._targets
        idlest = min(target.num_open for target in targets)
        targets = [each for each in targets if each.num_open <= idlest + _MAX_LOAD_GAP]
        return max(targets, key=lambda target: _weight(session, target.url))

    # ------------------------------------------------------------------ control

    async def worker_urls(self) -> list[str]:
        """Addresses of all workers: those behind routers, and servers themselves.

        An address that does not answer is taken for a server.
        """
        lists = await asyncio.gather(*(self._workers_of(target.url) for target in self._targets))
        return list(dict.fromkeys(url for urls in lists for url in urls))

    async def _workers_of(self, url: str) -> list[str]:
        """Addresses behind a router: sglang-router's way, then vllm-router's; else the address."""
        for path, read in (("/workers", _sglang_workers), ("/list_workers", _vllm_workers)):
            try:
                reply = await self._http.get(
                    url + path,
                    headers=self._headers(self._config.api_key),
                    timeout=_INFO_TIMEOUT_S,
                )
                if reply.status_code == 200:
                    return read(reply.json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                continue
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
                    return Reply(url, reply.json() if reply.content else None, None)
                return Reply(url, None, _problem(reply))
            except (httpx.HTTPError, ValueError) as error:
                return Reply(url, None, f"{type(error).__name__} {error}".strip())

        return list(await asyncio.gather(*map(one, urls)))

    def _headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {key}"}


def _weight(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session} {url}".encode(), digest_size=8).digest()


def _problem(reply: httpx.Response) -> str:
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text
    return f"status {reply.status_code}: {str(message)[:_SHOWN_CHARS]}"


def _is_nonfinite(reply: httpx.Response) -> bool:
    return reply.status_code == 500 and "NonFiniteLogitsError" in reply.text


def _sglang_workers(content: Any) -> list[str]:
    return [str(worker["url"]).rstrip("/") for worker in content["workers"]]


def _vllm_workers(content: Any) -> list[str]:
    return [str(url).rstrip("/") for url in content["urls"]]
