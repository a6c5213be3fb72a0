"""The rounds of a worker, as Tunix's contract has them."""

from __future__ import annotations

from typing import Any

_ORDER = {"idle": 0, "prepared": 1, "h2d_done": 2, "committed": 3, "aborted": 3}


class StaleRoundError(RuntimeError):
    """A phase is of a round that this worker is not in."""


class WorkerRoundTracker:
    """Makes the phases of a round idempotent, by its key (req_id, uuid).

    A newer round is opened by "prepared" or "aborted" alone, an older one is refused, and a round
    that was aborted cannot be committed.
    """

    def __init__(self) -> None:
        """Starts without a round."""
        self._req_id: str | None = None
        self._uuid, self._phase, self._version = -1, "idle", -1

    def admit(self, sync_request: Any, phase: str) -> bool:
        """Whether the phase must run."""
        req_id, uuid = _key_of(sync_request)
        if self._req_id is not None and (
            uuid < self._uuid or (uuid == self._uuid and req_id != self._req_id)
        ):
            raise StaleRoundError(f"{phase} is of round {uuid}; this worker is in {self._uuid}")
        if self._req_id is None or uuid > self._uuid:
            if phase not in ("prepared", "aborted"):
                raise StaleRoundError(f"{phase} cannot open a round: round {uuid} is unknown")
            self._req_id, self._uuid, self._phase = req_id, uuid, "idle"
            self._version = sync_request.policy_version if sync_request is not None else -1
        if (phase, self._phase) == ("committed", "aborted"):
            raise StaleRoundError(f"commit refused: round {uuid} was aborted")
        return _ORDER[phase] > _ORDER[self._phase]

    def complete(self, sync_request: Any, phase: str) -> None:
        """Records that the phase ran."""
        if _key_of(sync_request) != (self._req_id, self._uuid):
            raise StaleRoundError(f"{phase} ended in another round than this worker's")
        self._phase = phase

    def report(self) -> dict[str, Any]:
        """The round and its phase."""
        return {
            "req_id": self._req_id,
            "uuid": self._uuid,
            "phase": self._phase,
            "policy_version": self._version,
        }


def _key_of(sync_request: Any) -> tuple[str, int]:
    extra = getattr(sync_request, "extra_config", None) or {}
    return extra.get("req_id", ""), int(extra.get("uuid", 0))
