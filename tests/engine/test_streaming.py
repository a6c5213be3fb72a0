"""Streams as a caller sees them: pieces, stop strings, cancellation, threads, loops, garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import jax
import pytest

from sgljax_engine import (
    Engine,
    EngineError,
    EngineShutdownError,
    InvalidRequestError,
)
from tests import inside
from tests.engine.interrupts import wait_until
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.small_tokenizers import GOLDEN, CharTokenizer
from tests.geometry import SMALL
from tests.threads import (
    LIMIT_S,
    gate_steps,
    held,
    running,
    start,
    take_steps,
    wait_for,
)

ONE_STEP: dict[str, Any] = {**SMALL, "stream_interval": 1}
"""Requests that stream or have stop strings take one step a dispatch; others four."""
GREEDY = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
LONG = GREEDY | {"max_new_tokens": 240}
"""Far more than a reader or a command needs to end it."""
MEDIUM = GREEDY | {"max_new_tokens": 80}
PROMPT = [11, 12, 13]
OTHER_PROMPT = [9, 8]


def make_engine(**options: Any) -> Engine:
    given: dict[str, Any] = ONE_STEP | {"tokenizer": CharTokenizer()} | options
    return Engine(model_config=TINY, weights=spread_weights(), **given)


_PATIENCE_S = 0.05
"""A test may hold the detokenizer while the engine goes on."""


def pace(engine: Engine) -> Engine:
    """A step starts when the detokenizer has handled what earlier steps gave it.

    Steps of a tiny model take less than a thread waits for a core: readers would have no time.
    """
    core = inside.core(engine)
    outputs: Any = core.outputs
    step, put, take = core.step, outputs._queue.put, outputs._handle_or_end
    # The detokenizer waits in the call of the method as it was: its first return is not counted.
    changed, counts = threading.Condition(), {"put": 0, "taken": 1}

    def counted_put(news) -> None:
        counts["put"] += 1
        put(news)

    def counted_take(news) -> bool:
        goes_on = take(news)
        with changed:
            counts["taken"] += 1
            changed.notify()
        return goes_on

    def step_late() -> None:
        outputs.flush()
        with changed:
            changed.wait_for(lambda: counts["taken"] >= counts["put"], _PATIENCE_S)
        step()

    core.step, outputs._queue.put, outputs._handle_or_end = step_late, counted_put, counted_take
    return engine


@pytest.fixture(scope="module")
def one_step():
    """An engine that hands out every token by itself; its tokens are characters."""
    with make_engine() as engine:
        yield pace(engine)


@pytest.fixture(scope="module")
def many_steps():
    with make_engine(stream_interval=4) as engine:
        yield pace(engine)


@pytest.fixture(params=["one_step", "many_steps"])
def engine(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def bytes_engine():
    """Its tokens are bytes, and random weights care little for UTF-8."""
    with Engine(GOLDEN / "qwen3_gqa_tied", **SMALL, stream_interval=2) as engine:
        yield engine


def assert_idle(engine):
    """Nothing runs, and a flush frees every page."""
    engine.check_integrity()
    assert engine.flush_cache().success
    state = engine.get_internal_state()
    assert state.running_batch_size == state.waiting_queue_size == 0
    assert state.cached_kv_tokens == 0
    assert state.available_kv_tokens == state.total_kv_tokens
    assert not inside.core(engine).outputs._records


def num_decoded(engine):
    return engine.get_internal_state().counters.num_output_tokens


def read(stream):
    """All pieces, or an error if one never comes."""
    return start(lambda: list(stream)).result(LIMIT_S)


def joined(pieces):
    """The outputs that pieces add up to, by index, after checking each one's place."""
    outputs: dict[int, dict[str, Any]] = {}
    for piece in read(pieces):
        meta = piece["meta_info"]
        index = piece["index"]
        if index not in outputs:
            outputs[index] = {"text": "", "output_ids": [], "meta_info": defaultdict(list)}
        output = outputs[index]
        so_far = output["meta_info"]
        assert so_far["finish_reason"] in ([], None), "nothing may follow the last piece"
        output["text"] += piece["text"]
        output["output_ids"] += piece["output_ids"]
        assert piece["output_ids"]
        assert meta["completion_tokens"] == len(output["output_ids"])
        for name, value in meta.items():
            if name.startswith("output_") or name == "token_weight_versions":
                assert len(value) == len(piece["output_ids"])
                so_far[name] += value
            elif name.startswith("input_"):
                assert name not in so_far, "prompt log-probs come with the first piece only"
                so_far[name] = value
            else:
                assert name != "id" or so_far["id"] in ([], value)
                so_far[name] = value
    return outputs


