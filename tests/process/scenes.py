"""What a process with an engine does, and how it ends; for a child of `zygote.py`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import pytest

from sgljax_engine.engine import Engine
from sgljax_engine.errors import EngineShutdownError
from sgljax_engine.models.weight_rules import logical_rules
from sgljax_engine.processing import home
from tests import inside
from tests.engine.models import TINY, logical_weights, spread_weights
from tests.geometry import SMALL
from tests.process import rewards
from tests.process.ends import ENDS
from tests.threads import wait_for

PROMPT = [3, 1, 4, 1, 5]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
RULES = logical_rules(TINY)


def tell(*words: object) -> None:
    """A line of the case's output, in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Scene:
    """An engine in some situation, and threads that wait for it.

    Attributes:
        engine: The engine.
        undo: Ends the situation, so that all calls can be answered.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.undo: Callable[[], Any] = lambda: None
        self._expected = self.sample()
        self._has_sampled = threading.Event()
        self._is_over = False
        self._calls: list[Future[None]] = []
        # An executor's threads are waited for when the interpreter ends.
        self.pool = ThreadPoolExecutor(8)

    def sample(self) -> list[int]:
        return self.engine.generate(None, GREEDY, PROMPT)["output_ids"]

    def keep_sampling(self) -> None:
        """Has two threads sample again and again, and returns when they do."""
        for _ in range(2):
            self.call("generate", self._sample_on)
        assert self._has_sampled.wait()

    def call(self, name: str, act: Callable[[], Any]) -> Future[None]:
        """Calls on an executor's thread; an error is told."""

        def run() -> None:
            try:
                act()
            except BaseException as error:
                tell(name, f"{type(error).__name__}: {error}")

        self._calls.append(self.pool.submit(run))
        return self._calls[-1]

    def _sample_on(self) -> None:
        while not self._is_over:
            self.check()
            self._has_sampled.set()

    def check(self) -> None:
        """Samples as the engine did at first."""
        assert self.sample() == self._expected

    def finish(self) -> None:
        """Ends the situation; nothing was lost."""
        self.undo()
        self._is_over = True
        for each in self._calls:
            each.result()
        self.check()
        self.engine.check_integrity()
        tell("nothing was lost")


# ---------------------------------------------------------------------- what the process does


def make_engine(**options: Any) -> Engine:
    return Engine(model_config=TINY, weights=spread_weights(), **SMALL, **options)


def idle() -> Scene:
    return Scene(make_engine())


def in_flight() -> Scene:
    scene = idle()
    scene.keep_sampling()
    return scene


def paused() -> Scene:
    scene = in_flight()
    scene.engine.pause_generation()
    scene.undo = scene.engine.continue_generation
    return scene


def asleep() -> Scene:
    scene = in_flight()
    scene.engine.sleep(preserve_state=True)
    scene.undo = scene.engine.wake_up
    return scene


def updating() -> Scene:
    """The source of an update is being read, which takes for ever."""
    scene = in_flight()
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        dtype = np.dtype(np.float32)

        @property
        def shape(self) -> NoReturn:
            reading.set()
            go_on.wait()
            raise ValueError("it cannot be read after all")

    source = logical_weights(TINY) | {"model.norm.weight": Slow()}
    update = scene.call("update_weights", lambda: scene.engine.update_weights(source, RULES))
    assert reading.wait()

    def undo() -> None:
        go_on.set()
        update.result()

    scene.undo = undo
    return scene


def group() -> Scene:
    """Two engines; JAX has not started, so that it can still be told of two devices."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    scene = Scene(make_engine(data_parallel_size=2))
    scene.keep_sampling()
    return scene


def serving() -> Scene:
    scene = in_flight()
    server = scene.engine.serve(port=0)
    asked = json.dumps({"input_ids": PROMPT, "sampling_params": GREEDY}).encode()
    answered = threading.Event()

    def post() -> None:
        url, headers = f"{server.url}/generate", {"Content-Type": "application/json"}
        while True:
            with contextlib.suppress(OSError):  # refused, or closed: the engine is gone
                urllib.request.urlopen(urllib.request.Request(url, asked, headers)).read()
                answered.set()

    threading.Thread(target=post, daemon=True).start()
    assert answered.wait()
    return scene


class WaitsForTheEnd:
    """A listener of progress whose first report takes until the interpreter is ending."""

    def __init__(self, task: str) -> None:
        self.has_started = threading.Event()
        self._task = task

    def started(self, task: str, total: int, unit: str) -> None:
        if task == self._task:
            self.has_started.set()
            wait_for(lambda: home._is_ending)

    def advanced(self, task: str, count: int) -> None: ...

    def finished(self, task: str) -> None: ...


def building() -> Scene:
    """Another thread makes an engine, as a learner's first step does."""
    scene = idle()
    listener = WaitsForTheEnd("place weights")
    scene.call("Engine", lambda: make_engine(progress=listener).generate(None, GREEDY, PROMPT))
    assert listener.has_started.wait()
    return scene


