"""A group of two engines meets refusals, interrupts and faults: `python -m ... group_faults STEP`.

Needs two host devices. Afterwards nothing hangs and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from sgljax_engine import (
    Engine,
    EngineShutdownError,
    EngineStateError,
    LoraRule,
    SamplingParams,
    logical_rules,
)
from sgljax_engine.core import commands as cmd
from sgljax_engine.runner.warmup import Extra
from tests import inside
from tests.engine.models import TINY, logical_weights
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import SMALL
from tests.interrupted import interrupt_everywhere, real_interrupts
from tests.threads import LIMIT_S, gate_steps, start, take_steps, wait_for

MODES = ("abort", "retract", "in_place", "wait")
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7]


def make(**options: Any) -> Engine:
    few: dict[str, Any] = {**SMALL, "max_loras": 1, "max_lora_rank": 4}
    return Engine(
        model_config=TINY,
        weights=logical_weights(TINY),
        weight_rules=logical_rules(TINY),
        tokenizer=CharTokenizer(),
        mesh=Mesh(np.asarray(jax.devices()[:2]), ("data",)),
        **(few | options),
    )


def adapter(seed: int) -> tuple[dict[str, np.ndarray], tuple[Any, ...]]:
    """A pair of one projection, and its rules."""
    rng, name = np.random.default_rng(seed), "model.layers.0.self_attn.q_proj"
    pair = {
        f"{name}.a": rng.normal(0, 0.3, (TINY.hidden_size, 4)).astype(np.float32),
        f"{name}.b": rng.normal(0, 0.3, (4, TINY.num_heads * TINY.head_dim)).astype(np.float32),
    }
    rule = LoraRule(f"{name}.weight", f"{name}.a", f"{name}.b", 0.5)
    return pair, (*logical_rules(TINY), rule)


def check_idle(engine: Engine) -> None:
    """No request, no id and no load is left, and the engines serve."""
    wait_for(lambda: engine.get_progress().num_running + engine.get_progress().num_waiting == 0)
    engine.check_integrity()
    state = engine.get_internal_state()
    assert state.running_batch_size == state.waiting_queue_size == 0
    assert {each.weight_version for each in state.engines} == {engine.weight_version}
    assert not inside.group(engine).groups._groups
    assert not inside.group(engine).groups._names
    assert inside.group(engine)._router.loads == (0, 0)


def both(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    """What both engines give."""
    return [out.output_ids for out in engine.generate_requests([PROMPT, [9, 8]], params)]


def main(step: int) -> None:
    """All cases on one engine, since making one takes most of the time.

    Args:
        step: Places of a call from one interrupt to the next. A call has up to 300.
    """
    with make() as engine:
        expected = both(engine)
        refused_swaps(engine, expected)
        ids_used_again(engine)
        hooks(engine, expected)
        paused_together(engine, expected)
        interrupted(engine, expected, step)
        signalled(engine, expected)
        refused_in_place(engine)
        check_idle(engine)
    blocked_source()
    stopped_while_handing_out()


def refused_swaps(engine: Engine, expected: list[list[int]]) -> None:
    """A refused adapter lets all go on, whatever its mode and whatever runs."""
    engine.load_adapter("a", *adapter(0))
    version = engine.weight_version
    for mode in MODES:
        for is_busy in (False, True):
            call = start(lambda: both(engine, LONG)) if is_busy else None
            with pytest.raises(EngineStateError, match="adapter 'b' finds no slot: max_loras is 1"):
                engine.load_adapter("b", *adapter(1), mode=mode)
            assert both(engine) == expected
            if call is not None:
                assert [len(ids) for ids in call.result(LIMIT_S)] == [200, 200]
            assert not any(core.pauses.holds_new_requests for core in inside.cores(engine))
            assert engine.weight_version == version
    engine.unload_adapter("a")
    check_idle(engine)


def refused_in_place(engine: Engine) -> None:
    """An update that is to flush the cache while requests run. The engine is gated afterwards."""
    gate_steps(engine)
    call = start(lambda: both(engine, LONG))
    wait_for(lambda: engine.get_progress().num_waiting == 2)
    take_steps(engine)
    with pytest.raises(EngineStateError, match="would go on with keys"):
        engine.load_adapter("a", *adapter(0), mode="in_place", flush_cache=True)
    assert [len(ids) for ids in call.result(LIMIT_S)] == [200, 200]


def ids_used_again(engine: Engine) -> None:
    """An id is free once its answer is out, however the request ended; also under load."""
    text = engine.generate(input_ids=PROMPT, sampling_params=LONG, rid="a")["text"]
    stop = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True, stop=(text[4:6],))
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            both(engine, LONG)

    loads = [start(load) for _ in range(2)]
    try:
        for round in range(24):
            ids = [PROMPT, [9, 8]][round % 2]
            engine.generate(input_ids=PROMPT, sampling_params=stop, rid="a")
            stream = engine.generate(input_ids=ids, sampling_params=stop, rid="a", stream=True)
            if round % 3:
                next(stream)
                stream.close()
            else:
                list(stream)
            asyncio.run(cancelled(engine, ids, stop))
    finally:
        over.set()
        for call in loads:
            call.result(LIMIT_S)
    check_idle(engine)


async def cancelled(engine: Engine, ids: list[int], params: SamplingParams) -> None:
    """A task is cancelled right away."""
    task = asyncio.create_task(engine.async_generate(None, params, ids, rid="a"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def hooks(engine: Engine, expected: list[list[int]]) -> None:
    """What a hook raises on an engine's thread is its caller's."""

    class Progress:
        def started(self, task: str, total: int, unit: str) -> None:
            raise SystemExit("planted")

        def advanced(self, task: str, count: int) -> None:
            raise AssertionError("nothing was started")

        def finished(self, task: str) -> None:
            raise AssertionError("nothing was started")

    def leave() -> None:
        raise SystemExit("planted")

    with pytest.raises(SystemExit, match="planted"):
        inside.ask(engine, functools.partial(cmd.Run, leave))
    include: frozenset[Extra] = frozenset({"score", "table"})
    with pytest.raises(SystemExit, match="planted"):
        inside.ask(engine, functools.partial(cmd.Warmup, include, Progress()))
    assert both(engine) == expected
    check_idle(engine)


def paused_together(engine: Engine, expected: list[list[int]]) -> None:
    """A pause that one engine cannot do is done by none."""
    for core in inside.cores(engine):
        with pytest.MonkeyPatch.context() as patch:

            def fail() -> None:
                raise RuntimeError("planted")

            patch.setattr(core.runner.kv_memory, "wait", fail)
            for mode in ("abort", "retract", "in_place"):
                with pytest.raises(RuntimeError, match="planted"):
                    engine.pause_generation(mode)
                assert {each.pause_mode for each in engine.get_internal_state().engines} == {None}
        assert both(engine) == expected


def calls_to_interrupt(engine: Engine) -> list[Callable[[], Any]]:
    """Every form of call."""
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    return [
        lambda: both(engine),
        lambda: list(engine.generate(input_ids=PROMPT, sampling_params=params, stream=True)),
        lambda: engine.score([PROMPT, PROMPT]),
        lambda: (engine.pause_generation("wait"), engine.continue_generation()),
        lambda: engine.flush_cache(),
        lambda: engine.get_internal_state(),
        lambda: engine.abort_request(abort_all=True),
        lambda: engine.load_adapter("a", *adapter(0), mode="wait"),
        # Last: a real signal would damage asyncio's own state.
        lambda: asyncio.run(engine.async_generate(None, params, PROMPT)),
    ]


def interrupted(engine: Engine, expected: list[list[int]], step: int) -> None:
    """A KeyboardInterrupt at any line of a call leaves no request, and no engine that waits."""

    def check() -> None:
        engine.continue_generation()
        assert both(engine) == expected
        check_idle(engine)

    for call in calls_to_interrupt(engine):
        call()
        assert interrupt_everywhere(call, check, step)


def signalled(engine: Engine, expected: list[list[int]]) -> None:
    """A real signal at a random moment does no more harm."""
    rng = random.Random(0)
    calls = calls_to_interrupt(engine)[:-1]
    with real_interrupts() as interrupt_in:
        num_interrupts = 0
        for _ in range(40):
            try:
                interrupt_in(10 ** rng.uniform(-4.5, -2))
                rng.choice(calls)()
                interrupt_in(0)
            except KeyboardInterrupt:
                num_interrupts += 1
            interrupt_in(0)
            engine.continue_generation()
        assert num_interrupts
    assert both(engine) == expected
    check_idle(engine)


def blocked_source() -> None:
    """`shutdown` waits for no source that a user's code reads."""
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        """An array that is read when somebody asks for its shape."""

        dtype = np.dtype(np.float32)

        @property
        def shape(self) -> tuple[int, ...]:
            reading.set()
            assert go_on.wait(LIMIT_S)
            return (1,)

    with make() as engine:
        source = logical_weights(TINY) | {"model.norm.weight": Slow()}
        update = start(lambda: engine.update_weights(source, RULES))
        later = start(lambda: engine.update_weights(logical_weights(TINY), RULES))
        assert reading.wait(LIMIT_S)
        engine.shutdown()
        for call in (update, later):
            with pytest.raises(EngineShutdownError):
                call.result(LIMIT_S)
        go_on.set()
        inside.weights_thread(engine).join(LIMIT_S)
        assert not inside.weights_thread(engine).is_alive()


RULES = logical_rules(TINY)


def stopped_while_handing_out() -> None:
    """A finalizer that shuts down in the middle of a hand-out leaves no engine waiting."""
    with make() as engine:
        group = inside.group(engine)
        real = group.loops[0].submit

        def submit(task: cmd.Task) -> None:
            real(task)
            group.request_stop()

        group.loops[0].submit = submit
        engine.get_internal_state()  # was handed out to both, and so it is answered
        with pytest.raises(EngineShutdownError):
            engine.get_internal_state()
        engine.shutdown()
        assert not any(loop._thread.is_alive() for loop in group.loops)


if __name__ == "__main__":
    logging.getLogger("sgljax_engine").setLevel(logging.CRITICAL)
    assert len(jax.devices()) >= 2
    main(int(sys.argv[1]))
