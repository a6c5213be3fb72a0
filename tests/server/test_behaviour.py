"""What a server does for clients that leave, wait, ask for too much, or may not ask."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgljax_engine import Engine, EngineShutdownError, InvalidConfigError
from sgljax_engine.server import ServerConfig
from sgljax_engine.server import generation as generation_module
from tests.engine.interrupts import assert_idle, make_engine, settle, wait_until
from tests.geometry import SMALL
from tests.server.served import (
    FOLDER,
    GREEDY,
    Served,
    events_of,
    results,
    serving,
    start_generating,
    tokens_of,
)
from tests.threads import LIMIT_S, gate_steps, running, start, wait_for

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
BODY = {"input_ids": PROMPTS[0], "sampling_params": GREEDY}


@pytest.fixture(scope="module")
def shared():
    with make_engine() as engine:
        engine.warmup()
        with serving(engine, max_requests=6, max_body_bytes=20_000) as served:
            yield served


@pytest.fixture(scope="module")
def golden():
    """An engine with a folder and a tokenizer."""
    with Engine(FOLDER, **SMALL) as engine:
        yield engine


@pytest.fixture
def served(shared):
    yield shared
    settle(shared.engine)
    wait_for(lambda: shared.server._context.generation.num_open == 0)


def raw_request(served: Served, path: str, body: dict) -> socket.socket:
    """A connection on which a request was sent."""
    content = json.dumps(body).encode()
    sent = socket.create_connection(("127.0.0.1", served.server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sent


class TestDisconnect:
    @pytest.mark.parametrize(("path", "stream"), [("/generate", False), ("/v1/completions", True)])
    def test_aborts_the_requests_and_frees_their_pages(self, served, caplog, path, stream):
        engine = gate_steps(served.engine)
        body = {**BODY, "stream": stream}
        if path != "/generate":
            body = {"prompt": PROMPTS[0], "max_tokens": 150, "ignore_eos": True, "stream": stream}
        connection = raw_request(served, path, body)
        wait_until(engine, lambda state: state.running_batch_size == 1)
        connection.close()
        wait_for(lambda: engine.get_internal_state().running_batch_size == 0)
        assert_idle(engine)
        assert not caplog.records, "a client that leaves is no error"

    def test_others_go_on(self, served):
        expected = tokens_of(served.generate(PROMPTS))
        calls = start_generating(served, PROMPTS)
        connection = raw_request(served, "/generate", BODY)
        wait_for(lambda: served.engine.get_internal_state().waiting_queue_size == 1)
        connection.close()
        assert tokens_of(results(calls)) == expected


class TestQueue:
    def test_too_many_get_503_and_may_retry(self, served):
        calls = start_generating(served, PROMPTS)
        response = served.http.post("/generate", json={"input_ids": [[5]] * 4})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "3 samples are unfinished, the limit is 6" in response.json()["error"]["message"]
        results(calls)
        assert served.post("/generate", {"input_ids": [[5]] * 4}).status_code == 200

    def test_what_never_fits_gets_400(self, served):
        response = served.post("/generate", {"input_ids": [5], "sampling_params": {"n": 7}})
        assert response.status_code == 400
        assert "asks for 7 samples, the limit is 6" in response.json()["error"]["message"]


class TestHalted:
    @pytest.mark.parametrize(("halt", "stream"), [("pause", True), ("sleep", False)])
    def test_a_client_may_say_how_long_it_waits(self, served, halt, stream):
        if halt == "pause":
            served.engine.pause_generation("retract")
        else:
            served.engine.sleep()
        headers = {"x-halt-timeout-s": "0"}
        response = served.http.post("/generate", json={**BODY, "stream": stream}, headers=headers)
        message = "generation was paused or asleep for 0 s"
        if stream:
            (error,) = events_of(response)
            assert message in error["error"]["message"]
        else:
            assert response.status_code == 503
            assert "retry-after" in response.headers
            assert message in response.json()["error"]["message"]
        assert served.engine.get_internal_state().waiting_queue_size == 0
        if halt == "sleep":
            served.engine.wake_up()

    def test_else_it_waits_and_is_answered(self, served):
        expected = tokens_of(served.generate(PROMPTS[:1]))
        gate_steps(served.engine).pause_generation("retract")
        call = start(lambda: served.http.post("/generate", json=BODY))
        wait_for(lambda: served.engine.get_internal_state().waiting_queue_size == 1)
        served.control("/continue_generation")
        assert call.result(LIMIT_S).json()["output_ids"] == expected[0]

    @pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
    def test_bad_ones(self, served, value):
        response = served.post("/generate", BODY, headers={"x-halt-timeout-s": value})
        assert response.status_code == 400
        assert "must be a number of seconds >= 0" in response.json()["error"]["message"]


class TestBodies:
    def test_too_large(self, served):
        response = served.post("/generate", {"input_ids": [1] * 20_000})
        assert response.status_code == 413
        assert "max_body_bytes = 20000" in response.json()["error"]["message"]

    def test_too_large_without_a_length(self, served):
        def parts():
            for _ in range(50):
                yield b"1" * 1000

        with httpx.Client() as http:
            response = http.post(f"{served.url}/generate", content=parts())
        assert response.status_code == 413

    def test_slow(self, shared):
        with serving(shared.engine, body_timeout_s=0.05) as slow:
            sent = socket.create_connection(("127.0.0.1", slow.server.port))
            head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
            sent.sendall(head)
            assert sent.recv(100).startswith(b"HTTP/1.1 408")
            sent.close()

    def test_unknown_routes_and_methods(self, served):
        assert served.get("/nothing").status_code == 404
        assert served.get("/nothing").json()["error"]["type"] == "not_found_error"
        assert served.get("/generate").status_code == 405


class TestKeys:
    @pytest.fixture(scope="class")
    @classmethod
    def locked(cls, shared):
        keys = {"api_key": "data", "admin_key": "admin"}
        with serving(shared.engine, **keys) as served:
            yield served

    DATA = (("GET", "/get_server_info"), ("POST", "/v1/completions"), ("GET", "/metrics"),
            ("GET", "/is_sleeping"), ("POST", "/generate"), ("POST", "/tokenize"))  # fmt: skip
    ADMIN = (("POST", "/pause_generation"), ("POST", "/sleep"), ("GET", "/flush_cache"),
             ("POST", "/abort_request"), ("POST", "/update_weights_from_disk"))  # fmt: skip

    @pytest.mark.parametrize(("routes", "name", "key", "other"), [
        (DATA, "API key", "data", "admin"),
        (ADMIN, "admin key", "admin", "data"),
    ])  # fmt: skip
    def test_each_opens_its_own_routes(self, locked, routes, name, key, other):
        for method, path in routes:
            for headers in ({}, {"authorization": f"Bearer {other}"}, {"authorization": "Basic x"},
                            {"authorization": "Bearer"}, {"authorization": key}):  # fmt: skip
                response = locked.http.request(method, path, headers=headers)
                assert response.status_code == 401, (path, headers)
                assert name in response.json()["error"]["message"]
                assert response.headers["www-authenticate"] == "Bearer"
            good = {"authorization": f"bearer {key}"}
            assert locked.http.request(method, path, headers=good).status_code != 401
        assert not locked.engine.get_internal_state().is_paused or name == "admin key"
        locked.engine.continue_generation()
        locked.engine.wake_up()

    def test_health_and_the_page_are_open(self, locked):
        assert locked.get("/health").status_code == 200
        assert locked.get("/").status_code == 200

    def test_every_other_route_needs_one(self, locked):
        """A route that is added without a key would be found here."""
        for path, methods in locked.get("/openapi.json").json()["paths"].items():
            for method in methods:
                status = locked.http.request(method, path).status_code
                is_open = path in ("/health", "/ping")
                assert status == (200 if is_open else 401), (method, path)


class TestOtherSites:
    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"host": "evil.example:30000"},
            {"origin": "http://evil.example", "host": "evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ],
    )
    def test_are_refused(self, served, headers):
        """Also a GET, as pictures send it."""
        assert served.get("/flush_cache", headers=headers).status_code == 403
        assert served.http.post("/pause_generation", headers=headers).status_code == 403
        assert not served.engine.get_internal_state().is_paused

    def test_its_own_page_is_not(self, served):
        host = served.url.removeprefix("http://")
        headers = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        response = served.http.post("/continue_generation", headers=headers)
        assert response.status_code == 200
        assert not [name for name in response.headers if "access-control" in name]


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"host": "0.0.0.0"}, "host '0.0.0.0' .* needs api_key and admin_key"),
            ({"host": "0.0.0.0", "api_key": "a"}, "needs api_key and admin_key"),
            ({"port": 70000}, r"port must be an integer in \[0, 65535\], got 70000"),
            ({"api_key": ""}, "api_key must not be empty"),
            ({"admin_key": "a\nb"}, "admin_key must be None or printable ASCII text"),
            ({"max_requests": 0}, "max_requests must be an integer >= 1, got 0"),
            ({"halt_timeout_s": -1}, "halt_timeout_s must be a number >= 0, got -1"),
            ({"weights_root": "/no/such"}, "weights_root must be a folder"),
        ],
    )
    def test_refused(self, options, message):
        with pytest.raises(InvalidConfigError, match=message):
            ServerConfig(**options)

    def test_keys_are_not_shown(self):
        with pytest.raises(InvalidConfigError) as caught:
            ServerConfig(api_key="secret\n")
        assert "secret" not in str(caught.value)

    def test_unknown_options_and_two_of_a_kind(self, served):
        with pytest.raises(InvalidConfigError, match=r"unknown server option 'prot'.*'port'"):
            served.engine.serve(prot=0)
        with pytest.raises(InvalidConfigError, match="config or options"):
            served.engine.serve(ServerConfig(), port=0)

    def test_a_port_that_is_taken(self, served):
        with pytest.raises(InvalidConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            served.engine.serve(port=served.server.port)


class TestEnd:
    def test_open_requests_are_finished(self, shared):
        with serving(shared.engine) as served:
            expected = tokens_of(served.generate(PROMPTS))
            calls = start_generating(served, PROMPTS)
            stop = start(served.server.stop)
            wait_for(lambda: served.server._context.generation.is_draining)
            late = served.http.post("/generate", json=BODY)
            assert late.status_code == 503
            assert served.get("/health").status_code == 503
            assert tokens_of(results(calls)) == expected
            stop.result(LIMIT_S)
            assert not served.server.is_running
            assert_idle(shared.engine)

    def test_and_aborted_when_it_takes_too_long(self, shared):
        with serving(shared.engine, drain_timeout_s=0) as served:
            calls = start_generating(served, PROMPTS)
            served.server.stop()
            for reply in results(calls):
                assert reply["meta_info"]["finish_reason"]["type"] == "abort"
                assert reply["output_ids"]
            assert_idle(shared.engine)

    def test_requests_of_the_process_go_on(self, shared):
        engine = shared.engine
        with serving(engine) as served:
            own = start(lambda: engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY))
            served.server.stop()
            assert own.result(LIMIT_S)["meta_info"]["finish_reason"]["type"] == "length"

    def test_shutdown_of_the_engine_ends_the_server(self):
        engine = make_engine()
        server = engine.serve(port=0)
        names = {thread.name for thread in threading.enumerate()}
        assert "sgljax-server" in names
        engine.shutdown()
        assert not server.is_running
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        server.stop()  # is idempotent

    def test_an_engine_that_ended_is_not_healthy(self):
        engine = make_engine()
        with serving(engine) as served:
            engine.shutdown()
            assert served.get("/health").status_code == 503
            response = served.post("/generate", BODY)
            assert response.status_code == 503
            assert "shut down" in response.json()["error"]["message"]
        with pytest.raises(EngineShutdownError):
            engine.get_internal_state()


class TestUpdates:
    @pytest.fixture(scope="class")
    @classmethod
    def folders(cls, tmp_path_factory):
        """The golden model, and once more with other weights."""
        root = tmp_path_factory.mktemp("weights")
        for name in ("same", "other"):
            folder = root / name
            folder.mkdir()
            for path in FOLDER.iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
        (weights,) = (root / "other").glob("*.safetensors")
        changed = {name: np.flip(value, -1).copy() for name, value in load_file(weights).items()}
        save_file(changed, weights, metadata={"format": "pt"})
        return root

    @pytest.fixture(scope="class")
    @classmethod
    def updated(cls, golden, folders):
        with serving(golden, weights_root=folders) as served:
            yield served

    def test_new_weights_serve(self, updated):
        before = tokens_of(updated.generate([[5, 6]]))
        reply = updated.ok("/update_weights_from_disk", {"model_path": "other"})
        assert reply["success"] is True
        assert reply["weight_version"] == updated.engine.weight_version
        assert tokens_of(updated.generate([[5, 6]])) != before
        body = {"model_path": "same", "weight_version": "step-2", "mode": "in_place"}
        version = updated.ok("/update_weights_from_disk", body)["weight_version"]
        found = updated.get("/get_weight_version").json()
        assert (found["weight_version"], found["label"]) == (version, "step-2")
        assert tokens_of(updated.generate([[5, 6]])) == before

    @pytest.mark.parametrize(
        ("options", "mode"),
        [
            ({"block_generation": True}, "retract"),
            ({"block_generation": True, "flush_cache": False}, "in_place"),
            ({"abort_all_requests": True}, "abort"),
            ({"block_generation": False}, "wait"),
        ],
    )
    def test_modes(self, updated, options, mode):
        """What happens to a request that runs."""

        def num_retractions():
            return updated.engine.get_internal_state().counters.num_retractions

        (call,) = start_generating(updated, [[5, 6]])
        version, before = updated.engine.weight_version, num_retractions()
        update = start(
            lambda: updated.http.post(
                "/update_weights_from_disk", json={"model_path": "same", **options}
            )
        )
        if mode == "wait":
            reply = call.result(LIMIT_S)
            assert update.result(LIMIT_S).status_code == 200
            assert set(reply["meta_info"]["token_weight_versions"]) == {version}
            return
        with_gate = update.result(LIMIT_S)
        assert with_gate.status_code == 200, with_gate.text
        reply = call.result(LIMIT_S)
        kind = reply["meta_info"]["finish_reason"]["type"]
        assert kind == ("abort" if mode == "abort" else "length")
        if mode != "abort":
            assert set(reply["meta_info"]["token_weight_versions"]) >= {version + 1}
        assert num_retractions() - before == (mode == "retract")

    @pytest.mark.parametrize(
        "path", ["..", "../..", "/etc", "none", "same/../../x", "", "same\0", "x" * 5000, "link"]
    )
    def test_no_path_outside_the_root(self, updated, folders, path):
        link = folders / "link"
        if not link.exists():
            link.symlink_to(Path(FOLDER).parent)
        response = updated.post("/update_weights_from_disk", {"model_path": path})
        assert response.status_code == 400, response.text
        reply = response.json()
        assert reply["success"] is False
        assert reply["error"]["message"] == reply["message"]

    def test_contradictions(self, updated):
        body = {"model_path": "same", "mode": "retract", "block_generation": False}
        response = updated.post("/update_weights_from_disk", body)
        assert response.status_code == 400
        assert "give one of mode, block_generation" in response.json()["message"]

    def test_without_a_root(self, served):
        response = served.post("/update_weights_from_disk", {"model_path": "same"})
        assert response.status_code == 409
        assert "without weights_root" in response.json()["message"]


class TestAbort:
    def test_by_id(self, served):
        calls = start_generating(served, PROMPTS[:1], rid="mine")
        body = {"rid": "mine", "aborted_message": "enough"}
        assert served.control("/abort_request", body)["num_aborted"] == 1
        (reply,) = results(calls)
        assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "enough"}

    def test_all(self, served):
        calls = start_generating(served, PROMPTS)
        assert served.control("/abort_request", {"rid": "", "abort_all": True})["num_aborted"] == 3
        assert {r["meta_info"]["finish_reason"]["type"] for r in results(calls)} == {"abort"}

    def test_refused(self, served):
        response = served.post("/abort_request", {})
        assert response.status_code == 400
        assert "give rid or abort_all=True" in response.json()["error"]["message"]


class TestHostileClients:
    """What a review found."""

    def test_no_template_of_its_own(self, updated_alone):
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "chat_template_kwargs": {"chat_template": "{{ 'a' * 10**9 }}"},
        }
        for path in ("/v1/chat/completions", "/tokenize"):
            response = updated_alone.post(path, body)
            assert response.status_code == 400
            assert "must not set 'chat_template'" in response.json()["error"]["message"]

    @pytest.fixture(scope="class")
    @classmethod
    def updated_alone(cls, golden):
        with serving(golden) as served:
            yield served

    def test_an_id_that_is_taken_costs_its_owner_nothing(self, served):
        calls = start_generating(served, PROMPTS[:1], rid="mine")
        served.engine.pause_generation("retract")
        headers = {"x-halt-timeout-s": "0"}
        response = served.http.post("/generate", json={**BODY, "rid": "mine"}, headers=headers)
        assert response.status_code in (400, 503)
        served.engine.continue_generation()
        (reply,) = results(calls)
        assert reply["meta_info"]["finish_reason"]["type"] == "length"

    @pytest.mark.parametrize("asks_twice", [True, False])
    def test_a_reader_that_stops_does_not_keep_the_server_from_ending(
        self, shared, asks_twice, monkeypatch
    ):
        """Far more than the sockets' buffers hold is left to send.

        Last answers have seconds to reach their clients; who asks twice waits for none.
        """
        engine = shared.engine
        if not asks_twice:
            monkeypatch.setattr(generation_module, "_LAST_ANSWERS_S", 0.1)
        num_before = engine.get_internal_state().counters.num_finished
        with serving(engine) as served:
            body = {
                "input_ids": [[5, index] for index in range(32)],
                "sampling_params": {**GREEDY, "max_new_tokens": 100},
                "return_logprob": True,
                "top_logprobs_num": 100,
                "stream": True,
            }
            content = json.dumps(body).encode()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", served.server.port))
                head = "POST /generate HTTP/1.1\r\nHost: localhost\r\n"
                head += "Content-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                with running():
                    wait_for(
                        lambda: engine.get_internal_state().counters.num_finished >= num_before + 32
                    )
                generation = served.server._context.generation
                assert generation.num_open == 32
                stop = start(lambda: served.server.stop(drain_timeout_s=0))
                if asks_twice:
                    wait_for(lambda: generation.is_draining and not generation.hurry.is_set())
                    assert not stop.done()
                    served.server.stop(drain_timeout_s=0)
                stop.result(LIMIT_S)
            assert_idle(engine)

    def test_an_index_that_names_files_elsewhere(self, golden, tmp_path):
        root = tmp_path / "root"
        folder = root / "model"
        folder.mkdir(parents=True)
        for path in FOLDER.iterdir():
            target = tmp_path if path.suffix == ".safetensors" else folder
            (target / path.name).write_bytes(path.read_bytes())
        names = load_file(tmp_path / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, "../../model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        version = golden.weight_version
        with serving(golden, weights_root=root) as served:
            response = served.post("/update_weights_from_disk", {"model_path": "model"})
            assert response.status_code == 400
            assert "not a file beside it" in response.json()["message"]
            (folder / "model.safetensors.index.json").unlink()
            (folder / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
            response = served.post("/update_weights_from_disk", {"model_path": "model"})
            assert response.status_code == 400
            assert golden.weight_version == version

    def test_many_stop_strings(self, served):
        body = {"input_ids": [5], "sampling_params": {"stop": ["a"] * 65}}
        response = served.post("/generate", body)
        assert "stop must hold at most 64 strings, got 65" in response.json()["error"]["message"]
