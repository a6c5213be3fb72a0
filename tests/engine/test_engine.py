"""The engine as a caller sees it: batching, retraction, seeds, stops, errors, life and death."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from sgljax_engine import (
    Engine,
    EngineShutdownError,
    EngineStepError,
    InvalidConfigError,
    InvalidRequestError,
    SamplingParams,
    WeightSyncError,
)
from tests import inside
from tests.compilation import recorded_programs
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.small_tokenizers import CharTokenizer
from tests.engine.test_decode_rows import TWO_SIZES
from tests.geometry import SMALL
from tests.threads import LIMIT_S

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def make_engine(**given: Any) -> Engine:
    options: dict[str, Any] = {**SMALL, **given}
    model = options.pop("model_config", TINY)
    weights = options.pop("weights", None) or spread_weights(model)
    return Engine(model_config=model, weights=weights, **options)


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def one_at_a_time(engine):
    """Greedy output of a prompt alone in the engine."""

    def run(prompt, params):
        return engine.generate_requests([prompt], params)[0].output_ids

    return run


def assert_idle(engine):
    state = engine.get_internal_state()
    assert state.running_batch_size == state.waiting_queue_size == 0
    assert state.available_kv_tokens == state.total_kv_tokens


class TestOutput:
    def test_dict_format(self, engine):
        out = engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 3})
        assert set(out) == {"text", "output_ids", "meta_info"}
        assert set(out["meta_info"]) == {
            "id",
            "finish_reason",
            "prompt_tokens",
            "completion_tokens",
            "cached_tokens",
            "cache_miss_count",
            "e2e_latency",
            "time_to_first_token",
            "weight_version",
            "first_weight_version",
            "token_weight_versions",
        }
        meta = out["meta_info"]
        assert len(out["output_ids"]) == meta["completion_tokens"] == 3
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        assert meta["prompt_tokens"] == 3
        assert meta["cached_tokens"] == 0
        assert 0 < meta["time_to_first_token"] <= meta["e2e_latency"]

    def test_one_prompt_gives_a_dict_and_several_a_list(self, engine):
        params = {"max_new_tokens": 2}
        assert isinstance(engine.generate(input_ids=[1], sampling_params=params), dict)
        assert isinstance(engine.generate(input_ids=[[1]], sampling_params=params), list)
        two = engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2, "n": 2})
        assert isinstance(two, list)
        assert len(two) == 2
        assert two[0]["meta_info"]["id"] != two[1]["meta_info"]["id"]

    def test_params_of_each_prompt(self, engine):
        params = [{"max_new_tokens": n, "temperature": 0} for n in (1, 5, 3)]
        outs = engine.generate(input_ids=[[1], [2], [3]], sampling_params=params)
        assert [len(o["output_ids"]) for o in outs] == [1, 5, 3]

    def test_default_sampling_params_without_a_folder(self, engine):
        assert engine.get_default_sampling_params() == SamplingParams()


class TestBatching:
    def test_many_callers_share_dispatches(self, engine):
        before = engine.get_internal_state().counters.num_dispatches
        prompts = random_prompts(16, 5, 9, seed=9)
        params = SamplingParams(temperature=0, max_new_tokens=40)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda p: engine.generate_requests([p], params), prompts))
        used = engine.get_internal_state().counters.num_dispatches - before
        assert used < 16 * 10 / 2, "sequential callers would need ten dispatches each"


class TestRandomness:
    def test_random_seed_reproduces_an_engines_draws(self):
        runs = []
        for _ in range(2):
            with make_engine(random_seed=7) as seeded:
                runs.append(
                    seeded.generate(input_ids=[[1, 2]] * 3, sampling_params={"max_new_tokens": 8})
                )
        assert [o["output_ids"] for o in runs[0]] == [o["output_ids"] for o in runs[1]]


class TestBadInput:
    CASES = (
        ({"input_ids": [[1], []]}, "the prompt is empty"),
        ({"input_ids": [-1]}, r"\[0, 128\), got -1 at position 0"),
        ({"input_ids": [[1, 2], 3]}, "input_ids must be"),
        ({"input_ids": [[True]]}, "input_ids must be"),
        ({"input_ids": [[[1]]]}, "list of integers, got shape"),
        (
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "stop_token_ids": [128]}},
            r"stop_token_ids must be in \[0, 128\), got 128",
        ),
        ({"prompt": "hi", "input_ids": [1]}, "exactly one of prompt and input_ids"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "each of the 2 prompts, got 1"),
        ({"input_ids": [1], "sampling_params": {"n", 2}}, "must be a dict"),
    )

    @pytest.mark.parametrize(("arguments", "message"), CASES)
    def test_is_refused_and_the_engine_serves_on(self, engine, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate(**arguments)
        assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        assert_idle(engine)

    FIELDS = (
        ("temperature", -0.1, r"\[0, 1e\+06\], got -0.1"),
        ("temperature", float("nan"), "got nan"),
        ("temperature", 1e300, r"\[0, 1e\+06\]"),
        ("temperature", 10**400, "number"),
        ("temperature", "hot", "number"),
        ("top_p", 0.0, r"\(0, 1\], got 0.0"),
        ("top_p", 1.1, r"\(0, 1\], got 1.1"),
        ("top_p", "1", "number"),
        ("min_p", -0.5, r"\[0, 1\]"),
        ("max_new_tokens", -1, ">= 0, got -1"),
        ("max_new_tokens", True, "integer"),
        ("seed", -(2**63) - 1, "between -"),
        ("seed", 2**63, "between -"),
        ("stop_token_ids", [-3], ">= 0, got -3"),
        ("stop_token_ids", "abc", "list of integers"),
        ("ignore_eos", 1, "True or False"),
    )

    @pytest.mark.parametrize(("field", "value", "message"), FIELDS)
    def test_sampling_field(self, field, value, message):
        with pytest.raises(InvalidRequestError, match=f"{field} .*{message}"):
            SamplingParams.from_dict({field: value})

    def test_too_many_stop_ids(self, engine):
        with pytest.raises(InvalidRequestError, match="at most 16, got 17"):
            engine.generate(
                input_ids=[1],
                sampling_params={"max_new_tokens": 1, "stop_token_ids": list(range(17))},
            )

    OPTIONS = (
        ({"page_size": 0}, "page_size must be an integer >= 1, got 0"),  # no engine
        ({"max_running_requests": 2.5}, "max_running_requests"),  # no engine
        ({"mem_fraction_static": 1.5}, r"mem_fraction_static must be a number in .*, got 1.5"),
        ({"attention_backend": "xlaa"}, "attention_backend 'xlaa'; did you mean 'xla'"),
        ({"linear_backend": "natve"}, "linear_backend 'natve'; did you mean 'native'"),
        ({"batch_buckets": 16}, "batch_buckets must be a non-empty list"),  # no engine
        ({"mem_fraction_static": "x"}, "mem_fraction_static must be a number"),
        ({"forbid_compile": "false"}, "forbid_compile must be True or False"),
        ({"load_format": "dummy"}, "load_format='dummy' goes without weights"),
        ({"num_kv_tokens": 2}, "num_kv_tokens must be an integer >= 4"),  # no engine
        ({"load_format": "gguf"}, "load_format must be one of"),
        ({"init_new_token_ratio": 2.0}, r"init_new_token_ratio must be in \[0, 1\]"),
    )

    @pytest.mark.parametrize(("options", "message"), OPTIONS)
    def test_engine_option(self, options, message):
        threads = threading.active_count()
        with pytest.raises(InvalidConfigError, match=message):
            make_engine(**options)
        assert threading.active_count() == threads

    def test_arguments_that_contradict_one_another(self):
        with pytest.raises(InvalidConfigError, match="exactly one of model_path and model_config"):
            Engine()
        with pytest.raises(InvalidConfigError, match="weight_rules goes with weights"):
            Engine(model_config=TINY, weight_rules=[])
        with pytest.raises(InvalidConfigError, match="'safetensors' needs model_path"):
            Engine(model_config=TINY, load_format="safetensors")
        with pytest.raises(WeightSyncError, match="mapped by no rule"):
            Engine(model_config=TINY, weights=spread_weights(), weight_rules=[])


class TestCompilation:
    def test_after_warmup_nothing_compiles(self):
        with make_engine(**TWO_SIZES, forbid_compile=True) as warm:
            # Prefill of 64 tokens, copies, pages out and in, decode of 4 and 8 rows.
            assert warm.warmup() == 6
            assert warm.warmup() == 0
            with recorded_programs() as lowered:
                for seed in (1, 2):
                    prompts = random_prompts(20, 1, 120, seed=seed)
                    params = [
                        SamplingParams(
                            temperature=0.5 * (i % 3),
                            top_k=5 if i % 2 else -1,
                            max_new_tokens=1 + i,
                        )
                        for i in range(20)
                    ]
                    outs = warm.generate_requests(prompts, params)
                    assert all(o.num_cache_misses == 0 for o in outs)
        assert not lowered

    def test_warmup_can_include_scoring(self):
        with make_engine(forbid_compile=True) as warm:
            # The prefill bucket of 64 tokens, and 128 and 256 for longer sequences.
            assert warm.warmup(include_score=True) == 5 + 3
            warm.score([[1, 2, 3]] * 5 + [[1] * 200])

    def test_compiles_are_counted_and_reported(self):
        with make_engine() as cold:
            params = {"max_new_tokens": 2}
            out = cold.generate(input_ids=[1, 2], sampling_params=params)
            state = cold.get_internal_state()
            assert out["meta_info"]["cache_miss_count"] == state.num_compiles == 2
            again = cold.generate(input_ids=[3, 4], sampling_params=params)
            assert again["meta_info"]["cache_miss_count"] == 0


class TestAsync:
    def test_async_generate(self, engine, one_at_a_time):
        async def main():
            return await asyncio.gather(
                *(
                    engine.async_generate(input_ids=p, sampling_params=GREEDY)
                    for p in ([1, 2], [3, 4, 5])
                )
            )

        outs = asyncio.run(main())
        assert outs[0]["output_ids"] == one_at_a_time([1, 2], GREEDY)
        assert outs[1]["output_ids"] == one_at_a_time([3, 4, 5], GREEDY)


class TestFailure:
    def test_failing_step_fails_its_requests_only(self, engine, one_at_a_time, monkeypatch):
        runner = inside.runner(engine)
        real = runner.decode

        def broken(output):
            monkeypatch.setattr(runner, "decode", real)
            jax.tree.map(
                lambda x: x.delete(), runner.kv_memory.kv
            )  # as if donated to a failed program
            raise RuntimeError("planted fault")

        monkeypatch.setattr(runner, "decode", broken)
        with pytest.raises(EngineStepError, match="planted fault"):
            engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)
        assert_idle(engine)
        assert engine.generate_requests([[9, 8, 7]], GREEDY)[0].output_ids == one_at_a_time(
            [9, 8, 7], GREEDY
        )


class TestLife:
    def engine_threads(self):
        return [t for t in threading.enumerate() if t.name.startswith("sgljax-engine")]

    def test_after_shutdown_everything_is_refused(self):
        second = make_engine()
        second.shutdown()
        second.shutdown()
        for call in (
            lambda: second.generate(input_ids=[1], sampling_params=GREEDY),
            lambda: second.update_weights(spread_weights()),
            lambda: second.score([[1, 2]]),
            second.warmup,
            second.get_internal_state,
        ):
            with pytest.raises(EngineShutdownError):
                call()

    def test_a_constructor_that_fails_late_leaves_nothing(self):
        class Broken(CharTokenizer):
            def eos_id(self):
                raise RuntimeError("no such thing")

        threads = len(self.engine_threads())
        with pytest.raises(RuntimeError, match="no such thing"):
            make_engine(tokenizer=Broken())
        for _ in range(300):
            if len(self.engine_threads()) == threads:
                break
            time.sleep(0.05)
        assert len(self.engine_threads()) == threads

    def test_shutdown_ends_threads_and_frees_arrays(self):
        gc.collect()
        threads, arrays = len(self.engine_threads()), len(jax.live_arrays())
        second = make_engine()
        second.generate(input_ids=[1, 2], sampling_params=GREEDY)
        assert len(self.engine_threads()) == threads + 2
        second.shutdown()
        gc.collect()
        assert len(self.engine_threads()) == threads
        assert len(jax.live_arrays()) <= arrays

    def test_dropping_the_engine_ends_threads_and_frees_arrays(self):
        gc.collect()
        threads, arrays = len(self.engine_threads()), len(jax.live_arrays())
        second = make_engine()
        second.generate(input_ids=[1, 2], sampling_params=GREEDY)
        alive = weakref.ref(second)
        loop_thread = inside.thread(second)
        del second
        gc.collect()
        assert alive() is None
        loop_thread.join(timeout=LIMIT_S)
        gc.collect()
        assert len(self.engine_threads()) == threads
        assert len(jax.live_arrays()) <= arrays

    def test_callers_jax_contexts_do_not_reach_the_engine(self, one_at_a_time):
        with jax.transfer_guard("disallow_explicit"), make_engine() as guarded:
            guarded.update_weights(spread_weights())
            out = guarded.generate_requests([[9, 8, 7]], GREEDY)[0]
        assert out.output_ids == one_at_a_time([9, 8, 7], GREEDY)
