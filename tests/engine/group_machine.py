"""The state machine of interruptions over a group: `group_machine NUM_EXAMPLES NUM_STEPS [SEED]`.

Needs two host devices. With a seed, threads yield at random at each lock. Beside what the machine
of a single engine does, there are adapters and refused swaps, stop strings, ids that are used
again, and callers who are interrupted: by a KeyboardInterrupt at a place of the call, or by a real
signal at some moment. Prints how many steps were taken.
"""

from __future__ import annotations

import functools
import logging
import sys
import unittest
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from jax.sharding import Mesh

from sgljax_engine import EngineStateError, SamplingParams, WeightSyncError
from sgljax_engine.core import commands as cmd
from sgljax_engine.io_struct import AbortReq, PauseMode
from tests import inside
from tests.engine import interrupt_model
from tests.engine import test_interrupt_machine as single
from tests.engine.expected_state import Update
from tests.engine.interrupt_model import NUM_WEIGHTS, WEIGHTS, Swap
from tests.engine.models import TINY, output_adapter
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import CHUNKED, other
from tests.interrupted import Interrupt, real_interrupts
from tests.threads import LIMIT_S
from tests.yields import yield_at_locks

ADAPTERS = ("a", "b")
"""Only one is loaded at a time, so that the other is refused."""

PLACES = st.integers(0, 150)