VARYING = ("id", "e2e_latency", "time_to_first_token", "cached_tokens", "cache_miss_count")


def comparable(output):
    """An output without what differs from call to call."""
    meta = {k: v for k, v in output["meta_info"].items() if k not in VARYING}
    return {"text": output["text"], "output_ids": output["output_ids"], "meta_info": meta}


def assert_streams_the_same(engine, **arguments):
    """The pieces of a call add up to what the call returns without `stream`; returns both."""
    whole = engine.generate(**arguments)
    pieces = read(engine.generate(**arguments, stream=True))
    outputs = joined(pieces)
    wholes = [whole] if isinstance(whole, dict) else whole
    assert sorted(outputs) == list(range(len(wholes)))
    for index, output in outputs.items():
        assert comparable(output) == comparable(wholes[index])
        assert output["meta_info"]["finish_reason"] is not None
    return wholes, pieces


class TestPieces:
    @pytest.mark.parametrize("params", [{"n": 2}, {"detokenize": False}])
    def test_add_up(self, engine, params):
        prompts = random_prompts(3, 2, 20, seed=1)
        params = GREEDY | {"temperature": 1.0, "seed": 5} | params
        wholes, pieces = assert_streams_the_same(
            engine, input_ids=prompts, sampling_params=params, return_logprob=True
        )
        assert len(wholes) == 3 * params.get("n", 1)
        assert all(len(w["output_ids"]) == 50 for w in wholes)
        assert all(bool(w["text"]) == params.get("detokenize", True) for w in wholes)
        assert len(pieces) >= 4 * len(wholes)
        first = {piece["index"] for piece in pieces[: len(wholes)]}
        assert first == set(range(len(wholes))), "outputs are streamed side by side"

    @pytest.mark.parametrize(
        ("name", "expected"), [("one_step", [1] * 50), ("many_steps", [1, *[4] * 12, 1])]
    )
    def test_come_after_every_dispatch(self, request, name, expected):
        """The first of them has a single step."""
        engine = request.getfixturevalue(name)
        engine.generate(None, GREEDY, PROMPT)  # from here on it knows how long steps take
        pieces = list(engine.generate(None, GREEDY, PROMPT, stream=True))
        assert [len(piece["output_ids"]) for piece in pieces] == expected

    def test_of_no_prompts(self, engine):
        assert list(engine.generate([], GREEDY, stream=True)) == []

    def test_bad_input_is_refused_at_once(self, engine):
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            engine.generate(input_ids=[], stream=True)
        with pytest.raises(InvalidRequestError, match="stream must be True or False, got 1"):
            engine.generate(input_ids=[1], stream=1)


def byte_ids(text):
    """The byte tokens of a text; the golden model's vocabulary has them at the front."""
    from tests.engine.small_tokenizers import byte_level

    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    return ids


class TestBytes:
    def test_characters_of_several_bytes(self, bytes_engine):
        """Tokens make some whole characters and some broken ones."""
        text = "\u00e9\U0001f600"
        ids = sorted(set(byte_ids(text)))
        assert len(ids) > 1
        params = {
            "temperature": 100.0,  # all of them equally often
            "seed": 2,
            "n": 16,
            "max_new_tokens": 120,
            "allowed_token_ids": ids,
        }
        wholes, pieces = assert_streams_the_same(
            bytes_engine, input_ids=[5], sampling_params=params
        )
        everything = "".join(whole["text"] for whole in wholes)
        assert any(character in everything for character in text)
        assert "\ufffd" in everything
        assert any(not piece["text"] for piece in pieces), "an unfinished character waits"


