"""Keeps a server registered with a router: sglang-router or vllm-router, over HTTP."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import urllib.parse
from typing import Any

import httpx

from sgljax_engine import InvalidConfigError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_LOOK_S = 2.0
"""Seconds between two looks at whether the router, which may have restarted, knows the server."""

_REMOVED_CHECK_S = 0.05
"""Seconds between two looks at whether the router has forgotten the server; it does it behind."""


class Membership:
    """A server's place among a router's workers. Any thread may call the methods.

    It is registered until `leave`, on a daemon thread: again and again if the router does not know
    it, or does not answer. What fails is logged once, and tried again.
    """

    def __init__(self, router: str, advertised: str, *, api_key: str | None = None) -> None:
        """Begins to register.

        Args:
            router: The router's URL.
            advertised: The server's URL, as the router reaches it.
            api_key: Bearer key of the router; None sends none.

        Raises:
            InvalidConfigError: for what is no URL of a server.
        """
        self._router = checked_url("--join", router)
        self._advertised = checked_url("--advertise", advertised)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=self._router, headers=headers, timeout=_TIMEOUT_S)
        self._leaving = threading.Event()
        self._problem: str | None = ""
        self._thread = threading.Thread(target=self._run, name="sgljax-membership", daemon=True)
        self._thread.start()

    @property
    def is_registered(self) -> bool:
        """Whether the router knew the server when it was last asked."""
        return self._problem is None

    def leave(self, timeout_s: float = 10.0) -> bool:
        """Has the router forget the server; returns whether it has. Idempotent.

        Requests that it was sent before still come to their end.

        Args:
            timeout_s: Seconds that the router has.
        """
        self._leaving.set()
        self._thread.join(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        try:
            while (worker := self._find()) is not None:
                self._delete(worker)
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(_REMOVED_CHECK_S)
        except httpx.HTTPError as error:
            logger.warning("cannot leave the router %s: %s", self._router, error)
            return False
        return True

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            try:
                if self._find() is None:
                    self._add()
                problem = None
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            self._note(problem)
            if self._leaving.wait(_LOOK_S):
                return

    def _note(self, problem: str | None) -> None:
        before, self._problem = self._problem, problem
        if problem == before:
            return
        if problem is None:
            logger.info("the router %s has the worker %s", self._router, self._advertised)
        else:
            logger.warning("cannot join the router %s: %s", self._router, problem)

    # ------------------------------------------------------------------ the router's routes

    def _find(self) -> dict[str, Any] | None:
        """The router's entry of this server."""
        reply = self._http.get("/workers")
        reply.raise_for_status()
        found = (each for each in reply.json()["workers"] if _is_same(each, self._advertised))
        return next(found, None)

    def _add(self) -> None:
        reply = self._http.post("/workers", json={"url": self._advertised})
        if reply.status_code == 400 and "already exists" in reply.text:
            return  # vllm-router, when another call was first
        reply.raise_for_status()

    def _delete(self, worker: dict[str, Any]) -> None:
        # sglang-router names workers by ids, vllm-router by URLs.
        name = urllib.parse.quote(worker.get("id") or worker["url"], safe="")
        with contextlib.suppress(httpx.HTTPStatusError):  # it was removed in between
            self._http.delete(f"/workers/{name}").raise_for_status()


def checked_url(option: str, url: str) -> str:
    """A URL of a server, without a slash at its end."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/"):
        raise InvalidConfigError(f"{option} must be http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def _is_same(worker: dict[str, Any], url: str) -> bool:
    return str(worker["url"]).rstrip("/") == url
