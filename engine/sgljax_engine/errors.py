"""The engine's exception tree.

Every error that the engine raises on purpose derives from `EngineError`. Errors caused by bad
input also derive from `ValueError` and say which field was wrong, its value and the limit.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class EngineError(Exception):
    """Base class of all errors that the engine raises on purpose.

    Only `Engine.check_integrity` raises this class itself, for a bug.
    """


class InvalidConfigError(EngineError, ValueError):
    """An engine or model option is unknown, out of range or inconsistent with another.

    Raised on the caller's thread when an engine, a rollout or a config is made, before it takes any
    resource; names the option, its value and the limit.
    """


class InvalidRequestError(EngineError, ValueError):
    """A request cannot be served as given; the engine keeps serving others.

    Raised by the call, on the caller's thread; names the field, its value and the limit.
    """


class UnsupportedModelError(EngineError, ValueError):
    """The model's architecture, or a setting of it, is not implemented.

    Raised when an engine or a rollout is made; names the setting and what is implemented.
    """


class WeightLoadError(EngineError, ValueError):
    """A checkpoint of weights is missing, truncated or inconsistent with the model.

    Raised when an engine is made, or by `Engine.update_weights` with a folder; then the old weights
    keep serving.
    """


class CheckpointError(EngineError, ValueError):
    """A checkpoint of the engine's state cannot be written or read.

    It is missing, truncated, tampered with, of a newer version or of another model, or the disk
    failed; the engine keeps serving.
    """


class WeightSyncError(EngineError, ValueError):
    """New weights do not cover or do not fit the model, or could not be made.

    The old weights keep serving; `WeightsLostError` is the one exception.
    """


class WeightsLostError(WeightSyncError):
    """An update with donate=True failed half-way: no weights serve until an update succeeds.

    All unfinished requests fail with `EngineStateError`, and new ones are refused.
    """


class WeightStoreError(EngineError, ValueError):
    """A weight store, or a version in it, cannot be written or read.

    A file is missing, truncated, damaged, of another version or store, or another writer took the
    store over. A reader keeps the last version that it read, and can read the next base.
    """


class EngineStateError(EngineError, RuntimeError):
    """The engine cannot do this now: it is paused, has requests running, or has no weights.

    The call changed nothing; the message says what to do first.
    """


class OffloadError(EngineError, RuntimeError):
    """Moving weights or KV pages between device and host failed; nothing has changed.

    After a failed `sleep` the engine is awake; after a failed `wake_up` it still sleeps and keeps
    all its state.
    """


class EngineShutdownError(EngineError, RuntimeError):
    """The engine was shut down before, or while, it handled the call.

    Every unfinished request fails with it, so that no caller waits forever.
    """


class EngineStepError(EngineError, RuntimeError):
    """A step failed, on the device or on the host; the engine keeps serving.

    The step's requests fail with this error. If the host failed before it chose them, the running
    requests fail. The original error is the `__cause__`.
    """


class NonFiniteLogitsError(EngineStepError):
    """A request's logits are NaN or infinite: its forward pass overflowed, or the device failed.

    Such logits have no distribution, so no token can be drawn and no log-prob given. Only the
    requests with such logits fail; the others of their step go on.
    """


class StructuredOutputError(EngineError, RuntimeError):
    """A request's grammar allows no token, or takes more work than llguidance does.

    Only that request fails; what it generated so far follows the grammar.
    """


class CompileForbiddenError(EngineError, RuntimeError):
    """`forbid_compile` is set and a step needed a program that warm-up did not build.

    The call refuses most requests that would need one; the message says what to warm up.
    """


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """A message that `name` is no known `kind`, with the nearest known name or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def forget_locals(error: BaseException) -> None:
    """Frees the locals of an error's frames, such as weights and commands; callers keep errors."""
    seen: list[BaseException] = []  # causes may go in a circle
    cause: BaseException | None = error
    while cause is not None and not any(cause is other for other in seen):
        seen.append(cause)
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