def text_of(ids):
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def free(one_step):
    """What the model writes without a stop."""
    ids = one_step.generate(None, LONG, PROMPT)["output_ids"]
    assert len(ids) == 240
    return tuple(ids)


class TestStopStrings:
    def unique(self, ids, first, length):
        """A piece of text that is not found earlier, from about token `first` on."""
        text = text_of(ids)
        for index in range(first, len(ids) - length):
            if text.find(text[index : index + length]) == index:
                return index, text[index : index + length]
        raise AssertionError("the model repeats itself")

    @pytest.mark.parametrize(
        ("first", "length", "include", "is_streaming"),
        [(0, 1, False, True), (3, 1, True, False), (14, 4, True, True), (9, 12, False, False)],
    )
    def test_end_the_output(self, engine, free, first, length, include, is_streaming):
        """Across tokens, and across dispatches of one or of four tokens."""
        place, stop = self.unique(free, first, length)
        params = LONG | {"stop": ["never", stop], "include_stop_str_in_output": include}
        before = num_decoded(engine)
        arguments = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
        if is_streaming:
            output = joined(engine.generate(**arguments, stream=True))[0]
        else:
            output = engine.generate(**arguments)
        # The engine was told before the caller was answered.
        state = engine.get_internal_state()
        assert state.running_batch_size == 0
        assert state.counters.num_output_tokens - before < 240
        end = place + length
        assert output["output_ids"] == [*free[:end]]
        assert output["text"] == text_of(free)[: end if include else place]
        meta = output["meta_info"]
        assert meta["finish_reason"] == {"type": "stop", "matched": stop}
        assert meta["completion_tokens"] == end
        assert [token for _, token, _ in meta["output_token_logprobs"]] == [*free[:end]]
        assert_idle(engine)

    @pytest.mark.parametrize("is_streaming", [False, True])
    def test_in_the_last_item(self, many_steps, free, is_streaming):
        """Found in the dispatch in which the request ended otherwise; the stop string wins."""
        # The stop string is completed by a token that is new, and another new one follows in the
        # same dispatch. Each has four tokens, but for the first of a stream, which has one.
        dispatches = [(i - is_streaming) // 4 for i in range(240)]
        firsts = [i for i in range(1, 240) if free[i] not in free[:i]]
        pairs = itertools.pairwise(firsts)
        last, later = next((i, j) for i, j in pairs if dispatches[i] == dispatches[j])
        place, stop = last - 1, text_of(free[last - 1 : last + 1])

        def run(**changes):
            changes = LONG | {"stop": stop} | changes
            if is_streaming:
                return joined(many_steps.generate(None, changes, PROMPT, stream=True))[0]
            return many_steps.generate(None, changes, PROMPT)

        for output in (
            run(max_new_tokens=last + 1),
            run(max_new_tokens=last + 2),
            run(stop_token_ids=[free[later]]),
        ):
            assert output["output_ids"] == [*free[: last + 1]]
            assert output["text"] == text_of(free[:place])
            reason = output["meta_info"]["finish_reason"]
            assert reason == {"type": "stop", "matched": stop}
        # A stop token is no text, so it completes no stop string.
        output = run(stop_token_ids=[free[last]])
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[last]}
        assert output["output_ids"] == [*free[: last + 1]]
        assert output["text"] == text_of(free[:last])
        # Too short for the stop string, whose beginning was held back.
        output = run(max_new_tokens=last)
        assert output["meta_info"]["finish_reason"] == {"type": "length", "length": last}
        assert output["text"] == text_of(free[:last])
        assert_idle(many_steps)

    @pytest.mark.parametrize("meanwhile", ["finished", "updated"])
    def test_told_late(self, free, meanwhile):
        """The engine hears of the stop string when the request is over, or was retracted."""
        with gate_steps(make_engine()) as engine:
            late: list[Any] = []
            outputs = inside.core(engine).outputs
            tell = outputs._on_end
            assert tell is not None
            outputs._on_end = lambda *what: late.append(what)
            place, stop = self.unique(free, 3, 2)
            call = start(lambda: engine.generate(None, LONG | {"stop": stop}, PROMPT))
            wait_until(engine, lambda state: state.counters.num_output_tokens >= place + 2)
            wait_for(call.done)
            assert len(late) == 1, "the engine is told once"
            if meanwhile == "updated":
                with held(engine):
                    updating = start(lambda: engine.update_weights(spread_weights(seed=1)))
                    wait_for(lambda: not inside.tasks(engine).empty())
                    tell(*late[0])
                wait_for(updating.done)
                assert num_decoded(engine) == place + 2
                assert updating.result(LIMIT_S) == 1
            else:
                with running():
                    wait_for(lambda: num_decoded(engine) == 240)
                tell(*late[0])
            assert call.result(LIMIT_S)["output_ids"] == [*free[: place + 2]]
            assert_idle(engine)
            assert not inside.core(engine).outputs._records
            assert engine.get_internal_state().counters.num_finished == 1


