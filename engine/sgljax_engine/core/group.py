"""A group of engines behind one face: routes requests, and has all engines do what concerns all.

Each engine has a thread, a scheduler, pages and a prefix cache of its own. The thread of a
`HandOut` gives commands to all of them. A group of one engine passes everything on as it comes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from sgljax_engine.checkpoint.structures import EngineCheckpoint
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.adapter_loading import AdapterLoader
from sgljax_engine.core.background import Worker
from sgljax_engine.core.checkpoint_writer import CheckpointWriter, SaveJob, make_restoration
from sgljax_engine.core.commands import SHUT_DOWN
from sgljax_engine.core.engine_core import EngineCore, refuse_ids
from sgljax_engine.core.engines import Split
from sgljax_engine.core.fan_out import COMBINED, Gathered, split_score
from sgljax_engine.core.hand_out import HandOut
from sgljax_engine.core.handlers import Attend
from sgljax_engine.core.loop import EngineLoop
from sgljax_engine.core.meeting import Meeting
from sgljax_engine.core.request_groups import RequestGroups
from sgljax_engine.core.router import Router
from sgljax_engine.core.staging import Stager, WeightJob, do_weight_job
from sgljax_engine.core.steps import STEPS, takes_meeting
from sgljax_engine.core.weight_updates import WeightUpdater
from sgljax_engine.errors import EngineShutdownError, EngineStateError
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.observability.combined import combine_progress, combine_recordings
from sgljax_engine.observability.progress import EngineProgress
from sgljax_engine.observability.trace import MAX_EVENTS, Recording
from sgljax_engine.processing.futures import Answer, done_queue
from sgljax_engine.processing.input_processor import RequestFactory
from sgljax_engine.types import Request
from sgljax_engine.weights.adapters import AdapterSlots
from sgljax_engine.weights.served import ServedSource
from sgljax_engine.weights.sync import WeightMaker

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Asked = cmd.Command | WeightJob | SaveJob
"""What `EngineGroup.submit` takes; its future gets the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltGroup:
    """Engines without threads, and what their threads need.

    Attributes:
        cores: Fresh, one for each submesh.
        groups: The calls that all of them share.
        router: Chooses among them.
        weight_maker: Makes the weights of updates, for all engines at once.
        split: Gives each engine its part of these.
        served: What the first weights were made of.
        slots: Room for adapters in each engine; None without.
    """

    cores: Sequence[EngineCore]
    groups: RequestGroups
    router: Router
    weight_maker: WeightMaker
    split: Split
    served: ServedSource
    slots: Sequence[AdapterSlots] | None