@functools.cache
def make_subject() -> single.Subject:
    """Two engines, each as large as the single one."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    twice = other(
        "two engines, each as large as the single one",
        CHUNKED,
        num_kv_tokens=320,
        max_running_requests=16,
        batch_buckets=(16,),
    )
    return single.Subject(
        mesh=mesh, tokenizer=CharTokenizer(), max_loras=1, max_lora_rank=4, **twice
    )


class GroupMachine(single.InterruptMachine):
    """What holds of a single engine holds of two; their versions agree."""

    make_subject: Any = staticmethod(make_subject)
    num_steps = num_examples = num_interrupts = num_refused = 0

    @initialize(loaded=st.sampled_from([*ADAPTERS, None]))
    def begin(self, loaded):
        super().begin()
        GroupMachine.num_examples += 1
        for name in self.expected.state().adapters:
            self.engine.unload_adapter(name)
        self.loaded: str | None = None
        self.may_lack_weights = False
        if loaded is not None:
            self.load_adapter(loaded, "retract")

    def settle_updates(self) -> None:
        """Waits for the updates that were asked for; then versions are known."""
        for update in self.expected.updates:
            update.future.exception(LIMIT_S)
        self.expected.collect_updates()

    # ------------------------------------------------------------------ requests

    @rule(
        form=st.sampled_from(["plain", "stream", "task"]),
        family=st.integers(0, 2),
        num_shared=st.integers(1, 50),
        stop=st.lists(st.integers(32, TINY.vocab_size - 1), max_size=8),
        uses_adapter=st.booleans(),
    )
    def add_special(self, form, family, num_shared, stop, uses_adapter):
        """With stop strings, and with the adapter that is loaded."""
        self.add(
            form,
            single.FAMILIES[family][:num_shared],
            40,
            lora=self.loaded if uses_adapter else None,
            stop=tuple(dict.fromkeys(map(chr, stop))),
        )

    @rule(
        which=single.COUNTS,
        form=st.sampled_from(["plain", "stream", "task"]),
        family=st.integers(0, 2),
        waits=st.booleans(),
    )
    @precondition(lambda self: self.named_calls)
    def use_again(self, which, form, family, waits):
        """An id whose request was answered, or abandoned, names another one at once."""
        call = self.named_calls[which % len(self.named_calls)]
        rid = call.rids[0].partition("-")[0]
        if waits and self.hold is None:
            call.may_abort = True
            self.expected.send(functools.partial(cmd.Abort, AbortReq(rid=rid))).result(LIMIT_S)
            call.collect()
        else:
            call.go_away()
        self.expected.over.difference_update(call.rids)
        self.expected.not_started.difference_update(call.rids)
        call.rids = []
        self.add(form, single.FAMILIES[family][:9], 12, rid=rid)

    # ------------------------------------------------------------------ adapters

    def allowed_level(self, level, preserve):
        """Level 2 is refused while an adapter is loaded."""
        level = 1 if self.loaded is not None else level
        self.may_lack_weights |= level == 2 and not preserve
        return level

    @rule(name=st.sampled_from(ADAPTERS), mode=st.sampled_from(single.MODES))
    @precondition(lambda self: self.hold is None and not self.may_lack_weights)
    def load_adapter(self, name: str, mode: PauseMode):
        """Refused while another one is loaded, whatever the mode; then all goes on."""
        expected = self.expected
        self.settle_updates()
        is_other = self.loaded not in (None, name)
        if mode == "wait" and not is_other and (expected.is_halted or expected.is_put_to_sleep):
            mode = "retract"
        exposed = [call for call in expected.calls if call.lora == name and not call.is_done()]
        load = functools.partial(
            self.engine.load_adapter, name, *interrupt_model.ADAPTERS[name], mode=mode
        )
        if is_other:
            with pytest.raises(EngineStateError, match=r"finds no slot|waited for"):
                load()
            GroupMachine.num_refused += 1
            return
        version = load()
        self.loaded = name
        weights = self.history.swaps[version - 1].weights
        self.history.swaps[version] = Swap(weights, mode, name)
        if mode == "abort":
            for call in exposed:
                call.may_abort = True
                expected.over.update(call.rids)

    @rule()
    @precondition(lambda self: self.hold is None and self.loaded is not None)
    def unload_adapter(self):
        """Its requests are ended first."""
        users = [call for call in self.named_calls if call.lora == self.loaded]
        for call in users:
            call.may_abort = True
            rid = call.rids[0].partition("-")[0]
            self.expected.send(functools.partial(cmd.Abort, AbortReq(rid=rid))).result(LIMIT_S)
            self.expected.over.update(call.rids)
        assert self.loaded is not None
        self.engine.unload_adapter(self.loaded)
        self.loaded = None

    # ------------------------------------------------------------------ interrupted callers

    def interrupted(self, call: Callable[[], Any], place: int | None) -> None:
        """Interrupts a call at a place, or by a signal, unless it is over before."""
        with real_interrupts() as interrupt_in:
            try:
                try:
                    if place is None:
                        interrupt_in(0.002)
                        call()
                    else:
                        with Interrupt(place):
                            call()
                finally:
                    interrupt_in(0)
            except KeyboardInterrupt:
                GroupMachine.num_interrupts += 1
            finally:
                sys.setprofile(None)

    @property
    def may_stand(self) -> bool:
        """Whether a request may have to wait for a later call."""
        return self.expected.mode is not None or self.expected.is_put_to_sleep

    @rule(place=PLACES, is_signal=st.booleans(), is_stream=st.booleans(), length=st.integers(1, 9))
    @precondition(lambda self: self.hold is None and not self.may_lack_weights)
    def interrupt_generate(self, place, is_signal, is_stream, length):
        """Whatever was submitted is aborted."""
        rid = self.new_rid()
        params = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)
        arguments: dict[str, Any] = {"input_ids": single.FAMILIES[0][:length], "rid": rid}

        def call() -> None:
            made = self.engine.generate(sampling_params=params, stream=is_stream, **arguments)
            if is_stream:
                list(made)

        try:
            self.interrupted(call, None if is_signal or self.may_stand else place)
        except EngineStateError:
            assert self.expected.may_sleep
        self.expected.over.add(rid)

    @rule(place=PLACES, mode=st.sampled_from(single.MODES[:3]))
    @precondition(lambda self: self.hold is None)
    def interrupt_pause(self, place, mode):
        """It was done or not; the next call is."""
        if mode == "abort":
            self.expected.note_end_of_all()
        self.interrupted(functools.partial(self.engine.pause_generation, mode), place)
        self.pause(mode)

    @rule(place=PLACES)
    @precondition(lambda self: self.hold is None)
    def interrupt_continue(self, place):
        self.interrupted(self.engine.continue_generation, place)
        self.continue_generation()

    @rule(place=PLACES, weights=st.integers(0, NUM_WEIGHTS - 1), mode=st.sampled_from(single.MODES))
    @precondition(lambda self: self.hold is None)
    def interrupt_update(self, place, weights, mode):
        """It goes on without its caller, unless it was not handed over."""
        self.settle_updates()
        before = self.engine.weight_version
        future: Future[int] = Future()
        exposed = self.expected.exposed(is_settled=True)
        update = Update(
            exposed=exposed if mode == "in_place" else list(self.expected.calls),
            future=future,
            swap=Swap(weights, mode),
            num_calls=len(self.expected.calls),
            may_fail=True,
        )
        call = functools.partial(self.engine.update_weights, WEIGHTS[weights], mode=mode)
        try:
            self.interrupted(call, place)
        except EngineStateError:
            assert mode == "wait"
        with pytest.raises(WeightSyncError):
            self.engine.update_weights({})  # behind it
        if self.engine.weight_version > before:
            future.set_result(before + 1)
        else:
            future.set_exception(EngineStateError("it was not handed over, or refused"))
        self.expected.updates.append(update)
        self.expected.collect_updates()

    @invariant()
    def engines_agree(self):
        GroupMachine.num_steps += 1
        if self.hold is None and not self.expected.updates:
            state = self.expected.state()
            assert {each.weight_version for each in state.engines} == {state.weight_version}
            assert {each.asleep for each in state.engines} == {state.asleep}
            assert {each.pause_mode for each in state.engines} == {state.pause_mode}
            assert {each.adapters for each in state.engines} == {state.adapters}
            assert state.adapters == (() if self.loaded is None else (self.loaded,))


def main(num_examples: int, num_steps: int, seed: int | None = None) -> bool:
    """Takes so many examples, each of at most so many steps; whether all went well."""
    if seed is not None:
        yield_at_locks(seed)
    interrupt_model.ADAPTERS.update({name: output_adapter(seed) for seed, name in enumerate("ab")})
    test = single.machine(num_examples, GroupMachine, num_steps)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(test)
    is_well = unittest.TextTestRunner().run(suite).wasSuccessful()
    groups = inside.group(make_subject().engine).groups
    assert not is_well or not (groups._groups or groups._names)
    counts = "num_examples", "num_steps", "num_interrupts", "num_refused"
    sys.stdout.write(f"{ {name: getattr(GroupMachine, name) for name in counts} }\n")
    return is_well


if __name__ == "__main__":
    logging.getLogger("sgljax_engine").setLevel(logging.CRITICAL)
    sys.exit(not main(*map(int, sys.argv[1:])))
