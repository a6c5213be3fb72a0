"""Where a fleet is, and how long its workers may take. Host only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from sgljax_engine.errors import EngineError, InvalidConfigError

ADAPTER = "policy"
"""Name of a fleet's adapter."""

PAIRS = "base_model.model."
"""How the names of an adapter's tensors begin, beside those of a model."""


class FleetError(EngineError, RuntimeError):
    """No worker of a fleet did in time what was asked; says what they answered."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """A fleet of servers that sample for a trainer.

    Attributes:
        urls: Addresses of the servers, or of one router in front of them; a text is one address.
            Workers behind a router may come and go.
        weights_store: Folder or fsspec URL where the trainer writes the weights and from which the
            servers read them, under the same name or another.
        api_key: Bearer key of the routes that generate; None for none.
        admin_key: Bearer key of the routes that change weights and pause; None for none.
        base_every: Versions of the weights from one written whole to the next; those between hold
            what changed.
        request_timeout_s: Seconds that one attempt at a completion may take. A worker that hangs is
            left then, so it should not be much more than a completion takes.
        sync_timeout_s: Seconds that a worker has to read and stage new weights, and again to
            publish them; whoever takes longer is left out until it has caught up.
        outage_timeout_s: Seconds without any worker that answers, after which a call fails.
        min_workers: Workers that must serve new weights before an update returns.
        max_in_flight: Requests that are sent at a time; further ones wait.
    """

    urls: Sequence[str] | str
    weights_store: str
    api_key: str | None = None
    admin_key: str | None = None
    base_every: int = 16
    request_timeout_s: float = 600.0
    sync_timeout_s: float = 600.0
    outage_timeout_s: float = 600.0
    min_workers: int = 1
    max_in_flight: int = 1024

    @classmethod
    def of(cls, value: Any) -> FleetConfig:
        """A FleetConfig, or one made of a mapping of its fields.

        Raises:
            InvalidConfigError: names the field, its value and its limit.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidConfigError(
                f"fleet must be a FleetConfig or a mapping of its fields, got {value!r}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise InvalidConfigError(f"fleet has no field {unknown[0]!r}; known: {sorted(known)}")
        missing = [name for name in ("urls", "weights_store") if name not in value]
        if missing:
            raise InvalidConfigError(f"fleet needs {' and '.join(missing)}")
        return cls(**value)

    def __post_init__(self) -> None:
        urls = (self.urls,) if isinstance(self.urls, str) else tuple(self.urls)
        _check(len(urls) > 0, "urls", "at least one address", self.urls)
        for url in urls:
            is_right = isinstance(url, str) and urlsplit(url).scheme in ("http", "https")
            _check(is_right and urlsplit(url).netloc, "urls", "http:// or https:// addresses", url)
        urls = tuple(url.rstrip("/") for url in urls)
        _check(len(set(urls)) == len(urls), "urls", "different addresses", urls)
        object.__setattr__(self, "urls", urls)
        object.__setattr__(self, "weights_store", str(self.weights_store))
        _check(bool(self.weights_store), "weights_store", "a folder or URL", self.weights_store)
        for name in ("base_every", "min_workers", "max_in_flight"):
            value = getattr(self, name)
            _check(type(value) is int and value >= 1, name, "an integer >= 1", value)
        for name in ("request_timeout_s", "sync_timeout_s", "outage_timeout_s"):
            value = getattr(self, name)
            is_right = type(value) in (int, float) and 0 < value < float("inf")
            _check(is_right, name, "a number > 0", value)
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and (not isinstance(key, str) or not key or not key.isascii()):
                raise InvalidConfigError(f"fleet's {name} must be None or ASCII text")


def _check(is_right: object, name: str, what: str, value: object) -> None:
    if not is_right:
        raise InvalidConfigError(f"fleet's {name} must be {what}, got {value!r}")