class EngineGroup:
    """Takes commands and jobs from any thread.

    Attributes:
        loops: The engines' threads.
    """

    def __init__(self, built: BuiltGroup, name: str) -> None:
        """Starts the threads.

        Args:
            built: Fresh; its cores are the threads' alone from now on.
            name: Of the threads.
        """
        # Held while a command goes to all engines, so that all of them take commands in one order.
        self._lock = built.groups.lock
        self._groups = built.groups
        self._router = built.router
        built.groups.on_finished = self._finished
        self.split = built.split
        count = len(built.cores)
        names = [name] if count == 1 else [f"{name}-{place}" for place in range(count)]
        self.loops = [
            EngineLoop(
                core,
                name=each,
                lock=self._lock,
                share=self._share if count > 1 else None,
                on_answered=self._answered,
                on_failed=self._failed,
                on_closed=self._closed,
            )
            for core, each in zip(built.cores, names, strict=True)
        ]
        self._num_open = count
        recorder = built.cores[0].recorder
        updater = WeightUpdater(built.weight_maker, built.served, self, recorder)
        loader = AdapterLoader(built.slots, built.weight_maker.targets, self)
        self._stager = Stager(built.weight_maker, built.served, self)
        self._updates = Worker(
            functools.partial(do_weight_job, updater, loader, self._stager), f"{name}-updates"
        )
        writer = CheckpointWriter(built.cores[0].runner.model_config, self)
        self._saves = Worker(writer.save, f"{name}-checkpoints")
        # A daemon thread must not touch the device while the interpreter is torn down.
        atexit.register(self.stop)
        for loop in self.loops:
            loop.start()
        self._is_stopping = False
        self._hand_out: HandOut | None = None
        if count > 1:
            stop = functools.partial(self._stop_engines, SHUT_DOWN)
            self._hand_out = HandOut(self._distribute, stop, f"{name}-commands")

    # ------------------------------------------------------------------ facts

    @property
    def weight_version(self) -> int:
        """Of the weights that serve."""
        return self.loops[0].weight_version

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep."""
        return self.loops[0].is_sleeping

    @property
    def is_running(self) -> bool:
        """Whether `submit` takes anything."""
        return not self._is_stopping and all(loop.is_running for loop in self.loops)

    @property
    def progress(self) -> EngineProgress:
        """Reads what the engine threads write, without waiting for them."""
        return combine_progress([loop.progress for loop in self.loops])

    def start_recording(self, max_events: int = MAX_EVENTS) -> None:
        """Starts recording on all engines."""
        for loop in self.loops:
            loop.recorder.start(max_events)

    def stop_recording(self) -> Recording:
        """Stops recording; the events of all engines."""
        return combine_recordings([loop.recorder.stop() for loop in self.loops])

    # ------------------------------------------------------------------ commands

    def submit(self, command: Asked) -> None:
        """Queues a command for the engines, or a job for one of the workers.

        Jobs that concern weights are done in their order, and so are checkpoints.

        Raises:
            EngineShutdownError: when nobody would answer it.
        """
        with self._lock:
            self.check_open()
            if isinstance(command, SaveJob):
                self._saves.put(command)
            elif not isinstance(command, cmd.Command):
                self._updates.put(command)
            elif self._hand_out is None:
                self.loops[0].submit(command)
            else:
                self._hand_out.put(command)

    def check_open(self) -> None:
        """Raises EngineShutdownError once an engine is shut down."""
        for loop in self.loops:
            loop.check_open()
        if self._is_stopping:
            raise EngineShutdownError(SHUT_DOWN)

    def check_may_wait(self, asked: Asked) -> None:
        """Refuses a caller on the thread that would have to answer it.

        Callbacks of restored futures, listeners of progress, hooks of rules and tokenizers are user
        code on these threads.

        Raises:
            EngineStateError: on an engine's thread, and for a job on the worker that does it.
        """
        current = threading.current_thread()
        answering = {thread for loop in self.loops for thread in loop.threads}
        if self._hand_out is not None:
            answering.add(self._hand_out.thread)
        if not isinstance(asked, cmd.Command):
            worker = self._saves if isinstance(asked, SaveJob) else self._updates
            answering.add(worker.thread)
        if current in answering:
            raise EngineStateError(
                f"the engine was called on its own thread {current.name!r}, by a callback of a "
                "future, a listener or a hook: it would wait for itself. Call it on another thread"
            )

    def ask(self, make: Callable[[Future[_T]], Asked], place: int | None = None) -> _T:
        """Has all engines, one of them, or a worker do something, and waits for the answer.

        Args:
            make: Makes the command or the job with the future that gets the answer.
            place: The engine that does the command; None for all of them, or for a job.
        """
        future: Future[_T] = Future()
        done = done_queue([future])
        asked = make(future)
        self.check_may_wait(asked)
        if place is None:
            self.submit(asked)
        else:
            assert isinstance(asked, cmd.Command)
            self.loops[place].submit(asked)
        del asked
        done.get()
        try:
            return future.result()
        finally:
            del future, make

    def swap(self, make: Callable[[Future[int]], cmd.Question], mode: PauseMode, name: str) -> int:
        """Has all engines swap weights or an adapter; returns the new version.

        With mode "wait" started requests finish first, and no others start. Whatever fails, engines
        that still stand are let go.
        """
        if mode != "wait":
            return self.ask(make)
        try:
            self.ask(functools.partial(cmd.Drain, name))
            return self.ask(make)
        except BaseException:
            with contextlib.suppress(EngineShutdownError):
                self.ask(cmd.EndDrain)
            raise

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Marks that a job about weights reads its source; see `Worker.reading`."""
        return self._updates.reading()

    def restore(
        self, checkpoint: EngineCheckpoint, requests: RequestFactory, answers: Mapping[str, Answer]
    ) -> None:
        """Has the engines take in the requests of a checkpoint; all, or none.

        Raises:
            CheckpointError: when an id is in use.
            EngineStateError: when requests are refused.
        """
        restoration = make_restoration(checkpoint, requests, answers)
        try:
            self.ask(functools.partial(cmd.Restore, restoration, len(self.loops)))
        except BaseException:
            unfinished = restoration.unfinished
            with contextlib.suppress(EngineShutdownError):  # an interrupted caller has no futures
                self.submit(cmd.AbandonRequests(unfinished, Future()))
            raise

    def _distribute(self, command: cmd.Command) -> None:
        """Gives a command to all engines that it concerns; on the thread of the `HandOut`."""
        with self._lock:
            try:
                for loop in self.loops:  # all or none, since they are stopped under the lock
                    loop.check_open()
            except EngineShutdownError as error:
                reason = str(error)
                command.refuse(lambda: EngineShutdownError(reason))
                return
            try:
                self._give(command)
            except BaseException as error:  # a bug: never leave a caller waiting
                logger.exception("handing out a command failed")
                reason = f"handing out a command failed: {error!r}"
                self._stop_engines(reason)
                command.refuse(lambda: EngineShutdownError(reason))

    def _give(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.AddRequests):
            self._add(command)
        elif isinstance(command, cmd.AbandonRequests):
            self._abandon(command)
        elif isinstance(command, cmd.Score):
            self._gather(command, split_score(command, len(self.loops)))
        elif takes_meeting(command):
            assert isinstance(command, cmd.Question)
            if isinstance(command, cmd.Restore):
                self._route(command.restoration.unfinished)
            meeting = Meeting(command, STEPS[type(command)], len(self.loops))
            for place, loop in enumerate(self.loops):
                loop.submit(Attend(meeting, place))
        else:
            assert isinstance(command, cmd.Question), type(command)
            self._gather(command, [command] * len(self.loops))

    def _gather(self, command: cmd.Question, parts: Sequence[cmd.Question]) -> None:
        """Has each engine do its part; the caller gets all answers as one, or the first error."""
        gathered = Gathered(command.future, COMBINED[type(command)], len(parts))
        for place, (loop, part) in enumerate(zip(self.loops, parts, strict=True)):
            loop.submit(part.for_future(gathered.future(place)))

    def _add(self, command: cmd.AddRequests) -> None:
        taken = self._groups.add([command.requests])
        if taken:
            refuse_ids(command.answers, taken)
            return
        self._route(command.requests)
        parts = [cmd.AddRequests([], [], are_known=True) for _ in self.loops]
        for request, answer in zip(command.requests, command.answers, strict=True):
            parts[request.engine].requests.append(request)
            parts[request.engine].answers.append(answer)
        for loop, part in zip(self.loops, parts, strict=True):
            if part.requests:
                loop.submit(part)

    def _abandon(self, command: cmd.AbandonRequests) -> None:
        parts: list[list[Request]] = [[] for _ in self.loops]
        for request in command.requests:
            parts[request.engine].append(request)
        self._gather(command, [dataclasses.replace(command, requests=part) for part in parts])
        self._groups.answered(command.requests)

    def _route(self, requests: Sequence[Request]) -> None:
        """Gives each request an engine."""
        for request, engine in zip(requests, self._router.route(requests), strict=True):
            request.engine = engine

    def _finished(self, request: Request) -> None:
        """A request is over, or will not come; on the thread of its engine."""
        if len(self.loops) > 1:
            with self._lock:
                self._router.finished(request.engine, request)

    def _answered(self, request: Request) -> None:
        """A request was answered while it runs, and its engine has been told to end it.

        The caller may use its id again once the answer is out. A group of several looks at ids
        before it tells an engine of a request. A single engine does so afterwards, in order.
        """
        if self._hand_out is not None:
            self._groups.answered([request])

    def _share(self, loop: EngineLoop) -> None:
        """Hands requests that found no room over to an engine with free rows; on that thread.

        They move only while the engine has no commands left. So a command that went to all engines
        has found them in this one, or will find them in the other.
        """
        with self._lock:
            waiting = [each.num_waiting for each in self.loops]
            source = self.loops.index(loop)
            waiting[source] = loop.num_movable
            move = self._router.pick_move(waiting)
            if move is None or move.source != source:
                return
            requests, answers = loop.hand_over(move.num_requests)
            for request in requests:
                self._router.moved(request, source, move.target)
                request.engine = move.target
            self.loops[move.target].submit(cmd.TakeOver(requests, answers))

    # ------------------------------------------------------------------ the end

    def request_stop(self) -> None:
        """Lets the threads fail what is unfinished and end, without waiting. Idempotent.

        May be interrupted, and called by a finalizer in the middle of a hand-out.
        """
        if self._hand_out is None:
            self.loops[0].request_stop()
            return
        self._hand_out.stop()
        self._is_stopping = True

    def _failed(self, reason: str) -> None:
        """An engine ends by a bug; on its thread. The others end too."""
        self._stop_engines(reason)
        if self._hand_out is not None:
            self._hand_out.stop()

    def _stop_engines(self, reason: str) -> None:
        with self._lock:
            for loop in self.loops:
                loop.request_stop(reason)

    def stop(self) -> None:
        """`request_stop`, then waits for the threads to end."""
        self.request_stop()
        # A finalizer may call this on any thread; on these it would wait for itself.
        own = {self._updates.thread, self._saves.thread}
        own.update(thread for loop in self.loops for thread in loop.threads if thread is not None)
        if self._hand_out is not None:
            own.add(self._hand_out.thread)
        if threading.current_thread() not in own:
            for loop in self.loops:
                loop.join()

    def _closed(self) -> None:
        """An engine answers nobody any more; on its thread. The last one ends the workers."""
        with self._lock:
            self._num_open -= 1
            is_last = not self._num_open
        if is_last:
            self._updates.stop()
            self._stager.release()
            self._saves.stop()
            atexit.unregister(self.stop)