@pytest.fixture(scope="module")
def alone(one_step):
    """The tokens of another request, which has the engine to itself."""
    return one_step.generate(None, MEDIUM, OTHER_PROMPT)["output_ids"]


@pytest.fixture(scope="module")
def gated():
    """As `one_step`; takes steps when it is told to, so that no request ends before its test."""
    with gate_steps(make_engine()) as engine:
        yield engine


@pytest.fixture
def aborts(gated, alone):
    """A block whose streams end before their 3 x 240 tokens, while another request runs."""
    return aborted_streams(gated, alone)


@contextlib.contextmanager
def aborted_streams(engine, alone):
    stream = engine.generate(None, MEDIUM, OTHER_PROMPT, stream=True)
    before = engine.get_internal_state().counters
    yield
    state = engine.get_internal_state()
    unfinished = state.running_batch_size + state.waiting_queue_size
    assert unfinished == 1, "only the other request goes on"
    assert state.counters.num_output_tokens - before.num_output_tokens < 3 * 240
    output = joined(stream)[0]
    assert output["output_ids"] == alone
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 80}
    assert engine.get_internal_state().counters.num_finished == before.num_finished + 4
    assert_idle(engine)


THREE = {"input_ids": [PROMPT, [7]], "sampling_params": [LONG | {"n": 2}, LONG]}


def started(engine):
    """A stream of three answers, each of which has more than ten tokens by now."""
    stream = engine.generate(**THREE, stream=True)
    take_steps(engine, 12)
    return stream


async def started_async(engine):
    """As `started`."""
    stream = await engine.async_generate(**THREE, stream=True)
    take_steps(engine, 12)
    return stream


