"""Inputs and outputs of control calls, after SGLang's structures of the same names. No JAX.

`Engine`'s methods build them from their arguments; a server may build them from a request body.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from sgljax_engine.errors import InvalidRequestError

PauseMode = Literal["abort", "retract", "in_place", "wait"]
"""What happens to started requests when generation pauses or weights change.

- abort: all requests end at once with their output so far, waiting ones included.
- retract: they free their KV pages, keep their output so far and wait to be prefilled again.
- in_place: they keep their KV pages and continue from there.
- wait: they finish first; no other request starts until then.
"""

_MODES = get_args(PauseMode)

MAX_VERSIONS = 2**31
"""Versions of weights fit an int32, as trainers keep those of tokens."""

SleepTag = Literal["weights", "kv_cache"]
"""The parts of an engine's device memory, named as in vLLM and SGLang."""

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
        InvalidRequestError: for an unknown tag, or an empty list.
    """
    if tags is None:
        return SLEEP_TAGS
    given: list[Any] = list(tags) if isinstance(tags, (list, tuple, set, frozenset)) else []
    if not given or any(tag not in SLEEP_TAGS for tag in given):
        raise InvalidRequestError(f"tags must be None or a list of {SLEEP_TAGS}, got {tags!r}")
    return tuple(tag for tag in SLEEP_TAGS if tag in given)


def check_flags(**flags: Any) -> None:
    """Raises InvalidRequestError for a flag that is no bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be True or False, got {value!r}")


def flushes(mode: PauseMode, flush_cache: Any) -> bool:
    """Whether an update forbids reuse of old keys and values; None leaves it to the mode."""
    if flush_cache is not None and not isinstance(flush_cache, bool):
        raise InvalidRequestError(f"flush_cache must be True, False or None: {flush_cache!r}")
    return mode != "in_place" if flush_cache is None else flush_cache


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewVersion:
    """The version that new weights, or a new adapter, will have.

    Attributes:
        number: Their version; None is the next one after the serving version.
        is_reload: They are the serving version's again, so its own number is allowed too.
    """

    number: int | None = None
    is_reload: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for a number that can be no version."""
        check_flags(reload=self.is_reload)
        number = self.number
        is_int = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_int and 1 <= number < MAX_VERSIONS):
            raise InvalidRequestError(
                f"version must be None or an integer in [1, {MAX_VERSIONS}), got {number!r}"
            )
        if self.is_reload and number is None:
            raise InvalidRequestError("reload=True needs version, the one that is loaded again")

    def after(self, serving: int) -> int:
        """The version after a serving one; InvalidRequestError when it would not be newer."""
        if self.number is None:
            return serving + 1
        if self.number > serving or (self.is_reload and self.number == serving):
            return self.number
        least = "at least" if self.is_reload else "above"
        raise InvalidRequestError(
            f"version must be {least} the serving version {serving}, got {self.number}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AbortReq:
    """End requests with finish reason `abort` and their output so far.

    Attributes:
        rid: Id of the request, or the id given for a prompt with several samples.
        abort_all: End all requests instead.
        finished_reason: Finish reason of the ended requests, {"type": "abort", "message": ...}.
        aborted_message: Only the message of that reason.
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
        """The message that aborted requests report."""
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
    """Continue generation."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheReqInput:
    """Empty the prefix cache and reset what the scheduler has learnt."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheReqOutput:
    """Result of a flush.

    Attributes:
        success: False if the flush was refused; nothing has changed then.
        flushed_items: KV tokens that were cached.
        error_msg: Why it was refused.
    """

    success: bool
    flushed_items: int = 0
    error_msg: str = ""
