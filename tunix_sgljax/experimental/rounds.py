"""Tracks the weight-sync round of a sampler, and its phase."""

from __future__ import annotations

from typing import Any

from tunix_sgljax.experimental.layout import StaleRoundError, WorkerRoundTracker

_OVER = ("committed", "aborted")
_OPENING = ("prepared", "aborted")


class SyncRounds:
    """Tunix's `WorkerRoundTracker`, for calls with and without a round's key.

    A coordinator's calls carry a key, `req_id` and `uuid` in `extra_config`: a round's phases are
    idempotent, and calls of an older round are refused. Calls without a key, from a program that
    drives a sampler itself, form consecutive rounds: each `pre_weight_sync` opens one, unless the
    previous round is unfinished.

    Only the thread of the sampler's event loop may use it.
    """

    def __init__(self) -> None:
        self._keyed: Any = WorkerRoundTracker()
        self._unkeyed: Any = WorkerRoundTracker()
        self._current: Any = self._keyed

    def admit(self, request: Any, phase: str) -> bool:
        """Whether a phase ("prepared", "h2d_done", "committed", "aborted") must run.

        False if this round has passed it already. StaleRoundError for a call of an older,
        superseded or aborted round, or one that cannot open a round.
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
            # Tunix's tracker refuses only a late commit, and treats other late phases as done.
            raise StaleRoundError(f"phase {phase!r} is of a round that was aborted")
        if is_admitted:
            self._current = tracker
        return is_admitted

    def check(self, request: Any) -> None:
        """Raises StaleRoundError for a call of a round older than the newest; changes nothing."""
        if not _has_key(request):
            return
        newest, extra = self._keyed.report(), request.extra_config
        if newest["req_id"] is not None and int(extra.get("uuid", 0)) < newest["uuid"]:
            raise StaleRoundError(
                f"round (req_id={extra['req_id']!r}, uuid={extra.get('uuid', 0)}) is older than "
                f"round (req_id={newest['req_id']!r}, uuid={newest['uuid']})"
            )

    def complete(self, request: Any, phase: str) -> None:
        (self._keyed if _has_key(request) else self._unkeyed).complete(request, phase)

    def report(self) -> dict[str, Any]:
        return self._current.report()


def _has_key(request: Any) -> bool:
    extra = getattr(request, "extra_config", None) or {}
    return extra.get("req_id") is not None