def warming() -> Scene:
    listener = WaitsForTheEnd("compile programs")
    scene = Scene(make_engine(progress=listener))
    scene.call("warmup", lambda: scene.engine.warmup(include_table=True))
    assert listener.has_started.wait()
    return scene


DOES: dict[str, Callable[[], Scene]] = {
    each.__name__: each
    for each in (idle, in_flight, paused, asleep, updating, group, serving, building, warming)
}

# ---------------------------------------------------------------------- how it ends


def end(how: str, scene: Scene, send: Callable[[str], None]) -> None:
    """Ends the process: returns if the script is to end by itself."""
    row = ENDS[how]
    if how == "handles":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(row.code))
    if row.signal:
        send(row.signal)
        while True:
            scene.sample()
            threading.Event().wait()
    if how == "closes":
        scene.engine.shutdown()
    elif how == "raises":
        raise RuntimeError("a fault of the script")
    elif how == "exits":
        sys.exit(row.code)
    elif how == "os_exits":
        os._exit(row.code)


# ---------------------------------------------------------------------- children


@contextlib.contextmanager
def locks_held(engine: Engine) -> Iterator[None]:
    """Another thread has the engine's locks, as one may at any moment of a fork."""
    is_held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with inside.group(engine)._lock, inside.seeds(engine)._lock:
            is_held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    try:
        yield
    finally:
        release.set()
        holder.join()


