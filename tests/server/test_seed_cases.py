"""The specification's cases of pausing, flushing, determinism and sleep, over HTTP."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import httpx
import pytest

from tests.engine.interrupts import assert_stands_still, make_engine, settle, wait_until
from tests.engine.models import random_prompts
from tests.server.served import results, serving, start_generating, tokens_of
from tests.threads import running

PROMPTS = random_prompts(4, 3, 20)
SIX = random_prompts(6, 10, 40)


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        engine.warmup()
        with serving(engine) as served:
            yield served


@pytest.fixture
def served(shared):
    """Not paused, with every page free; and so it must be left."""
    with running():
        assert shared.get("/flush_cache").status_code == 200
    yield shared
    settle(shared.engine)


@pytest.fixture(scope="module")
def expected(shared):
    """What the prompts give when nobody interrupts."""
    return tokens_of(shared.generate(PROMPTS))


class TestPauseContinue:
    def test_1_pause_generation_retract_mode(self, served, expected):
        calls = start_generating(served, PROMPTS)
        busy = served.state()
        served.control("/pause_generation", {"mode": "retract"})
        state = served.state()
        sizes = ("running_batch_size", "waiting_queue_size")
        assert [busy[name] for name in sizes] == [4, 0]
        assert [state[name] for name in sizes] == [0, 4]
        assert state["available_kv_tokens"] > busy["available_kv_tokens"]
        served.control("/continue_generation", {})
        assert tokens_of(results(calls)) == expected

    def test_2_pause_generation_in_place_mode(self, served, expected):
        calls = start_generating(served, PROMPTS)
        busy = served.state()
        served.control("/pause_generation", {"mode": "in_place"})
        state = served.state()
        for name in ("running_batch_size", "running_rids", "waiting_rids", "available_kv_tokens"):
            assert state[name] == busy[name], name
        answer = served.get("/flush_cache")  # refused while requests hold pages
        assert answer.status_code == 400
        assert "Reason: 4 running request(s) hold KV pages" in answer.text
        served.control("/continue_generation", {})
        assert tokens_of(results(calls)) == expected

    def test_3_pause_continue_multiple_cycles(self, served, expected):
        calls = start_generating(served, PROMPTS)
        for cycle in range(6):
            mode = ("retract", "in_place")[cycle % 2]
            served.control("/pause_generation", {"mode": mode})
            state = served.state()
            assert state["pause_mode"] == mode
            size = {"retract": "waiting_queue_size", "in_place": "running_batch_size"}[mode]
            assert state[size] == 4
            tokens = state["counters"]["num_output_tokens"]
            served.control("/continue_generation", {})
            wait_until(served.engine, lambda s, n=tokens: s.counters.num_output_tokens > n)
        assert tokens_of(results(calls)) == expected

    def test_4_pause_generation_abort_mode(self, served, expected):
        calls = start_generating(served, PROMPTS)
        served.control("/pause_generation")  # SGLang's default mode
        outputs = results(calls)
        state = served.state()
        assert state["running_batch_size"] == state["waiting_queue_size"] == 0
        for out, whole in zip(outputs, expected, strict=True):
            assert out["meta_info"]["finish_reason"]["type"] == "abort"
            assert out["output_ids"]
            assert out["output_ids"] == whole[: len(out["output_ids"])]


class TestFlushCache:
    def test_flush_cycles(self, served):
        """Cases 1 to 4: what it frees, the state behind it, and equal tokens after it."""
        fresh, before = served.state(), None
        for _ in range(3):
            outputs = tokens_of(served.generate(SIX))
            assert outputs == (before or outputs)
            before = outputs
            used = served.state()
            assert used["tree_cache_size"] > 0
            assert used["forward_ct_decode"] > 0
            assert used["new_token_ratio"] < used["init_new_token_ratio"]
            answer = served.http.post("/flush_cache")
            assert answer.text.endswith(f"Flushed items: {used['tree_cache_size']}\n")
            state = served.state()
            assert state["available_kv_tokens"] == fresh["available_kv_tokens"]
            assert state["new_token_ratio"] == state["init_new_token_ratio"]
            for name in ("tree_cache_size", "req_to_token_pool_used", "forward_ct_decode",
                         "running_batch_size", "waiting_queue_size"):  # fmt: skip
                assert state[name] == 0, name
            for name in ("cur_batch", "last_batch", "chunked_req"):
                assert state[f"{name}_is_none"] is True, name


class TestDeterminism:
    def interrupted(self, served, prompts, mode):
        calls = start_generating(served, prompts)
        served.control("/pause_generation", {"mode": mode})
        served.control("/continue_generation", {})
        return results(calls)

    @pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[1:2], PROMPTS])
    def test_1_and_3_retract_vs_no_pause(self, served, expected, prompts):
        own = [expected[PROMPTS.index(prompt)] for prompt in prompts]
        assert tokens_of(self.interrupted(served, prompts, "retract")) == own

    @pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
    def test_2_and_4_abort_vs_no_pause(self, served, expected, prompts):
        own = expected[: len(prompts)]
        for out, whole in zip(self.interrupted(served, prompts, "abort"), own, strict=True):
            count = len(out["output_ids"])
            assert 0 < count < len(whole)
            assert out["output_ids"] == whole[:count]
        assert tokens_of(served.generate(prompts)) == own


class TestSleep:
    def test_with_preserved_state_requests_go_on(self, served, expected):
        calls = start_generating(served, PROMPTS)
        tokens = served.state()["counters"]["num_output_tokens"]
        served.control("/sleep?level=1&preserve_state=true")
        assert served.get("/is_sleeping").json() == {"is_sleeping": True}
        asleep = served.state()
        assert asleep["running_batch_size"] + asleep["waiting_queue_size"] == 4
        assert_stands_still(served.engine)
        served.control("/wake_up")
        assert served.get("/is_sleeping").json() == {"is_sleeping": False}
        assert served.state()["counters"]["num_output_tokens"] == tokens
        outputs = results(calls)
        assert tokens_of(outputs) == expected

    def test_without_it_requests_are_prefilled_again(self, served, expected):
        calls = start_generating(served, PROMPTS)
        served.control("/sleep?level=1")
        assert served.state()["asleep"] == ["weights", "kv_cache"]
        served.control("/wake_up?tags=weights")
        assert served.state()["asleep"] == ["kv_cache"]
        served.control("/wake_up?tags=kv_cache")
        assert tokens_of(results(calls)) == expected

    def test_sglangs_names(self, served, expected):
        calls = start_generating(served, PROMPTS)
        freed = served.control("/release_memory_occupation", {})["num_bytes"]
        assert freed > 0
        assert served.state()["is_sleeping"] is True
        served.control("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
        assert tokens_of(results(calls)) == expected


CURLS = (
    "curl -X POST http://localhost:8000/sleep?level=1",
    'curl -X POST "http://localhost:8000/sleep?level=2&preserve_state=true"',
    "curl http://localhost:8000/is_sleeping",
    "curl -X POST http://localhost:8000/wake_up",
)
"""The specification's lines; only the port is another."""


def run_curl(line, url):
    """Runs a line with curl, or sends what it would where curl is not installed."""
    words = shlex.split(line.replace("http://localhost:8000", url))
    if shutil.which("curl"):
        words.insert(1, "--silent")
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=600)
        return done.stdout
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    response = httpx.request(method, words[-1], timeout=600)
    response.raise_for_status()
    return response.text


def test_the_specifications_curl_lines(served, expected):
    sleep_1, sleep_2, is_sleeping, wake_up = CURLS
    for sleep in (sleep_1, sleep_2):
        calls = start_generating(served, PROMPTS)
        assert run_curl(sleep, served.url) == ""
        assert run_curl(is_sleeping, served.url) == '{"is_sleeping":true}'
        assert run_curl(wake_up, served.url) == ""
        assert run_curl(is_sleeping, served.url) == '{"is_sleeping":false}'
        assert tokens_of(results(calls)) == expected
