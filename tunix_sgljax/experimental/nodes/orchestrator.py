"""Runs an orchestrator of Tunix and ends it when a worker is lost, which Tunix would wait for."""

from __future__ import annotations

import argparse
import logging
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tunix.experimental.worker.remote_execution import (  # pyright: ignore[reportMissingImports]
    ActorHandle,
)

from sgljax_engine import InvalidConfigError
from tunix_sgljax.experimental.nodes import serving
from tunix_sgljax.training.task import import_function

logger = logging.getLogger(__name__)

_EXAMPLE = "tunix.experimental.examples.math_gsm8k_dist.run_gsm8k_dist_grpo:main"
_PERIOD_S = 1.0


class WorkerLostError(RuntimeError):
    """A worker of the run does not answer any more; its requests are lost with it."""


def main(argv: Sequence[str], context: Any = None) -> None:
    """Runs `--orchestrator_main` with all other arguments; the entry point of Tunix's launcher.

    Tunix's orchestrator at c7d8950f waits for ever for the episodes of a worker that was killed.
    Here every worker that registers is asked for its heartbeat; WorkerLostError ends the run when
    one has not answered for `--worker_timeout_s`.
    """
    serving.check_context(context)
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--orchestrator_main", default=_EXAMPLE)
    parser.add_argument("--worker_timeout_s", type=float, default=60.0)
    args, others = parser.parse_known_args(argv)
    if threading.current_thread() is not threading.main_thread():
        raise InvalidConfigError("the orchestrator must be the launcher's only --process")
    if not args.worker_timeout_s > 0:
        raise InvalidConfigError(f"worker_timeout_s must be above 0, got {args.worker_timeout_s}")
    run = import_function("orchestrator_main", args.orchestrator_main)
    watch = WorkerWatch(args.worker_timeout_s, on_lost=_interrupt_main)
    watch.follow(context.ipc.discovery)
    try:
        run(others, context)
    except KeyboardInterrupt:
        if watch.lost is None:
            raise
        raise watch.lost from None
    except Exception as error:  # of a call to a worker that has just been lost, perhaps
        lost = watch.ask_all()
        if lost is None:
            raise
        raise lost from error
    finally:
        watch.close()


def _interrupt_main() -> None:
    """Ends what the main thread does, waiting for a lock included."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


class WorkerWatch:
    """Asks the workers of a run for their heartbeats, on a thread of its own."""

    def __init__(self, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self.lost: WorkerLostError | None = None
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._workers: dict[str, Any] = {}  # name and address -> handle
        self._answered: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker-watch", daemon=True)

    def follow(self, discovery: Any) -> None:
        on_register = discovery.on_register

        def watch_too(callback: Callable[[str, int, bytes], None]) -> None:
            def accept(hostname: str, port: int, metadata: bytes) -> None:
                facts = pickle.loads(metadata)
                self.add(facts["worker_id"], f"{hostname}:{facts['service_port']}")
                callback(hostname, port, metadata)

            on_register(accept)

        discovery.on_register = watch_too
        self._thread.start()

    def add(self, worker_id: str, address: str) -> None:
        """Watches a worker; one that registers again at its address is the same."""
        name = f"{worker_id} at {address}"
        handle = ActorHandle.from_address(f"grpc://{address}", rpc_timeout_s=self._timeout_s)
        self._answered[name] = time.monotonic()
        self._workers[name] = handle

    def close(self) -> None:
        self._is_over.set()

    def ask_all(self, patience_s: float = 0.0) -> WorkerLostError | None:
        """Asks all workers once; an error for one that has not answered for so long."""
        for name, handle in list(self._workers.items()):
            try:
                handle.submit("heartbeat")
                self._answered[name] = time.monotonic()
            except Exception as error:
                silence_s = time.monotonic() - self._answered[name]
                logger.warning("worker %s does not answer: %s", name, _first_line(error))
                if silence_s >= patience_s:
                    return WorkerLostError(
                        f"worker {name} has not answered for {silence_s:.0f} s: "
                        f"{_first_line(error)}; start it and the run again"
                    )
        return None

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            lost = self.ask_all(self._timeout_s)
            if lost is not None and not self._is_over.is_set():
                self.lost = lost
                self._on_lost()
                return


def _first_line(error: Exception) -> str:
    details = getattr(error, "details", None)
    text = details() if callable(details) else str(error)
    return str(text).splitlines()[0] if text else type(error).__name__