class Events:
    """What a process with an engine lives through: children, and interrupts."""

    def __init__(self, scene: Scene, send: Callable[[str], Any]) -> None:
        self.engine = scene.engine
        self._scene = scene
        self._send = send
        self.home = os.getpid()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self.home:
            self.engine.shutdown()
            tell("a handler ran")

    def run(self, name: str) -> None:
        tell("event", name)
        getattr(self, name)()

    def _child(self, act: Callable[[], Any], code: int) -> None:
        """Forks while the locks are held; the child must end with this code."""
        with locks_held(self.engine):
            child = os.fork()
            if not child:
                act()  # may leave by SystemExit, through all that is on the stack
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == code, (status, code)

    def os_exit(self) -> None:
        self._child(lambda: os._exit(4), 4)

    def sys_exit(self) -> None:
        self._child(lambda: sys.exit(5), 5)
        self._child(_fail, 1)

    def atexit(self) -> None:
        self._child(atexit._run_exitfuncs, 0)

    def closes(self) -> None:
        def leave() -> None:
            with self.engine:
                os.write(2, b"")

        self._child(self.engine.shutdown, 0)
        self._child(leave, 0)

    def _calls(self) -> dict[str, Callable[[], Any]]:
        engine = self.engine
        return {
            "generate": lambda: engine.generate(None, GREEDY, PROMPT),
            "stream": lambda: engine.generate(None, GREEDY, PROMPT, stream=True),
            "score": lambda: engine.score([PROMPT]),
            "warmup": engine.warmup,
            "pause_generation": engine.pause_generation,
            "continue_generation": engine.continue_generation,
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
            "flush_cache": engine.flush_cache,
            "abort_request": functools.partial(engine.abort_request, abort_all=True),
            "release_kv_cache": engine.release_kv_cache,
            "update_weights": lambda: engine.update_weights(logical_weights(TINY), RULES),
            "stage_weights": lambda: engine.stage_weights(logical_weights(TINY), RULES),
            "save_checkpoint": lambda: engine.save_checkpoint("/nowhere"),
            "get_internal_state": engine.get_internal_state,
            "get_weights_checksum": engine.get_weights_checksum,
            "start_recording": engine.start_recording,
            "stop_recording": engine.stop_recording,
            "check_integrity": engine.check_integrity,
            "serve": functools.partial(engine.serve, port=0),
        }

    def calls(self) -> None:
        calls = self._calls()

        def call_all() -> None:
            for call in calls.values():
                self._assert_refused(call)
            assert not self.engine.is_running

        self._child(call_all, 0)

    def _assert_refused(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except EngineShutdownError as error:
            message = str(error)
        else:
            os._exit(9)
        assert f"lives in process {self.home}; a forked child cannot use it" in message

    def collects(self) -> None:
        """Streams, and futures of a checkpoint, are dropped or waited for."""
        streams = [self.engine.generate(None, GREEDY, PROMPT, stream=True) for _ in range(2)]
        self._child(streams.clear, 0)
        self._child(lambda: self._assert_refused(lambda: next(streams[0])), 0)
        future: Future[Any] = home.HomeFuture()
        self._child(lambda: self._assert_refused(future.result), 0)
        self._child(lambda: self._assert_refused(future.exception), 0)
        for each in streams:
            each.close()

    def makes_own(self) -> None:
        def fork_again() -> None:
            child = os.fork()
            if not child:
                self._assert_refused(lambda: self.engine.generate(None, GREEDY, PROMPT))
                os._exit(0)
            os._exit(os.waitpid(child, 0)[1])

        self._child(fork_again, 0)

    def executor(self) -> None:
        self._scene.pool.submit(lambda: self._child(lambda: os._exit(4), 4)).result()

    def process(self) -> None:
        process = multiprocessing.get_context("fork").Process(target=rewards.reward, args=("a",))
        process.start()
        process.join()
        assert process.exitcode == 0

    def daemon(self) -> None:
        fork = multiprocessing.get_context("fork")
        fork.Process(target=signal.pause, daemon=True).start()

    def pool(self) -> None:
        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool:
            assert pool.map(rewards.reward, ["a", "bc"]) == [1.0, 2.0]
        with ProcessPoolExecutor(2, mp_context=fork) as executor:
            assert list(executor.map(rewards.reward, ["a", "bc"])) == [1.0, 2.0]

    def spawn(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with pytest.raises(TypeError, match=f"lives in process {self.home} and cannot be pickled"):
            spawn.Process(target=rewards.take, args=(self.engine,)).start()
        with spawn.Pool(1) as pool:
            assert pool.map(rewards.reward, ["a"]) == [1.0]

    def grain(self) -> None:
        grain = importlib.import_module("grain")
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # as `absl.app` does
        data = grain.MapDataset.source(["a", "bc"] * 8).map(rewards.reward).to_iter_dataset()
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
        assert sorted(data.mp_prefetch(options)) == [1.0] * 8 + [2.0] * 8

    def subprocess(self) -> None:
        subprocess.run([sys.executable, "-c", "print('out')"], check=True, capture_output=True)

    # ------------------------------------------------------------------ interrupts

    def cell(self) -> None:
        """A notebook's cell is interrupted; the next one works."""
        shell_type = importlib.import_module("IPython.core.interactiveshell").InteractiveShell
        shell = shell_type.instance()
        shell.user_ns.update(send=self._send, sample=self._scene.sample, check=self._scene.check)
        interrupted = shell.run_cell("send('SIGINT')\nwhile True:\n  sample()", silent=True)
        assert isinstance(interrupted.error_in_exec, KeyboardInterrupt)
        shell.run_cell("check()", silent=True).raise_error()

    def asyncio(self) -> None:
        """An event loop is interrupted; the next one works."""

        async def sample(times: float) -> None:
            while times > 0:
                times -= 1
                await self.engine.async_generate(None, GREEDY, PROMPT)

        async def sample_on() -> None:
            self._send("SIGINT")
            await sample(math.inf)

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(sample_on())
        asyncio.run(sample(1))


def _fail() -> NoReturn:
    raise RuntimeError("a fault of the child")


# ---------------------------------------------------------------------- a case


def play(case: dict[str, str]) -> None:
    """Brings a situation about, and ends the process, or has events come."""
    scene = DOES[case["does"]]()
    ask = int(case["ask"])
    tell("ready")

    def send(name: str) -> None:
        os.write(ask, name.encode())

    if case["ends"]:
        end(case["ends"], scene, send)
        return
    events = Events(scene, send)
    for name in case["events"].split():
        events.run(name)
    scene.finish()
