"""What control calls ask for and answer, as SGLang's structures of the same names. No JAX.

`Engine`'s methods make them from their arguments; a server may make them from a request's body.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from sgljax_engine.errors import InvalidRequestError

PauseMode = Literal["abort", "retract", "in_place", "wait"]
"""What becomes of requests that have started when generation pauses, or weights change.

- abort: they are answered at once with what they have, and so are those that have not started.
- retract: they give up their KV pages and wait, with their output so far, to be prefilled again.
- in_place: they keep their KV pages and go on from there.
- wait: they are let finish first; none begins meanwhile.
"""

_MODES = get_args(PauseMode)

SleepTag = Literal["weights", "kv_cache"]
"""What an engine takes on its devices, by the names that vLLM and SGLang use."""

SLEEP_TAGS: tuple[SleepTag, ...] = get_args(SleepTag)
SLEEP_LEVELS = (1, 2)


def check_mode(mode: Any) -> None:
    """Raises InvalidRequestError for anything but a `PauseMode`."""
    if mode not in _MODES:
        raise InvalidRequestError(f"mode must be one of {_MODES}, got {mode!r}")


def check_level(level: Any) -> None:
    """Raises InvalidRequestError for anything but a level of sleep."""
    if isinstance(level, bool) or not isinstance(level, int) or level not in SLEEP_LEVELS:
        raise InvalidRequestError(f"level must be one of {SLEEP_LEVELS}, got {level!r}")


def check_tags(tags: Any) -> tuple[SleepTag, ...]:
    """The tags, each once and in the order of `SLEEP_TAGS`; all of them for None.

    Raises:
        InvalidRequestError: for an unknown one, and for none at all.
    """
    if tags is None:
        return SLEEP_TAGS
    given: list[Any] = list(tags) if isinstance(tags, (list, tuple, set, frozenset)) else []
    if not given or any(tag not in SLEEP_TAGS for tag in given):
        raise InvalidRequestError(f"tags must be None or a list of {SLEEP_TAGS}, got {tags!r}")
    return tuple(tag for tag in SLEEP_TAGS if tag in given)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AbortReq:
    """End requests with finish reason `abort` and what they have.

    Attributes:
        rid: Of the request, or the one given for a prompt with several samples.
        abort_all: All requests instead.
        finished_reason: What they report, {"type": "abort", "message": ...}.
        aborted_message: Only its message.
    """

    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    aborted_message: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for fields that contradict one another."""
        if (self.rid is None) != bool(self.abort_all):
            raise InvalidRequestError(
                f"give rid or abort_all=True, got rid={self.rid!r}, abort_all={self.abort_all!r}"
            )
        if self.rid is not None and not isinstance(self.rid, str):
            raise InvalidRequestError(f"rid must be a string, got {self.rid!r}")
        reason = self.finished_reason
        if reason is None:
            return
        if self.aborted_message is not None:
            raise InvalidRequestError("give finished_reason or aborted_message, not both")
        is_known = isinstance(reason, dict) and set(reason) <= {"type", "message"}
        if not is_known or reason.get("type") != "abort":
            raise InvalidRequestError(
                'finished_reason must be {"type": "abort", "message": ...}, got ' + repr(reason)
            )

    @property
    def message(self) -> str:
        """What aborted requests report."""
        if self.finished_reason is not None:
            return str(self.finished_reason.get("message", ""))
        return "aborted by the caller" if self.aborted_message is None else self.aborted_message


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PauseGenerationReqInput:
    """Stop generating until told to continue.

    Attributes:
        mode: See `PauseMode`. The default is SGLang's; that of `Engine.pause_generation` differs.
    """

    mode: PauseMode = "abort"

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for an unknown mode."""
        check_mode(self.mode)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContinueGenerationReqInput:
    """Go on generating."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheReqInput:
    """Empty the prefix cache and forget what scheduling has learnt."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheReqOutput:
    """What became of a flush.

    Attributes:
        success: False if it was refused; then nothing has changed.
        flushed_items: KV tokens that were cached.
        error_msg: Why it was refused.
    """

    success: bool
    flushed_items: int = 0
    error_msg: str = ""
