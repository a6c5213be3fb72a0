"""Requests, interruptions and weight updates in any order, on an engine that runs meanwhile.

Rules submit from one thread, so commands arrive in the order of the rules; the engine's thread
dispatches between them whenever it likes. What is drawn depends on what was submitted alone, never
on how far the engine got.
"""

from __future__ import annotations

import contextlib
import functools
import time
import unittest
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgljax_engine import Engine, EngineStateError
from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import (
    SLEEP_TAGS,
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from tests.engine import interrupt_model
from tests.engine.expected_state import ExpectedState, Update
from tests.engine.interrupt_calls import Call, Caller
from tests.engine.interrupt_model import (
    NUM_WEIGHTS,
    OPTIONS,
    WEIGHTS,
    History,
    References,
    Swap,
)
from tests.engine.models import TINY, random_prompts
from tests.threads import LIMIT_S, held, start

FAMILIES = random_prompts(3, 60, 60, seed=3)
MODES = ("abort", "retract", "in_place", "wait")
COUNTS = st.integers(0, 2**10)


class Subject:
    """The engine, which one example after another uses, since building one is slow."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(
            model_config=interrupt_model.MODEL, weights=WEIGHTS[0], **OPTIONS | options
        )
        self.engine.warmup()
        self.caller, self.history = Caller(self.engine), History(0)
        self.num_compiles = self.engine.get_internal_state().num_compiles
        self.num_calls = 0


@functools.cache
def make_subject() -> Subject:
    return Subject()


@functools.cache
def make_references() -> References:
    return References()


class InterruptMachine(RuleBasedStateMachine):
    """Everything is answered once, and greedy answers are those of an uninterrupted engine."""

    make_subject: Any = staticmethod(make_subject)

    @initialize()
    def begin(self):
        self.subject = self.make_subject()
        self.engine, self.history = self.subject.engine, self.subject.history
        self.expected = ExpectedState(self.engine, self.history, self.subject.num_compiles)
        self.hold: contextlib.ExitStack | None = None
        self.later: list[tuple[Future[Any], Callable[[Any], None]]] = []

    def ask(self, command: Callable[[Any], cmd.Command], check: Callable[[Any], None]) -> None:
        """Sends, and checks the answer: now, or once the engine is let go."""
        self.then(self.expected.send(command), check)

    def then(self, future: Future[Any], check: Callable[[Any], None]) -> None:
        if self.hold is None:
            check(future.result(LIMIT_S))
        else:
            self.later.append((future, check))

    @rule()
    @precondition(lambda self: self.hold is None)
    def hold_engine(self):
        """What the next rules ask for is done between the same two dispatches."""
        self.hold = contextlib.ExitStack()
        self.hold.enter_context(held(self.engine))

    @rule()
    @precondition(lambda self: self.hold is not None)
    def let_go(self):
        assert self.hold is not None
        self.hold.close()
        self.hold, later, self.later = None, self.later, []
        for future, check in later:
            check(future.result(LIMIT_S))

    @rule(count=st.integers(1, 6))
    @precondition(lambda self: self.hold is None and not self.expected.is_halted)
    def run(self, count):
        """Lets the engine make some dispatches, if it has any to make."""
        state = self.expected.state()
        goal, deadline = state.counters.num_dispatches + count, time.monotonic() + LIMIT_S
        while state.running_batch_size and state.counters.num_dispatches < goal:
            if state.is_sleeping or not state.has_weights:
                return
            state = self.expected.state()
            assert time.monotonic() < deadline, "the engine stands still"

    # ------------------------------------------------------------------ requests

    def new_rid(self) -> str:
        self.subject.num_calls += 1
        return f"r{self.subject.num_calls}"

    def add(self, form: str, prompt: list[int], max_new: int, n: int = 1, **more: Any) -> None:
        rid = more.pop("rid", None) or self.new_rid()
        n = n if form == "plain" else 1
        may, must = self.expected.refusal(is_settled=self.hold is None)
        call = self.subject.caller.call(form, rid, prompt, max_new, n, **more)
        call.may_refuse, call.must_refuse = may, must
        self.expected.note_call(call)

    @rule(
        form=st.sampled_from(["plain", "plain", "stream", "task"]),
        family=st.integers(0, 2),
        num_shared=st.integers(1, 50),
        more=st.lists(st.integers(0, TINY.vocab_size - 1), max_size=6),
        max_new=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 3]),
    )
    def add_one(self, form, family, num_shared, more, max_new, n):
        self.add(form, FAMILIES[family][:num_shared] + more, max_new, n)

    @rule(family=st.integers(0, 2), lengths=st.lists(st.integers(1, 50), min_size=2, max_size=6))
    def add_several(self, family, lengths):
        for length in lengths:
            self.add("plain", FAMILIES[family][:length], 51 - length)

    @property
    def named_calls(self) -> list[Call]:
        """Those whose ids are still theirs."""
        return [call for call in self.expected.calls if call.rids]

    @rule(which=COUNTS, is_group=st.booleans())
    @precondition(lambda self: self.named_calls)
    def abort(self, which, is_group):
        call = self.named_calls[which % len(self.named_calls)]
        rid = call.rids[which % len(call.rids)]
        ended = call.rids if is_group else [rid]
        call.may_abort = True
        self.expected.over.update(ended)
        asked = AbortReq(rid=rid.partition("-")[0] if is_group else rid)
        self.ask(functools.partial(cmd.Abort, asked), lambda count: _within(count, len(ended)))

    @rule()
    def abort_all(self):
        self.expected.note_end_of_all()
        most = sum(len(call.rids) for call in self.expected.calls)
        asked = AbortReq(abort_all=True)
        self.ask(functools.partial(cmd.Abort, asked), lambda count: _within(count, most))

    @rule(which=COUNTS)
    @precondition(lambda self: self.expected.calls)
    def go_away(self, which):
        call = self.expected.calls[which % len(self.expected.calls)]
        call.go_away()
        self.expected.over.update(call.rids)

    # ------------------------------------------------------------------ pauses and the cache

    @rule(mode=st.sampled_from(MODES))
    def pause(self, mode):
        request = PauseGenerationReqInput(mode=mode)
        future = self.expected.send(functools.partial(cmd.Pause, request))
        self.expected.note_pause(mode, future)
        if mode != "wait":
            self.then(future, _ignore)

    @rule()
    def continue_generation(self):
        self.expected.note_continue()
        self.ask(functools.partial(cmd.Continue, ContinueGenerationReqInput()), _ignore)

    @rule()
    @precondition(lambda self: self.hold is None and self.expected.mode == "wait")
    def drain(self):
        """A "wait" ends by itself."""
        pause = self.expected.pauses[-1]
        refusal = pause.future.exception(LIMIT_S)
        assert refusal is None or pause.may_fail
        self.expected.is_drained |= refusal is None

    @rule()
    def flush(self):
        expected = self.expected
        is_settled = self.hold is None and expected.is_halted and not expected.updates
        num_running = expected.state().running_batch_size if is_settled else None

        def check(answer):
            assert num_running is None or answer.success == (num_running == 0)
            assert answer.success or not answer.flushed_items

        self.ask(functools.partial(cmd.FlushCache, FlushCacheReqInput()), check)

    @rule()
    @precondition(lambda self: self.hold is None)
    def release_kv(self):
        refusal = self.expected.send(cmd.ReleaseKV).exception(LIMIT_S)
        assert refusal is None or isinstance(refusal, EngineStateError)
        if self.expected.mode in ("abort", "retract"):
            assert refusal is None

    # ------------------------------------------------------------------ sleep

    @rule(level=st.integers(1, 2), preserve=st.booleans(), refuse=st.booleans())
    @precondition(lambda self: self.hold is not None or not self.expected.is_put_to_sleep)
    def sleep(self, level, preserve, refuse):
        level = self.allowed_level(level, preserve)
        self.expected.note_sleep(
            level=level, preserve=preserve, refuse=refuse, is_settled=self.hold is None
        )
        self.ask(functools.partial(cmd.Sleep, level, preserve, SLEEP_TAGS, refuse), _is_bytes)

    def allowed_level(self, level, preserve):
        """The level that is asked for in place of one that is drawn."""
        del preserve
        return level

    @rule(tags=st.sampled_from([SLEEP_TAGS, SLEEP_TAGS, SLEEP_TAGS[:1], SLEEP_TAGS[1:]]))
    @precondition(lambda self: self.expected.is_put_to_sleep)
    def wake_up(self, tags):
        self.expected.note_wake_up(tags)
        self.ask(functools.partial(cmd.WakeUp, tags), _is_bytes)

    # ------------------------------------------------------------------ weights

    @rule(
        weights=st.integers(0, NUM_WEIGHTS - 1),
        is_same=st.booleans(),
        mode=st.sampled_from(MODES),
        flush=st.sampled_from([None, None, True, False]),
        donate=st.sampled_from([False, False, True]),
        verify=st.sampled_from([False, False, True]),
        is_awaited=st.booleans(),
    )
    def update(self, weights, is_same, mode, flush, donate, verify, is_awaited):
        expected = self.expected
        expected.collect_updates()
        if is_same and not expected.updates:
            weights = self.history.swaps[self.engine.weight_version].weights
        may_block = self.hold is not None or bool(expected.updates)
        options = {"mode": mode, "flush_cache": flush, "donate": donate, "verify": verify}
        exposed = expected.exposed(is_settled=self.hold is None)
        update = Update(
            exposed=exposed if mode == "in_place" else list(expected.calls),
            future=start(lambda: self.engine.update_weights(WEIGHTS[weights], **options)),
            swap=Swap(weights, mode, has_old=not expected.is_weightless),
            num_calls=len(expected.calls),
            may_fail=(mode == "wait" and (expected.is_halted or expected.may_sleep))
            or (mode == "in_place" and flush is True),
        )
        expected.updates.append(update)
        if not may_block and (is_awaited or mode != "wait"):
            update.future.exception(LIMIT_S)
        expected.collect_updates()

    # ------------------------------------------------------------------ checks

    @invariant()
    def agrees(self):
        if self.hold is None:
            self.expected.check()

    def teardown(self):
        try:
            if self.hold is not None:
                self.let_go()
            self.continue_generation()
            self.expected.wake()
            if self.expected.lacks_weights():
                self.update(0, False, "retract", None, False, False, True)
            self.expected.finish()
            self.expected.check_results(make_references())
        except BaseException:
            self.make_subject.cache_clear()  # what follows must not suffer from this failure
            raise


@functools.cache
def make_drafting_subject() -> Subject:
    return Subject(speculation="always", speculative_num_draft_tokens=3)


class DraftingMachine(InterruptMachine):
    """The same with drafts, which change no answer."""

    make_subject: Any = staticmethod(make_drafting_subject)


def _ignore(answer: Any) -> None:
    assert answer is None


def _is_bytes(answer: Any) -> None:
    assert answer >= 0


def _within(count: int, most: int) -> None:
    assert 0 <= count <= most


def machine(
    num_examples: int, kind: type[InterruptMachine] = InterruptMachine, num_steps: int = 40
) -> type[unittest.TestCase]:
    """A test of so many examples, each of at most so many steps."""

    class Machine(kind.TestCase):
        settings = hypothesis.settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            # How fast examples are says nothing here: most of their time is the engine's.
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )

    return Machine


TestInterruptMachine = machine(num_examples=20)
TestDraftingMachine = pytest.mark.slow(machine(num_examples=15, kind=DraftingMachine))
TestInterruptMachineForLong = pytest.mark.soak(machine(num_examples=500))
TestDraftingMachineForLong = pytest.mark.soak(machine(num_examples=200, kind=DraftingMachine))