class TestCancelling:
    @pytest.mark.parametrize("num_read", [0, 10])
    def test_close(self, gated, aborts, num_read):
        with aborts:
            stream = started(gated)
            list(itertools.islice(stream, num_read))
            stream.close()
            stream.close()
            assert next(stream, None) is None

    @pytest.mark.parametrize("num_read", [0, 10])
    def test_dropping(self, gated, aborts, num_read):
        gc.disable()  # the count of references alone must do
        try:
            with aborts:
                stream = started(gated)
                list(itertools.islice(stream, num_read))
                del stream
        finally:
            gc.enable()

    def test_an_interrupt(self, gated, aborts, monkeypatch):
        with aborts:
            stream = started(gated)
            next(stream)

            class Interrupted:
                def get(self):
                    raise KeyboardInterrupt

            monkeypatch.setattr(stream, "_events", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                next(stream)
            assert next(stream, None) is None

    def test_closing_ends_a_waiting_thread(self, gated, aborts):
        with aborts:
            with held(gated):
                stream = gated.generate(**THREE, stream=True)
                waiting = start(lambda: list(stream))
                time.sleep(0.05)
                stream.close()
            wait_for(waiting.done)
            assert waiting.result(LIMIT_S) == []

    def test_after_the_end(self, one_step):
        before = one_step.get_internal_state().counters.num_finished
        stream = one_step.generate(None, GREEDY, PROMPT, stream=True)
        assert len(read(stream)) == 50
        stream.close()
        assert read(stream) == []
        assert one_step.get_internal_state().counters.num_finished == before + 1


class TestAsync:
    def test_pieces_add_up(self, engine):
        arguments: dict[str, Any] = {
            "input_ids": random_prompts(3, 2, 9),
            "sampling_params": GREEDY | {"temperature": 1.0, "seed": 2, "n": 2},
            "return_logprob": True,
        }

        async def main():
            return [p async for p in await engine.async_generate(**arguments, stream=True)]

        outputs = joined(asyncio.run(main()))
        for index, whole in enumerate(engine.generate(**arguments)):
            assert comparable(outputs[index]) == comparable(whole)

    def test_watched_requests_have_whole_outputs(self, one_step):
        prompts, texts = random_prompts(2, 3, 9, seed=5), ["", ""]

        def note(index, piece):
            assert piece.finish is None
            texts[index] += f"{piece.output_ids} "

        async def main():
            return await one_step.async_generate_requests(prompts, GREEDY, on_piece=note)

        wholes = one_step.generate_requests(prompts, GREEDY)
        for watched, whole, seen in zip(asyncio.run(main()), wholes, texts, strict=True):
            assert seen == "".join(f"[{token}] " for token in whole.output_ids[:-1])
            assert comparable(watched.to_dict()) == comparable(whole.to_dict())
            assert watched.scaled_logprobs == whole.scaled_logprobs

    def test_an_id_ends_a_watched_request(self, one_step):
        async def main():
            def note(index, piece):
                if piece.num_completion_tokens == 5:
                    start(lambda: one_step.abort_request("some"))

            return await one_step.async_generate_requests(
                [PROMPT], LONG, rid=["some"], on_piece=note
            )

        (output,) = asyncio.run(main())
        assert output.finish.type == "abort"
        assert 5 <= len(output.output_ids) == len(output.token_weight_versions) < 240

    def test_blocking_calls_in_a_running_loop(self, one_step):
        """As in a notebook."""

        async def main():
            whole = one_step.generate(None, GREEDY, PROMPT)
            outputs = joined(one_step.generate(None, GREEDY, PROMPT, stream=True))
            assert comparable(outputs[0]) == comparable(whole)
            return len(whole["output_ids"])

        assert asyncio.run(main()) == 50

    @pytest.mark.parametrize("way", ["aclose", "drop", "cancel"])
    def test_ending_early(self, gated, aborts, way):
        async def read(stream):
            async for _ in stream:
                pass
            raise AssertionError("read to the end")

        async def main():
            stream = await started_async(gated)
            assert (await anext(stream))["meta_info"]["completion_tokens"] == 1
            if way == "aclose":
                await stream.aclose()
                await stream.aclose()
            elif way == "drop":
                del stream
                return
            else:
                await end_the_reader(stream)
            assert [piece async for piece in stream] == []

        async def end_the_reader(stream):
            with held(gated):
                task = asyncio.create_task(read(stream))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        with aborts:
            asyncio.run(main())

    def test_closing_ends_a_waiting_task(self, gated, aborts):
        async def read(stream):
            return [piece async for piece in stream]

        async def main():
            with held(gated):
                stream = await gated.async_generate(**THREE, stream=True)
                task = asyncio.create_task(read(stream))
                await asyncio.sleep(0.01)
                await stream.aclose()
            return await asyncio.wait_for(task, LIMIT_S)

        with aborts:
            assert asyncio.run(main()) == []

    @pytest.mark.parametrize("is_running", [False, True])
    def test_cancelling_a_whole_answer(self, gated, aborts, is_running):
        async def main():
            task = asyncio.create_task(gated.async_generate(**THREE))
            if is_running:
                await asyncio.sleep(0)  # lets the task submit its requests
                wait_until(gated, lambda state: state.running_batch_size == 4)
            else:
                with held(gated):
                    await asyncio.sleep(0.01)
                    task.cancel()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with aborts:
            asyncio.run(main())

    def test_the_loop_ends_first(self, gated, aborts):
        """The stream outlives its loop: nobody can read it, so it ends by itself."""

        async def main():
            stream = await started_async(gated)
            await anext(stream)
            return stream

        async def read(stream):
            await anext(stream)

        with aborts:
            stream = asyncio.run(main())
            take_steps(gated)
            wait_for(lambda: not stream._open)
            with pytest.raises(StopAsyncIteration):
                asyncio.run(read(stream))

    def test_another_loop(self, gated, aborts):
        """Refused, since it would wait for ever."""

        async def main():
            with held(gated):
                stream = await gated.async_generate(**THREE, stream=True)
                other = start(lambda: asyncio.run(read(stream)))
                error = ""
                try:
                    await asyncio.wait_for(asyncio.wrap_future(other), LIMIT_S)
                except RuntimeError as raised:
                    error = str(raised)
                await stream.aclose()
            assert "made in another event loop" in error

        async def read(stream):
            await anext(stream)

        with aborts:
            asyncio.run(main())


class TestThreads:
    def test_errors_of_one_shutdown_are_not_shared(self):
        engine = gate_steps(make_engine())
        waiting = [start(lambda: engine.generate(**THREE)) for _ in range(2)]
        wait_for(lambda: engine.get_internal_state().counters.num_requests == 6)
        engine.shutdown()
        errors = [future.exception(LIMIT_S) for future in waiting]
        assert all(isinstance(error, EngineShutdownError) for error in errors)
        assert errors[0] is not errors[1]

    def test_shutdown_on_the_detokenizers_thread(self):
        """A finalizer of the user's may run there."""
        tokenizer = CharTokenizer()
        engine = make_engine(tokenizer=tokenizer)
        plain = tokenizer.decode

        def decode(ids):
            engine.shutdown()
            return plain(ids)

        tokenizer.decode = decode
        reading = start(lambda: list(engine.generate(None, LONG, PROMPT, stream=True)))
        with pytest.raises(EngineShutdownError):
            reading.result(LIMIT_S)
        start(engine.shutdown).result(LIMIT_S)
        assert not inside.thread(engine).is_alive()


class TestFailure:
    def test_a_tokenizer_that_raises_in_the_middle(self):
        tokenizer = CharTokenizer()
        with make_engine(tokenizer=tokenizer) as engine:
            free = engine.generate(None, MEDIUM, PROMPT)["output_ids"]
            other = engine.generate(None, MEDIUM, OTHER_PROMPT)["output_ids"]
            bad = next(token for token in free[10:] if token not in other)
            place = free.index(bad)
            for stop in ([], ["never"]):
                tokenizer.poison = bad
                before = num_decoded(engine)
                stream = engine.generate(None, LONG | {"stop": stop}, PROMPT, stream=True)
                text, error = "", None
                try:
                    for piece in stream:
                        text += piece["text"]
                except EngineError as raised:
                    error = str(raised)
                assert text == text_of(free[:place])
                assert f"cannot decode {bad}" in str(error)
                assert list(stream) == []
                state = engine.get_internal_state()
                assert state.running_batch_size == 0, "the engine must not go on for nobody"
                assert state.counters.num_output_tokens - before < 240
                # Not streamed, but watched for its stop string.
                with pytest.raises(EngineError, match="cannot decode"):
                    engine.generate(None, LONG | {"stop": ["never"]}, PROMPT)
                assert engine.generate(None, MEDIUM, OTHER_PROMPT)["output_ids"] == other
                tokenizer.poison = None
                assert engine.generate(None, MEDIUM, PROMPT)["output_ids"] == free
            assert_idle(engine)
            assert not inside.core(engine).outputs._records

    def test_a_tokenizer_that_raises_once(self):
        """No piece may follow the failure, though the engine hears of it late."""
        with make_engine() as engine:
            outputs = inside.core(engine).outputs
            wrapped = outputs._detokenizer._tokenizer
            assert wrapped is not None
            calls = []

            class Flaky(type(wrapped)):
                @property
                def byte_run_ids(self):
                    calls.append(None)
                    if len(calls) == 1:
                        raise RuntimeError("planted fault")
                    return {}

            wrapped.__class__ = Flaky
            outputs._on_end = lambda *_: None
            stream = engine.generate(None, LONG, PROMPT, stream=True)
            wait_for(lambda: engine.get_internal_state().counters.num_finished == 1)
            wait_for(outputs._queue.empty)
            assert stream._events.qsize() == len(calls) == 1
            with pytest.raises(EngineError, match="planted fault"):
                next(stream)


def fails_with(error, call, *arguments):
    """Calls and forgets the error, as an `except` clause does; pytest.raises keeps it."""
    with contextlib.suppress(error):
        call(*arguments)
        raise AssertionError("it should fail")


def plant(engine, fault):
    """Lets the next request fail."""
    runner, ref = inside.runner(engine), weakref.ref(engine)

    def break_step(output):
        raise RuntimeError("planted fault")

    def shut_down(output):
        engine = ref()
        assert engine is not None
        inside.group(engine).request_stop()
        raise RuntimeError("planted fault")

    if fault == "tokenizer":
        poison = engine.generate(None, GREEDY, PROMPT)["output_ids"][0]
        engine._tokenizer._tokenizer.poison = poison
    elif fault == "step":
        runner.decode = break_step
    elif fault == "shutdown":
        runner.decode = shut_down


def call_generate(engine):
    engine.generate(None, GREEDY, PROMPT)


def call_stream(engine):
    list(engine.generate(None, GREEDY, PROMPT, stream=True))


def call_async_stream(engine):
    async def read():
        async for _ in await engine.async_generate(None, GREEDY, PROMPT, stream=True):
            pass

    asyncio.run(read())


CALLS = {
    "generate": call_generate,
    "stream": call_stream,
    "async_stream": call_async_stream,
}


class TestGarbage:
    def test_50_dropped_streams_leave_nothing(self, one_step):
        list(one_step.generate(**THREE, stream=True))
        one_step.flush_cache()
        gc.collect()
        threads, arrays = threading.active_count(), len(jax.live_arrays())
        core = inside.core(one_step)
        for number in range(50):
            stream = one_step.generate(None, LONG | {"stop": "never"}, [number % 99], stream=True)
            list(itertools.islice(stream, number % 3))
            del stream
        assert_idle(one_step)
        wait_for(lambda: not core.outputs._records)
        gc.collect()
        assert threading.active_count() == threads
        assert len(jax.live_arrays()) <= arrays
        assert inside.tasks(one_step).empty()
        assert not [o for o in gc.get_objects() if type(o).__name__ == "TokenStream"]

    @pytest.mark.parametrize(
        ("how", "fails"),
        [
            ("generate", "step"),
            ("generate", "shutdown"),
            ("stream", "tokenizer"),
            ("async_stream", "nothing"),
        ],
    )
    def test_an_engine_is_freed_without_a_collection(self, how, fails):
        """Errors hold the frames that they passed, so nothing may hold the errors."""
        engine = make_engine()
        alive, thread = weakref.ref(engine), inside.thread(engine)
        plant(engine, fails)
        gc.collect()
        gc.disable()
        try:
            if fails == "nothing":
                CALLS[how](engine)
            else:
                fails_with(EngineError, CALLS[how], engine)
            del engine
            # asyncio has cycles of its own.
            collect = gc.collect if how.startswith("async") else lambda: None
            wait_for(lambda: (collect(), alive())[1] is None)
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        finally:
            gc.enable()
