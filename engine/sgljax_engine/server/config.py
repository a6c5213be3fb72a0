"""Settings of a server. Host-only."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgljax_engine import InvalidConfigError

try:
    import resource
except ImportError:  # Windows
    resource = None

_WINDOWS_FILES = 8192
_MAX_CONNECTIONS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How an engine is served over HTTP.

    Attributes:
        host: Address to listen on. An address that other machines reach needs both keys.
        port: Port to listen on; 0 takes a free one.
        api_key: Bearer key of the routes that generate and read; None leaves them open.
        admin_key: Bearer key of the routes that control the engine; None leaves them open.
        model_name: Name of the model in replies; requests may give it.
        lora: Adapter of requests that name no other, so that it is part of the model.
        weights_root: Folder that `/update_weights_from_disk` may read from; None refuses the route.
        weights_store: Folder or URL of a weight store: the server serves its newest version before
            it listens, and others when it is told to or asked for them; None follows none. Needs
            the extra [fleet].
        replica_id: Its name among the servers of a fleet, in replies and metrics; None takes
            "<name of the host>:<port>".
        max_requests: Samples that may be unfinished at a time; what is above gets status 503.
        max_body_bytes: Size of a request's body; what is above gets status 413.
        max_connections: Connections that may be open at a time; what is above gets status 503. None
            takes half of the limit of open files, at most 8192. Of `Server` alone.
        body_timeout_s: Seconds that a client has to send a request's headers, then again its body.
        halt_timeout_s: Seconds that a request waits while generation is paused or asleep. A request
            may set its own with the header `x-halt-timeout-s`.
        drain_timeout_s: Seconds that unfinished requests have at the end before they are aborted.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_key: str | None = None
    model_name: str = "policy"
    lora: str | None = None
    weights_root: Path | None = None
    weights_store: str | None = None
    replica_id: str | None = None
    max_requests: int = 4096
    max_body_bytes: int = 16 * 2**20
    max_connections: int | None = None
    body_timeout_s: float = 30.0
    halt_timeout_s: float = 600.0
    drain_timeout_s: float = 10.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Builds from fields by name.

        Raises:
            InvalidConfigError: for an unknown name, with the nearest known one; for a bad value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise InvalidConfigError(f"unknown server option {name!r}; {hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("host", "model_name"):
            value = getattr(self, name)
            _check(isinstance(value, str) and value, name, "text", value)
        for name in ("max_requests", "max_body_bytes"):
            value = getattr(self, name)
            _check(type(value) is int and value >= 1, name, "an integer >= 1", value)
        for name in ("body_timeout_s", "halt_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            is_right = type(value) in (int, float) and 0 <= value < float("inf")
            _check(is_right, name, "a number >= 0", value)
        is_right = type(self.port) is int and 0 <= self.port < 65536
        _check(is_right, "port", "an integer in [0, 65535]", self.port)
        files, most = open_file_limit(), self.max_connections
        is_right = most is None or (type(most) is int and 1 <= most < files)
        limits = f"None or an integer in [1, the limit of open files = {files})"
        _check(is_right, "max_connections", limits, most)
        texts = {
            "lora": "an adapter's name",
            "weights_store": "a folder or a URL",
            "replica_id": "printable ASCII text",
        }
        for name, what in texts.items():
            value = getattr(self, name)
            is_right = value is None or (isinstance(value, str) and value)
            _check(is_right, name, f"None or {what}", value)
        name = self.replica_id or ""  # goes into a header
        is_right = name.isascii() and name.isprintable() and name == name.strip()
        _check(is_right, "replica_id", f"None or {texts['replica_id']}", name)
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is None:
                continue
            # What a header can hold. The value stays out of the message.
            if not isinstance(key, str) or not key.isascii() or not key.isprintable():
                raise InvalidConfigError(f"{name} must be None or printable ASCII text")
            if not key or key != key.strip():
                raise InvalidConfigError(f"{name} must not be empty, or begin or end with a space")
        if self.weights_root is not None:
            root = Path(self.weights_root)
            _check(root.is_dir(), "weights_root", "a folder", str(root))
            object.__setattr__(self, "weights_root", root.resolve())
        if not is_loopback(self.host) and None in (self.api_key, self.admin_key):
            raise InvalidConfigError(
                f"host {self.host!r} is reached from other machines and needs api_key and "
                "admin_key; without keys serve on 127.0.0.1"
            )

    def replica_name(self, port: int) -> str:
        """Its name among the servers of a fleet, for the port that it listens on."""
        return self.replica_id or f"{socket.gethostname()}:{port}"

    @property
    def connection_limit(self) -> int:
        """Connections that may be open at a time."""
        if self.max_connections is not None:
            return self.max_connections
        return max(1, min(_MAX_CONNECTIONS, open_file_limit() // 2))


def _check(is_right: object, name: str, what: str, value: object) -> None:
    if not is_right:
        raise InvalidConfigError(f"{name} must be {what}, got {value!r}")


def open_file_limit() -> int:
    if resource is None:
        return _WINDOWS_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
