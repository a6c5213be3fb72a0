"""Which phase of which weight-sync round a sampler is in."""

from __future__ import annotations

from typing import Any

from tunix.experimental.orchestrator.weight_sync_coordinator import (  # pyright: ignore[reportMissingImports]
    StaleRoundError,
    WorkerRoundTracker,
)

_OVER = ("committed", "aborted")
_OPENING = ("prepared", "aborted")


class SyncRounds:
    """Tunix's `WorkerRoundTracker`, for calls with and without a round's key.

    A coordinator's calls carry a key, `req_id` and `uuid` in `extra_config`: a round's phases are
    idempotent, and calls of an older round are refused. Calls without one, of a program that drives
    a sampler itself, are rounds one after another: each `pre_weight_sync` opens one, unless the one
    before is not over yet.

    The thread of the sampler's event loop alone.
    """

    def __init__(self) -> None:
        """No round yet."""
        self._keyed: Any = WorkerRoundTracker()
        self._unkeyed: Any = WorkerRoundTracker()
        self._current: Any = self._keyed

    def admit(self, request: Any, phase: str) -> bool:
        """Whether a phase is to be done; False if this round is that far already.

        Args:
            request: Of the call; None has no key.
            phase: "prepared", "h2d_done", "committed" or "aborted".

        Raises:
            StaleRoundError: for a call of an older round, of one that was superseded or aborted, or
                that cannot open a round.
        """
        if _has_key(request):
            tracker = self._keyed
        else:
            if phase == "prepared" and self._unkeyed.report()["phase"] in _OVER:
                self._unkeyed = WorkerRoundTracker()
            tracker = self._unkeyed
        is_open = self._current.report()["phase"] not in ("idle", *_OVER)
        if tracker is not self._current and is_open and phase not in _OPENING:
            raise StaleRoundError(f"phase {phase!r} is of a round that another one superseded")
        is_admitted = tracker.admit(request, phase)
        if not is_admitted and phase != "aborted" and tracker.report()["phase"] == "aborted":
            # Tunix's tracker says so of a commit alone, and takes other late phases for done.
            raise StaleRoundError(f"phase {phase!r} is of a round that was aborted")
        if is_admitted:
            self._current = tracker
        return is_admitted

    def check(self, request: Any) -> None:
        """Raises StaleRoundError for a call of a round before the newest one; changes nothing."""
        if not _has_key(request):
            return
        newest, extra = self._keyed.report(), request.extra_config
        if newest["req_id"] is not None and int(extra.get("uuid", 0)) < newest["uuid"]:
            raise StaleRoundError(
                f"round (req_id={extra['req_id']!r}, uuid={extra.get('uuid', 0)}) is older than "
                f"round (req_id={newest['req_id']!r}, uuid={newest['uuid']})"
            )

    def complete(self, request: Any, phase: str) -> None:
        """A phase that was admitted is done."""
        (self._keyed if _has_key(request) else self._unkeyed).complete(request, phase)

    def report(self) -> dict[str, Any]:
        """`req_id`, `uuid`, `phase` and `policy_version` of the current round."""
        return self._current.report()


def _has_key(request: Any) -> bool:
    extra = getattr(request, "extra_config", None) or {}
    return extra.get("req_id") is not None
