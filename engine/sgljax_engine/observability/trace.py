"""Records what an engine's threads do and when, on request. Host only.

It keeps two bounded rings, which drop the oldest entries first. It records nothing per token, and
reads only one attribute while recording is off. Times are readings of `time.perf_counter`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from sgljax_engine.errors import InvalidRequestError

MAX_EVENTS = 200_000
"""Default maximum of events, and of samples, in a recording: some 100 MB at most."""

ENGINE_TRACK = "engine"
DETOKENIZER_TRACK = "detokenizer"
UPDATES_TRACK = "updates"
STATE_TRACK = "state"
"""Track of pauses and sleep, which take no thread's time."""

Args = Mapping[str, int | float | str]


class RecordedEvent(NamedTuple):
    """An event with a duration, or an instant.

    Attributes:
        track: The thread that did it, or "state".
        name: Name of the event.
        begin_s, end_s: Start and end; equal for an instant.
        args: Further facts.
    """

    track: str
    name: str
    begin_s: float
    end_s: float
    args: Args


class RecordedSample(NamedTuple):
    """The engine's sizes after a dispatch.

    Attributes:
        time_s: Time of the sample.
        num_running, num_waiting: Numbers of requests.
        free_kv_tokens: Tokens that free pages and evictable cached pages hold.
        weight_version: Version of the serving weights.
        num_output_tokens: Tokens generated since the engine started.
    """

    time_s: float
    num_running: int
    num_waiting: int
    free_kv_tokens: int
    weight_version: int
    num_output_tokens: int


class Recording(NamedTuple):
    """A finished recording.

    Attributes:
        begin_s, end_s: Start and end of the recording.
        events: Events in the order in which they ended.
        samples: Samples, oldest first.
        num_dropped: Entries that newer ones displaced.
    """

    begin_s: float
    end_s: float
    events: list[RecordedEvent]
    samples: list[RecordedSample]
    num_dropped: int


class Recorder:
    """The rings. Any thread may call all methods; appending to a deque takes no lock.

    `slice`, `instant` and `sample` should be called only while it `is_on`.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._begin_s = 0.0
        self._events: deque[RecordedEvent] = deque(maxlen=0)
        self._samples: deque[RecordedSample] = deque(maxlen=0)
        self._count = itertools.count()
        self._open: dict[str, RecordedEvent] = {}

    def start(self, max_events: int = MAX_EVENTS) -> None:
        if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
            raise InvalidRequestError(f"max_events must be an int >= 1, got {max_events!r}")
        self._events, self._samples = deque(maxlen=max_events), deque(maxlen=max_events)
        self._count = itertools.count()
        self._begin_s = time.perf_counter()
        self.is_on = True

    def stop(self) -> Recording:
        """Ends the recording and returns it; it is empty if none was started.

        An unfinished pause or sleep ends with the recording.
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
        next(self._count)
        self._events.append(RecordedEvent(track, name, begin_s, end_s, args))

    def instant(self, track: str, name: str, args: Args) -> None:
        now = time.perf_counter()
        self.slice(track, name, now, now, args)

    def sample(self, sample: RecordedSample) -> None:
        next(self._count)
        self._samples.append(sample)

    def begin(self, name: str, args: Args) -> None:
        """Begins a state, even while recording is off. A state of that name that lasts goes on."""
        now = time.perf_counter()
        self._open.setdefault(name, RecordedEvent(STATE_TRACK, name, now, now, args))

    def end(self, name: str) -> None:
        started = self._open.pop(name, None)
        if started is not None and self.is_on:
            self.slice(STATE_TRACK, name, started.begin_s, time.perf_counter(), started.args)
