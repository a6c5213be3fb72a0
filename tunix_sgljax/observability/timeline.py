"""A timeline of training steps for Perfetto: engine threads and trainer on one clock, in one file.

The engine records its own threads, the rollout its calls, hooks of Tunix's trainer the training,
and Tunix's tracer, if the cluster has it, everything else. All of them read `time.perf_counter`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tunix.perf.metrics import PerfMetricsConfig
from tunix.rl import rl_cluster as tunix_cluster
from tunix.sft.hooks import TrainingHooks

from sgljax_engine import Engine, HomeProcess, InvalidConfigError, Recording
from tunix_sgljax.in_flight.wrapping import require_sgljax_rollout
from tunix_sgljax.observability.observers import HostSpan, RolloutObservers
from tunix_sgljax.observability.perfetto_file import (
    Counter,
    Slice,
    Track,
    check_parent,
    write_trace,
)
from tunix_sgljax.rollout import SglJaxRollout

Target = Engine | SglJaxRollout | tunix_cluster.RLCluster
"""What can be recorded: a rollout adds its calls, a cluster also adds the training."""

MAX_EVENTS = 200_000
"""Default maximum of events in a timeline, of the engine and of the trainer each."""

_ENGINE_TRACKS = {"state": "generation", "engine": "engine", "updates": "weight updates"}
_HOST = "host-"  # Tunix's tracer names a thread's timeline by this and the thread's id


class Timeline:
    """Records from `start` to `stop`; `save` writes the last recording.

    Pass `perf_config` to `RLCluster(perf_config=...)` for Tunix's own spans. Do not use it with the
    agentic learners: Tunix 0.1.7's tracer fails episodes that are in flight when a step ends. Their
    rollout calls, training and weight syncs are recorded without it.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        """Records nothing yet; of more than `max_events` the older ones are dropped."""
        self._max_events = max_events
        self._home = HomeProcess("timeline")
        self._lock = threading.Lock()
        self._spans: deque[HostSpan] = deque(maxlen=max_events)
        self._tunix_timelines: Mapping[str, Any] = MappingProxyType({})
        self._engine: Engine | None = None
        self._observers: RolloutObservers | None = None
        self._hooked: dict[int, Any] = {}
        self._recording: Recording | None = None
        self._on_export: Callable[[], Any] | None = None

    @property
    def perf_config(self) -> PerfMetricsConfig:
        """Config that makes Tunix trace the trainer's side for this timeline."""
        return PerfMetricsConfig(custom_export_fn_v2=self._take_tunix)

    @property
    def is_recording(self) -> bool:
        """Whether it is between `start` and `stop`."""
        return self._observers is not None or self._engine is not None

    # ------------------------------------------------------------------ recording

    def start(self, target: Target) -> None:
        """Starts a recording, and drops the one before.

        Raises:
            InvalidConfigError: when this timeline is already recording, or for a cluster without a
                SglJaxRollout.
        """
        with self._lock:
            if self.is_recording:
                raise InvalidConfigError("this timeline records already; stop it first")
            self._spans.clear()
            self._recording = None
            if isinstance(target, tunix_cluster.RLCluster):
                self._hook(target)
                target = require_sgljax_rollout(target, "a timeline")
            if isinstance(target, Engine):
                self._begin_engine(target)
                return
            self._observers = observers = target.observers
            observers.on_span.append(self._add_span)
            observers.on_built.append(self._begin_engine)
            if observers.engine is not None:
                self._begin_engine(observers.engine)

    def stop(self) -> None:
        """Ends the recording. Idempotent; does nothing in a forked child."""
        if not self._home.is_here:
            return
        with self._lock:
            observers, self._observers = self._observers, None
            if observers is not None:
                observers.on_span.remove(self._add_span)
                observers.on_built.remove(self._begin_engine)
            engine, self._engine = self._engine, None
            if engine is not None:
                self._recording = engine.stop_recording()

    def save(self, path: str | Path) -> Path:
        """Writes the recording, for https://ui.perfetto.dev.

        Raises:
            InvalidConfigError: when nothing was recorded, or the path's folder is missing.
        """
        recording = self._recording
        if recording is None:
            raise InvalidConfigError("nothing to save: the timeline recorded no engine")
        tracks = [*self._trainer_tracks(recording), *engine_tracks(recording)]
        return write_trace(path, tracks, counters(recording))

    def record_steps(
        self,
        cluster: tunix_cluster.RLCluster,
        path: str | Path,
        *,
        first_step: int = 1,
        num_steps: int = 1,
    ) -> None:
        """Records whole steps of a training run, and saves them when they end.

        A step ends with its weight sync. The first steps compile, so they show little else.

        Args:
            cluster: A cluster before training, or between two steps.
            path: Path of the file.
            first_step: First step to record, as in `cluster.global_steps`.
            num_steps: Number of steps.

        Raises:
            InvalidConfigError: for steps that have ended, and as in `start` and `save`.
        """
        if num_steps < 1 or first_step < cluster.global_steps:
            raise InvalidConfigError(
                f"first_step must be >= {cluster.global_steps}, the step of now, and num_steps "
                f">= 1; got {first_step} and {num_steps}"
            )
        check_parent(path)
        observers = require_sgljax_rollout(cluster, "a timeline").observers
        config = cluster.perf_config
        if first_step == cluster.global_steps:
            self.start(cluster)

        def updated() -> None:
            """A step's weight sync is over; Tunix counts the step after this."""
            if cluster.global_steps == first_step - 1:
                self.start(cluster)
            elif cluster.global_steps == first_step + num_steps - 1:
                observers.on_updated.remove(updated)
                self.stop()
                if config is not None and config.custom_export_fn_v2 == self._take_tunix:
                    # Tunix commits its spans then.
                    self._on_export = functools.partial(self.save, path)
                else:
                    self.save(path)

        observers.on_updated.append(updated)

    # ------------------------------------------------------------------ where it comes from

    def _begin_engine(self, engine: Engine) -> None:
        engine.start_recording(self._max_events)
        self._engine = engine

    def _hook(self, cluster: tunix_cluster.RLCluster) -> None:
        trainers = {"train": cluster.actor_trainer}
        critic = getattr(cluster, "critic_trainer", None)  # the way Tunix checks it
        if critic is not None:
            trainers["train critic"] = critic
        for name, trainer in trainers.items():
            if id(trainer) not in self._hooked:
                self._hooked[id(trainer)] = trainer
                hooks = TrainSpans(name, self._add_span, trainer.training_hooks)
                trainer.with_training_hooks(hooks)

    def _add_span(self, span: HostSpan) -> None:
        if self.is_recording:
            self._spans.append(span)

    def _take_tunix(self, timelines: Mapping[str, Any]) -> dict[str, Any]:
        """Tunix calls it after each step, when its spans are complete. Adds no metrics."""
        self._tunix_timelines = timelines
        save, self._on_export = self._on_export, None
        if save is not None:
            save()
        return {}

    def _trainer_tracks(self, recording: Recording) -> list[Track]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        of_threads: dict[int, list[Slice]] = defaultdict(list)
        of_devices: dict[str, list[Slice]] = defaultdict(list)
        for span in list(self._spans):
            names.setdefault(span.thread_id, span.thread_name)
            of_threads[span.thread_id].append(Slice(span.name, span.begin_s, span.end_s, span.args))
        for name, slices in tunix_slices(self._tunix_timelines).items():
            if name.startswith(_HOST):
                of_threads[int(name.removeprefix(_HOST))].extend(slices)
            else:
                of_devices[f"trainer on {name}"].extend(slices)
        main = threading.main_thread().ident
        threads = sorted(of_threads.items(), key=lambda item: (item[0] != main, item[0]))
        tracks = [
            Track(f"trainer: {names.get(ident, ident)}", True, slices) for ident, slices in threads
        ]
        tracks += [Track(name, False, slices) for name, slices in sorted(of_devices.items())]
        return [_clipped(track, recording) for track in tracks]


