"""What was asked of an interrupted engine so far, and what has to hold therefore."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sgljax_engine import Engine, EngineStateError
from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import SLEEP_TAGS, AbortReq, FlushCacheReqInput, SleepTag
from sgljax_engine.observability.metrics import EngineState
from tests import inside
from tests.engine.interrupt_calls import Call, Result
from tests.engine.interrupt_model import History, References, Swap
from tests.threads import LIMIT_S


@dataclasses.dataclass(eq=False, kw_only=True)
class Update:
    """An update that was asked for, and the calls that it may meet.

    Attributes:
        future: Of its version.
        swap: What it is to bring.
        exposed: Calls that it may find started; of one that ends requests, all.
        num_calls: Calls made before; it may meet later ones too, if it has to wait.
        may_fail: It may be refused.
    """

    future: Future[int]
    swap: Swap
    exposed: list[Call]
    num_calls: int
    may_fail: bool


@dataclasses.dataclass(eq=False)
class WaitPause:
    """A pause of mode "wait", which may be over much later; refused if continued before."""

    future: Future[None]
    may_fail: bool = False


class ExpectedState:
    """Kept by one thread, beside an engine that nobody else uses.

    Attributes:
        calls, updates, pauses: What was asked for; updates only while they are not done.
        mode: How generation was paused last.
        is_drained: A "wait" is over, so nothing runs until generation continues.
        not_started: Ids of requests that came in this pause.
        over: Ids of requests that must not be in the engine any more.
        is_put_to_sleep: It was asked to sleep, and not yet to wake up wholly; what is drawn next
            may depend on this, since it does not follow from how far the engine got.
        may_sleep: Weights or KV cache may be away: it sleeps, or gave its weights up.
        refuses: Whether it refuses requests while it sleeps; None if that cannot be told.
    """

    def __init__(self, engine: Engine, history: History, num_compiles: int) -> None:
        self.engine, self.history = engine, history
        self.calls: list[Call] = []
        self.updates: list[Update] = []
        self.pauses: list[WaitPause] = []
        self.mode: str | None = None
        self.is_drained = False
        self.not_started: set[str] = set()
        self.over: set[str] = set()
        self.is_put_to_sleep = False
        self.may_sleep = False
        self.refuses: bool | None = False
        self.is_weightless = False
        self._num_compiles = num_compiles
        self._still: tuple[int, int] | None = None

    def send(self, command: Callable[[Future[Any]], cmd.Command]) -> Future[Any]:
        """Asks, without waiting; in the order of the calls."""
        future: Future[Any] = Future()
        inside.submit(self.engine, command(future))
        return future

    def state(self) -> EngineState:
        return self.send(cmd.GetState).result(LIMIT_S)

    @property
    def is_halted(self) -> bool:
        """Whether nothing may run, whatever has started."""
        return self.mode not in (None, "wait")

    # ------------------------------------------------------------------ what was asked for

    def note_call(self, call: Call) -> None:
        self.calls.append(call)
        if self.mode is not None:
            self.not_started.update(call.rids)

    def note_end_of_all(self) -> None:
        for call in self.calls:
            call.may_abort |= not call.is_done()
            self.over.update(call.rids)

    def note_pause(self, mode: str, future: Future[None]) -> None:
        self.mode, self._still = mode, None
        if mode == "wait":
            self.pauses.append(WaitPause(future, may_fail=self.may_sleep))
            return
        for update in self.updates:
            update.may_fail |= update.swap.mode == "wait"
        if mode == "abort":
            self.note_end_of_all()

    def note_continue(self) -> None:
        self.mode = self._still = None
        self.is_drained = False
        self.not_started = set()
        for pause in self.pauses:
            pause.may_fail = True

    def note_sleep(self, *, level: int, preserve: bool, refuse: bool, is_settled: bool) -> None:
        """Before it is asked for. Answers what waits for requests that cannot finish."""
        if not is_settled or self.updates:
            self.refuses = None if refuse or self.refuses is not False else False
        elif not self.state().is_sleeping:
            self.refuses = refuse
        self.is_weightless |= level == 2 and not preserve
        self.is_put_to_sleep = self.may_sleep = True
        self._still = None
        for update in self.updates:
            update.may_fail |= update.swap.mode == "wait"
            if self.is_weightless:
                update.swap = update.swap._replace(has_old=False)
        for pause in self.pauses:
            pause.may_fail = True

    def note_wake_up(self, tags: Sequence[SleepTag]) -> None:
        self.is_put_to_sleep &= set(tags) != set(SLEEP_TAGS)
        self._still = None

    def refusal(self, *, is_settled: bool) -> tuple[bool, bool]:
        """Whether a request that comes now may be refused, and whether it must be."""
        if not self.may_sleep:
            return False, False
        if not is_settled or self.updates:
            return self.refuses is not False or self.is_weightless, False
        state = self.state()
        is_lost = "weights" not in state.asleep and not state.has_weights
        may = is_lost or (state.is_sleeping and self.refuses is not False)
        return may, is_lost or (state.is_sleeping and self.refuses is True)

    def exposed(self, *, is_settled: bool) -> list[Call]:
        """Calls that may have started. `is_settled`: the engine can be asked; nothing is queued.

        While halted it is known which have: those that run.
        """
        found = [call for call in self.calls if not call.is_done()]
        if self.is_halted and is_settled and not self.updates:
            running = set(self.state().running_rids)
            found = [call for call in found if running.intersection(call.rids)]
        return found

    def collect_updates(self) -> None:
        """ExpectedState the updates that are done."""
        done = [update for update in self.updates if update.future.done()]
        self.updates = [update for update in self.updates if update not in done]
        for update in done:
            refusal = update.future.exception()
            if refusal is not None:
                assert update.may_fail, f"update refused: {refusal}"
                assert isinstance(refusal, EngineStateError)
                continue
            version = update.future.result()
            assert version not in self.history.swaps
            self.history.swaps[version] = update.swap
            for call in [*update.exposed, *self.calls[update.num_calls :]]:
                call.dirty.add(version)
                call.may_abort |= update.swap.mode == "abort"
            if update.swap.mode == "abort":
                self.over.update(rid for call in update.exposed for rid in call.rids)

    # ------------------------------------------------------------------ what has to hold

    def check(self) -> None:
        """Compares all that can be seen now."""
        done = [call for call in self.calls if call.is_done()]
        self.send(cmd.CheckIntegrity).result(LIMIT_S)
        state = self.state()
        inside = {*state.running_rids, *state.waiting_rids}
        assert len(inside) == state.running_batch_size + state.waiting_queue_size
        assert inside <= {rid for call in self.calls for rid in call.rids}
        assert not inside & {rid for call in done for rid in call.rids}, "answered, and goes on"
        assert not inside & self.over, "ended, and goes on"
        for call in self.calls:
            if not inside.intersection(call.rids):
                call.collect()
        assert state.num_compiles == self._num_compiles
        assert state.pause_mode == self.mode
        self._check_sleep(state)
        self._check_pause(state)
        self.collect_updates()

    def _check_sleep(self, state: EngineState) -> None:
        assert self.may_sleep or (state.has_weights and not state.is_sleeping)
        assert state.is_sleeping or state.host_bytes == 0
        assert "weights" not in state.asleep or not state.has_weights
        assert "kv_cache" not in state.asleep or not state.is_kv_allocated
        if self.updates:
            return
        assert state.is_sleeping == self.engine.is_sleeping()
        if not state.is_sleeping:
            self.refuses = False
            self.may_sleep = self.is_weightless = not state.has_weights

    def _check_pause(self, state: EngineState) -> None:
        assert not self.not_started & set(state.running_rids), "started while paused"
        if self.mode in ("abort", "retract") or self.is_drained:
            assert state.running_batch_size == 0
        has_all = state.has_weights and not state.is_sleeping
        if self.is_halted or self.is_drained or not has_all:
            now = state.counters.num_output_tokens, state.counters.num_dispatches
            assert self._still in (None, now), "tokens came while paused"
            self._still = now
        else:
            self._still = None

    def wake(self) -> None:
        """Wakes all; weights may be lacking still."""
        self.note_wake_up(SLEEP_TAGS)
        self.send(functools.partial(cmd.WakeUp, SLEEP_TAGS)).result(LIMIT_S)

    def lacks_weights(self) -> bool:
        """Whether nothing that was asked for brings weights."""
        if self.state().has_weights:
            return False
        for update in self.updates:  # those that wait are refused
            update.future.exception(LIMIT_S)
        self.collect_updates()
        return not self.state().has_weights

    def finish(self) -> None:
        """Waits for all that was asked for; generation must go on."""
        for update in self.updates:
            update.future.exception(LIMIT_S)
        self.collect_updates()
        for pause in self.pauses:
            refusal = pause.future.exception(LIMIT_S)
            assert refusal is None or (pause.may_fail and isinstance(refusal, EngineStateError))
        for call in self.calls:
            call.collect()
        ended = self.send(functools.partial(cmd.Abort, AbortReq(abort_all=True))).result(LIMIT_S)
        assert ended == 0
        self.check()
        answer = self.send(functools.partial(cmd.FlushCache, FlushCacheReqInput())).result(LIMIT_S)
        state = self.state()
        assert answer.success
        assert state.available_kv_tokens == state.total_kv_tokens
        assert state.cached_kv_tokens == 0
        assert max(self.history.swaps) == len(self.history.swaps) - 1 == state.weight_version

    def check_results(self, references: References) -> None:
        """Every answer, and every token that uninterrupted engines can predict."""
        asked = []
        for call in self.calls:
            for result in call.results or ():
                self._check_result(call, result)
                asked.extend(
                    (weights, call.lora, call.prompt + result.ids[:begin], result.ids[begin:end])
                    for begin, end, weights in self.history.pieces(call, result)
                )
        references.check(asked)

    def _check_result(self, call: Call, result: Result) -> None:
        ids, versions, finish = result
        assert len(versions) == len(ids) <= call.max_new
        text = "".join(map(chr, ids))
        if finish == "stop":
            assert any(stop in text for stop in call.stop)
            assert not any(stop in text[:-1] for stop in call.stop), "a stop string was passed"
        elif finish == "length":
            assert len(ids) == call.max_new
            assert not any(stop in text for stop in call.stop)
        else:
            assert finish == "abort"
            assert call.may_abort, "nobody aborted it"
        assert versions == sorted(versions)
        assert not versions or call.version <= versions[0]
        # Nothing that had started lives on after an update that waits for it, or ends it.
        first, last = (versions[0], versions[-1]) if versions else (0, 0)
        swaps = [self.history.swaps[version] for version in range(first + 1, last + 1)]
        modes = {
            swap.mode
            for swap in swaps
            if swap.concerns(call) and (swap.mode != "wait" or swap.has_old)
        }
        assert not modes & {"wait", "abort"}, f"{call} lived on: versions {versions}, {swaps}"
