"""Notes what an engine's threads do and when, if asked to. Host only.

Two bounded rings, which forget the oldest entries first. Nothing is noted for a token, and nothing
but one attribute is read while recording is off. Times are readings of `time.perf_counter`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from sgljax_engine.errors import InvalidRequestError

MAX_EVENTS = 200_000
"""Events, and samples, that a recording holds unless told: some 100 MB at most."""

ENGINE_TRACK = "engine"
DETOKENIZER_TRACK = "detokenizer"
UPDATES_TRACK = "updates"
STATE_TRACK = "state"
"""Of pauses and sleep, which no thread spends time on."""

Args = Mapping[str, int | float | str]


class RecordedEvent(NamedTuple):
    """Something that took time, or an instant.

    Attributes:
        track: The thread that did it, or "state".
        name: What.
        begin_s, end_s: When; equal for an instant.
        args: More about it.
    """

    track: str
    name: str
    begin_s: float
    end_s: float
    args: Args


class RecordedSample(NamedTuple):
    """The engine's sizes after a dispatch.

    Attributes:
        time_s: When.
        num_running, num_waiting: Requests.
        free_kv_tokens: Tokens that free pages hold, and cached ones that may be evicted.
        weight_version: Of the weights that serve.
        num_output_tokens: Tokens generated since the engine started.
    """

    time_s: float
    num_running: int
    num_waiting: int
    free_kv_tokens: int
    weight_version: int
    num_output_tokens: int


class Recording(NamedTuple):
    """What was recorded.

    Attributes:
        begin_s, end_s: From when to when.
        events: In the order in which they ended.
        samples: Oldest first.
        num_dropped: Entries that were forgotten, since newer ones needed their place.
    """

    begin_s: float
    end_s: float
    events: list[RecordedEvent]
    samples: list[RecordedSample]
    num_dropped: int


class Recorder:
    """The rings. All methods may be called from any thread; appending to a deque takes no lock.

    Attributes:
        is_on: Whether `slice`, `instant` and `sample` should be called.
    """

    def __init__(self) -> None:
        """Off."""
        self.is_on = False
        self._begin_s = 0.0
        self._events: deque[RecordedEvent] = deque(maxlen=0)
        self._samples: deque[RecordedSample] = deque(maxlen=0)
        self._count = itertools.count()
        self._open: dict[str, RecordedEvent] = {}

    def start(self, max_events: int = MAX_EVENTS) -> None:
        """Begins a recording; one that is under way is forgotten.

        Raises:
            InvalidRequestError: unless `max_events` is a positive int.
        """
        if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
            raise InvalidRequestError(f"max_events must be an int >= 1, got {max_events!r}")
        self._events, self._samples = deque(maxlen=max_events), deque(maxlen=max_events)
        self._count = itertools.count()
        self._begin_s = time.perf_counter()
        self.is_on = True

    def stop(self) -> Recording:
        """Ends the recording and hands it over; an empty one if there was none.

        A pause or a sleep that is not over is cut off at the end.
        """
        was_on, self.is_on = self.is_on, False
        now = time.perf_counter()
        events, self._events = self._events, deque(maxlen=0)
        samples, self._samples = self._samples, deque(maxlen=0)
        if not was_on:
            return Recording(now, now, [], [], 0)
        num_dropped = next(self._count) - len(events) - len(samples)
        unfinished = [each._replace(end_s=now) for each in dict(self._open).values()]
        return Recording(
            self._begin_s, now, [*events, *unfinished], list(samples), max(num_dropped, 0)
        )

    def slice(self, track: str, name: str, begin_s: float, end_s: float, args: Args) -> None:
        """Notes what took time."""
        next(self._count)
        self._events.append(RecordedEvent(track, name, begin_s, end_s, args))

    def instant(self, track: str, name: str, args: Args) -> None:
        """Notes what happens now."""
        now = time.perf_counter()
        self.slice(track, name, now, now, args)

    def sample(self, sample: RecordedSample) -> None:
        """Notes the engine's sizes."""
        next(self._count)
        self._samples.append(sample)

    def begin(self, name: str, args: Args) -> None:
        """A state begins, whether or not a recording is on; one of the name that lasts goes on."""
        now = time.perf_counter()
        self._open.setdefault(name, RecordedEvent(STATE_TRACK, name, now, now, args))

    def end(self, name: str) -> None:
        """A state is over; does nothing if it had not started."""
        started = self._open.pop(name, None)
        if started is not None and self.is_on:
            self.slice(STATE_TRACK, name, started.begin_s, time.perf_counter(), started.args)