@contextlib.contextmanager
def record_timeline(
    path: str | Path, target: Target, *, timeline: Timeline | None = None
) -> Iterator[Timeline]:
    """Records what happens inside the block and writes it to a file, also if the block fails.

    Args:
        path: Path of the file; open it in https://ui.perfetto.dev.
        target: An engine; a rollout, to add its calls; or a cluster, to add the training too.
        timeline: The timeline whose `perf_config` the cluster has, if any.

    Raises:
        InvalidConfigError: see `Timeline.start` and `Timeline.save`.
    """
    timeline = timeline or Timeline()
    timeline.start(target)
    try:
        yield timeline
    except BaseException:
        timeline.stop()
        with contextlib.suppress(InvalidConfigError):  # the block's own error goes first
            timeline.save(path)
        raise
    timeline.stop()
    timeline.save(path)


# ---------------------------------------------------------------------- the engine's side


def engine_tracks(recording: Recording) -> list[Track]:
    """A track for each of the engine's threads, and one for pauses and sleep."""
    slices: dict[str, list[Slice]] = defaultdict(list)
    for event in recording.events:
        slices[event.track].append(Slice(event.name, event.begin_s, event.end_s, event.args))
    names = [*_ENGINE_TRACKS, *sorted(set(slices) - set(_ENGINE_TRACKS))]
    return [
        _clipped(Track(_ENGINE_TRACKS.get(name, name), name != "state", slices[name]), recording)
        for name in names
        if name in slices
    ]


