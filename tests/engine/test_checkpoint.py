"""Checkpoints of a whole engine: saved by one, finished by another."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from sgljax_engine import (
    CheckpointError,
    CheckpointManager,
    EngineError,
    EngineShutdownError,
    EngineStateError,
    InvalidRequestError,
    SamplingParams,
)
from sgljax_engine.core.commands.checkpoint import RequestMark
from sgljax_engine.runner.scorer import Scorer
from tests.engine.interrupts import (
    NUM_TOKENS,
    device_bytes,
    make_engine,
    settle,
    start_all,
    wait_until,
)
from tests.engine.models import random_prompts, spread_weights
from tests.engine.small_tokenizers import CharTokenizer
from tests.geometry import CHUNKED, other
from tests.threads import LIMIT_S, start

PROMPTS = random_prompts(12, 3, 60)
PARAMS = [SamplingParams(temperature=0, max_new_tokens=40 + 10 * i) for i in range(12)]
RIDS = [f"r{i}" for i in range(12)]


def generate(engine, **given: Any):
    """One call with all prompts."""
    return start(
        lambda: engine.generate(input_ids=PROMPTS, sampling_params=PARAMS, rid=RIDS, **given)
    )


def run_until_some_are_finished(engine, call):
    """Between two dispatches: some requests are finished, some run, some wait. Pauses."""
    state = wait_until(engine, lambda s: s.counters.num_finished >= 2)
    engine.pause_generation("in_place")
    state = engine.get_internal_state()
    assert state.running_batch_size
    assert not call.done()
    return state


@pytest.fixture(scope="module")
def expected():
    with make_engine() as engine:
        outs = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
        return dict(zip(RIDS, outs, strict=True))


def assert_same(futures, expected):
    assert sorted(futures) == sorted(expected)
    for rid, future in futures.items():
        out = future.result(LIMIT_S).to_dict()
        assert out["output_ids"] == expected[rid]["output_ids"], rid
        assert out["text"] == expected[rid]["text"]
        assert out["meta_info"]["finish_reason"] == expected[rid]["meta_info"]["finish_reason"]


@pytest.fixture(scope="module")
def first_folder(tmp_path_factory):
    """A checkpoint of requests that are finished, run and wait."""
    folder = tmp_path_factory.mktemp("first") / "saved"
    with make_engine() as engine:
        call = generate(engine, return_logprob=True)
        run_until_some_are_finished(engine, call)
        report = engine.save_checkpoint(folder)
        assert report.num_requests == len(RIDS)
    with pytest.raises(EngineShutdownError):
        call.result(LIMIT_S)
    return folder


@pytest.fixture
def saved(tmp_path, first_folder):
    """A copy of it."""
    return shutil.copytree(first_folder, tmp_path / "saved")


class TestRestore:
    def test_another_engine_finishes_them(self, tmp_path, expected):
        with make_engine() as engine:
            call = generate(engine, return_logprob=True)
            run_until_some_are_finished(engine, call)
            engine.save_checkpoint(tmp_path)
            engine.check_integrity()
            engine.continue_generation()
            outs = call.result(LIMIT_S)
            assert [o["output_ids"] for o in outs] == [
                expected[rid]["output_ids"] for rid in RIDS
            ], "saving must not interrupt"
        with make_engine() as engine:
            futures = engine.restore_checkpoint(tmp_path)
            assert_same(futures, expected)
            for rid, future in futures.items():
                found, meta = future.result(), expected[rid]["meta_info"]
                logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
                np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-4)
                assert found.token_weight_versions == [0] * len(found.output_ids)
            settle(engine)

    def test_behind_requests_that_are_there(self, saved, expected):
        with make_engine() as engine:
            calls = start_all(engine, [[1, 2, 3], [4, 5]])
            futures = engine.restore_checkpoint(saved)
            assert_same(futures, expected)
            assert all(len(call.result(LIMIT_S).output_ids) == NUM_TOKENS for call in calls)
            settle(engine)

    def test_a_callback_cannot_wait_for_the_thread_that_runs_it(self, saved, expected, tmp_path):
        errors: list[BaseException] = []
        with make_engine() as engine:
            calls = (
                lambda: engine.generate(input_ids=[5, 6]),
                lambda: engine.generate(input_ids=[5, 6], stream=True),
                lambda: asyncio.run(engine.async_generate(input_ids=[5, 6])),
                engine.pause_generation,
                engine.get_internal_state,
                lambda: engine.save_checkpoint(tmp_path / "other"),
                lambda: engine.restore_checkpoint(saved),
                lambda: asyncio.run(engine.async_sleep()),
            )

            def call_all(future):
                if threading.current_thread() is threading.main_thread():
                    return  # it was done before
                for call in calls:
                    try:
                        call()
                    except EngineError as error:
                        errors.append(error)

            futures = engine.restore_checkpoint(saved)
            for future in futures.values():
                future.add_done_callback(call_all)
            assert_same(futures, expected)
            settle(engine)
            assert len(engine.generate(input_ids=[5, 6])["output_ids"])
        assert errors
        assert len(errors) % len(calls) == 0
        for error in errors:
            assert isinstance(error, EngineStateError)
            assert "on its own thread" in str(error)

    def test_ids_in_use_restore_nothing(self, saved, expected):
        with make_engine() as engine:
            engine.pause_generation()
            call = start(lambda: engine.generate(input_ids=[1, 2], rid="r3"))
            wait_until(engine, lambda s: s.waiting_queue_size == 1)
            with pytest.raises(CheckpointError, match="r3"):
                engine.restore_checkpoint(saved)
            assert engine.get_internal_state().waiting_queue_size == 1
            engine.continue_generation()
            call.result(LIMIT_S)
            assert_same(engine.restore_checkpoint(saved), expected)

    def test_twice_is_refused_while_unfinished(self, saved, expected):
        with make_engine() as engine:
            engine.pause_generation()
            futures = engine.restore_checkpoint(saved)
            with pytest.raises(CheckpointError, match="not all answered"):
                engine.restore_checkpoint(saved)
            engine.continue_generation()
            assert_same(futures, expected)

    def test_a_restored_engine_can_be_saved_again(self, saved, expected, tmp_path):
        with make_engine() as engine:
            futures = engine.restore_checkpoint(saved)
            wait_until(engine, lambda s: s.counters.num_finished >= 2)
            engine.pause_generation("in_place")
            report = engine.save_checkpoint(tmp_path / "again")
            assert report.num_requests == len(RIDS)
            del futures
        with make_engine() as engine:
            assert_same(engine.restore_checkpoint(tmp_path / "again"), expected)


class TestWeights:
    def test_versions_go_on(self, tmp_path, expected):
        with make_engine() as engine:
            for _ in range(3):
                engine.update_weights(spread_weights())
            call = generate(engine)
            run_until_some_are_finished(engine, call)
            engine.save_checkpoint(tmp_path)
        with make_engine() as engine:
            assert_same(futures := engine.restore_checkpoint(tmp_path), expected)
            assert engine.weight_version == 3
            for future in futures.values():
                assert set(future.result().token_weight_versions) == {3}

    def test_other_weights_continue_under_a_higher_version(self, tmp_path, caplog):
        """As after an update with mode="retract"."""
        other = spread_weights(seed=1)
        with make_engine() as engine:
            engine.update_weights(spread_weights())
            call = generate(engine)
            run_until_some_are_finished(engine, call)
            engine.save_checkpoint(tmp_path)
        with make_engine(weights=other) as engine:
            with caplog.at_level(logging.WARNING):
                futures = engine.restore_checkpoint(tmp_path)
            assert "under a higher version" in caplog.text
            outs = [future.result(LIMIT_S) for future in futures.values()]
            assert engine.weight_version == 2
            mixed = 0
            for out in outs:
                versions = out.token_weight_versions
                assert versions == sorted(versions)
                begin = versions.count(1)
                if begin < len(versions):
                    assert set(versions[begin:]) == {engine.weight_version}
                    mixed += begin > 0
                    again = engine.generate(
                        input_ids=out.prompt_ids + out.output_ids[:begin],
                        sampling_params={
                            "temperature": 0,
                            "max_new_tokens": len(versions) - begin,
                        },
                    )
                    assert again["output_ids"] == out.output_ids[begin:]
            assert mixed

    def test_prompts_are_scored_again_under_other_weights(self, tmp_path):
        prompt, other = PROMPTS[3] * 3, spread_weights(seed=1)
        params = {"temperature": 0, "max_new_tokens": 4}
        asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": params}
        with make_engine(**CHUNKED) as engine:
            call = start(lambda: engine.generate(input_ids=prompt, rid="a", **asked))
            wait_until(engine, lambda s: s.counters.num_prefill_tokens > 0)
            engine.pause_generation()
            engine.save_checkpoint(tmp_path)
            assert not call.done()
        (request,) = CheckpointManager(tmp_path).load().scheduler_state.requests.values()
        assert request.prompt_logprobs is not None
        assert not request.output_ids
        with make_engine(weights=other) as engine:
            expected = engine.generate(input_ids=prompt, **asked)
            out = engine.restore_checkpoint(tmp_path)["a"].result(LIMIT_S).to_dict()
        found, wanted = (
            [entry[0] for entry in each["meta_info"]["input_token_logprobs"][1:]]
            for each in (out, expected)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-4)


class TestRefusals:
    def test_missing(self, tmp_path, caplog):
        with make_engine() as engine:
            with pytest.raises(CheckpointError, match="nowhere"):
                engine.restore_checkpoint(tmp_path / "nowhere")
            with caplog.at_level(logging.WARNING):
                assert engine.restore_checkpoint(tmp_path / "nowhere", missing_ok=True) == {}
            assert "nowhere" in caplog.text
            assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})

    def test_a_bad_checkpoint_restores_nothing(self, saved):
        """The kinds of damage are in `test_checkpoint_folder.py`."""
        (arrays,) = saved.glob("*.safetensors")
        arrays.write_bytes(arrays.read_bytes()[:-1])
        with make_engine() as engine:
            with pytest.raises(CheckpointError, match=str(arrays)):
                engine.restore_checkpoint(saved, missing_ok=True)
            assert engine.get_internal_state().waiting_queue_size == 0
            assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})
            settle(engine)

    def test_a_request_that_does_not_fit_here(self, saved, expected, caplog):
        """It is refused by itself; the others go on."""
        with make_engine(**other("some requests are too long", max_model_len=150)) as engine:
            futures = engine.restore_checkpoint(saved)
            lengths = [
                len(prompt) + (params.max_new_tokens or 0)
                for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
            fits = {rid: length <= 150 for rid, length in zip(RIDS, lengths, strict=True)}
            assert True in fits.values()
            assert False in fits.values()
            for rid, future in futures.items():
                if fits[rid]:
                    assert future.result(LIMIT_S).output_ids == expected[rid]["output_ids"]
                else:
                    with pytest.raises(InvalidRequestError, match="max_model_len = 150"):
                        future.result(LIMIT_S)
            settle(engine)

    def test_what_is_finished_is_there_however_long(self, saved, expected):
        finished = CheckpointManager(saved).load().scheduler_state.finished_req_ids
        with make_engine(max_model_len=8) as engine:  # no engine that computes
            futures = engine.restore_checkpoint(saved)
            for rid in finished:
                assert futures[rid].result(LIMIT_S).output_ids == expected[rid]["output_ids"]
        assert finished

    @pytest.mark.parametrize("version", [-1, 2**40, None])
    def test_a_weight_version_that_never_was(self, saved, version):
        checkpoint = CheckpointManager(saved).load()
        checkpoint.metadata["weight_version"] = version
        CheckpointManager(saved).save(checkpoint)
        with make_engine() as engine:
            with pytest.raises(CheckpointError, match="weight_version must be in"):
                engine.restore_checkpoint(saved)
            assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})

    def test_a_refusal_keeps_no_engine_alive(self, saved):
        engine = make_engine(max_model_len=8)  # no engine that computes
        futures = engine.restore_checkpoint(saved)
        gone = weakref.ref(engine)
        with pytest.raises(InvalidRequestError):
            futures["r11"].result(LIMIT_S)
        del engine
        assert gone() is None


class TestSaving:
    def test_decoding_goes_on_while_it_is_written(self, tmp_path, monkeypatch):
        reached, let_go = threading.Event(), threading.Event()
        save = CheckpointManager.save

        def slow(self, checkpoint):
            reached.set()
            assert let_go.wait(LIMIT_S)
            return save(self, checkpoint)

        monkeypatch.setattr(CheckpointManager, "save", slow)
        with make_engine() as engine:
            call = generate(engine)
            wait_until(engine, lambda s: s.counters.num_first_tokens >= 1)
            saving = start(lambda: engine.save_checkpoint(tmp_path))
            assert reached.wait(LIMIT_S)
            call.result(LIMIT_S)  # to the last token
            assert not saving.done()
            let_go.set()
            assert saving.result(LIMIT_S).num_requests == 12

    def test_a_save_that_fails_keeps_no_weights(self, tmp_path, monkeypatch):
        base = device_bytes()

        def fail(self, now_s):
            raise MemoryError("injected")

        monkeypatch.setattr(RequestMark, "checkpoint", fail)
        engine = make_engine()
        call = generate(engine)
        wait_until(engine, lambda s: s.counters.num_first_tokens >= 1)
        with pytest.raises(MemoryError, match="injected"):
            engine.save_checkpoint(tmp_path)
        engine.sleep(level=2)
        assert device_bytes() == base
        engine.shutdown()
        del call

    @pytest.mark.slow
    def test_asleep(self, tmp_path, expected):
        """A sleeping engine saves; restored requests wait for waking."""
        with make_engine() as engine:
            call = generate(engine)
            run_until_some_are_finished(engine, call)
            engine.continue_generation()
            engine.sleep(preserve_state=True)
            engine.save_checkpoint(tmp_path)
            engine.wake_up()
            call.result(LIMIT_S)
        with make_engine() as engine:
            engine.sleep()
            futures = engine.restore_checkpoint(tmp_path)
            state = engine.get_internal_state()
            assert state.running_batch_size == 0
            assert state.counters.num_dispatches == 0
            engine.wake_up()
            assert_same(futures, expected)
            settle(engine)

    def test_what_failed_stays_failed(self, tmp_path, monkeypatch):
        """A caller who waits for others too learns of it from the checkpoint."""

        def fail(self, request):
            raise RuntimeError("injected")

        with make_engine() as engine:
            with monkeypatch.context() as patch:
                patch.setattr(Scorer, "score_prompt", fail)
                call = start(
                    lambda: engine.generate(
                        input_ids=[[1, 2, 3], [4, 5, 6]],
                        sampling_params={"temperature": 0, "max_new_tokens": NUM_TOKENS},
                        return_logprob=True,
                        logprob_start_len=[-1, 0],
                        rid=["good", "bad"],  # whoever fails first ends the call
                    )
                )
                wait_until(engine, lambda s: s.counters.num_finished == 1)
            engine.pause_generation()
            engine.save_checkpoint(tmp_path)
            del call
        with make_engine() as engine:
            futures = engine.restore_checkpoint(tmp_path)
            with pytest.raises(EngineError, match="injected"):
                futures["bad"].result(LIMIT_S)
            assert len(futures["good"].result(LIMIT_S).output_ids) == NUM_TOKENS

    @pytest.mark.parametrize(("end", "include_stop"), [(6, False), (8, True)])
    def test_what_a_stop_string_ended_is_cut_as_it_was(self, tmp_path, include_stop, end):
        """It is found again, where the last token completed it and where more were made."""
        options = {"tokenizer": CharTokenizer()}
        params = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        with make_engine(**options) as engine:
            text = engine.generate(input_ids=[5, 6, 7], sampling_params=params)["text"]
            short = params | {
                "stop": [text[end - 2 : end]],
                "include_stop_str_in_output": include_stop,
            }
            expected = engine.generate(input_ids=[5, 6, 7], sampling_params=short)
            assert len(expected["output_ids"]) == end
            call = start(
                lambda: engine.generate(
                    input_ids=[[5, 6, 7], [4, 5]], sampling_params=[short, params], rid=["a", "b"]
                )
            )
            before = engine.get_internal_state().counters.num_finished
            wait_until(engine, lambda s: s.counters.num_finished > before)
            engine.pause_generation()
            engine.save_checkpoint(tmp_path)
            assert not call.done()
        with make_engine(**options) as engine:
            out = engine.restore_checkpoint(tmp_path)["a"].result(LIMIT_S).to_dict()
        assert out["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        assert out["text"] == expected["text"]
        assert out["output_ids"] == expected["output_ids"]

    def test_an_id_is_taken_until_its_call_is_answered(self, tmp_path):
        """Else a checkpoint would have two requests of one id."""
        with make_engine() as engine:
            call = generate(engine)
            wait_until(engine, lambda s: s.counters.num_finished >= 1)
            assert not call.done()
            with pytest.raises(InvalidRequestError, match="r0"):
                engine.generate(input_ids=[1], rid="r0")
            engine.save_checkpoint(tmp_path)
            call.result(LIMIT_S)
            assert engine.generate(input_ids=[1], rid="r0")

    def test_shutdown_answers_whoever_saves(self, tmp_path, monkeypatch):
        with make_engine() as engine:
            engine.save_checkpoint(tmp_path)
        with pytest.raises(EngineShutdownError):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(EngineShutdownError):
            engine.restore_checkpoint(tmp_path)