def counters(recording: Recording) -> list[Counter]:
    """The engine's sizes over time, and tokens a second between its dispatches."""
    samples = recording.samples
    rates = [
        (now.time_s, (now.num_output_tokens - last.num_output_tokens) / (now.time_s - last.time_s))
        for last, now in itertools.pairwise(samples)
        if now.time_s > last.time_s
    ]
    sizes = {
        "running requests": [(sample.time_s, sample.num_running) for sample in samples],
        "waiting requests": [(sample.time_s, sample.num_waiting) for sample in samples],
        "free KV tokens": [(sample.time_s, sample.free_kv_tokens) for sample in samples],
        "weight version": [(sample.time_s, sample.weight_version) for sample in samples],
        "output tokens/s": rates,
    }
    return [Counter(name, points) for name, points in sizes.items()]


def _clipped(track: Track, recording: Recording) -> Track:
    begin, end = recording.begin_s, recording.end_s
    return track._replace(
        slices=[
            each._replace(begin_s=max(each.begin_s, begin), end_s=min(each.end_s, end))
            for each in track.slices
            if each.end_s >= begin and each.begin_s <= end
        ]
    )


# ---------------------------------------------------------------------- the trainer's side


def tunix_slices(timelines: Mapping[str, Any]) -> dict[str, list[Slice]]:
    """The finished spans of Tunix's tracer (`tunix.perf.experimental`), by its timelines."""
    return {
        name: [
            Slice(span.name, span.begin, span.end, _args(span.tags))
            for step in timeline.committed_steps
            for span in step.values()
            if span.ended
        ]
        for name, timeline in timelines.items()
    }


def _args(tags: Mapping[str, Any]) -> dict[str, int | float | str]:
    return {
        str(name): value if isinstance(value, int | float | str) else str(value)
        for name, value in tags.items()
        if value is not None
    }


class TrainSpans(TrainingHooks):
    """Records a trainer's calls of `train`, which wait for their computations.

    It takes the place of the hooks that were there, and passes everything on to them.
    """

    def __init__(
        self, name: str, tell: Callable[[HostSpan], None], before: TrainingHooks | None
    ) -> None:
        self._name = name
        self._tell = tell
        self._before: Any = before
        self._began_s = 0.0

    def on_train_start(self, train_ctx: Any) -> None:
        """A call of `train` begins; in RL, once per step."""
        self._pass_on("on_train_start", train_ctx)
        self._began_s = time.perf_counter()

    def on_train_end(self, train_ctx: Any) -> None:
        self._pass_on("on_train_end", train_ctx)
        thread, args = threading.current_thread(), {"train_steps": train_ctx.train_steps}
        began_s, now_s = self._began_s, time.perf_counter()
        self._tell(HostSpan(threading.get_ident(), thread.name, self._name, began_s, now_s, args))

    def on_train_step_start(self, train_ctx: Any) -> None:
        self._pass_on("on_train_step_start", train_ctx)

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        self._pass_on("on_train_step_end", train_ctx, train_step, train_loss)

    def on_eval_step_start(self, train_ctx: Any) -> None:
        self._pass_on("on_eval_step_start", train_ctx)

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        self._pass_on("on_eval_step_end", train_ctx, eval_loss)

    def _pass_on(self, name: str, *args: Any) -> None:
        if self._before is not None:
            getattr(self._before, name)(*args)
