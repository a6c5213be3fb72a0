"""Connections that send nothing, that are too many, or whose client takes nothing."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sgljax_engine import InvalidConfigError
from sgljax_engine.server import ServerConfig
from tests.server.served import serving
from tests.threads import LIMIT_S, running, wait_for


def connect(served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.server.port), LIMIT_S)


def read_to_end(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def num_connections(served) -> int:
    return len(served.server._uvicorn.server_state.connections)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
)
def test_headers_have_a_deadline(engine, sent):
    """Also those of a later request of the connection."""
    with serving(engine, body_timeout_s=0.1) as served:
        connection = connect(served)
        connection.sendall(sent)
        answer = read_to_end(connection)
        wait_for(lambda: num_connections(served) == 0)
    assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 408") == (sent != b"")
    assert (b"the headers did not come within 0.1 s" in answer) == (sent != b"")


def test_a_request_in_time_is_answered_and_its_connection_kept(engine):
    with serving(engine, body_timeout_s=0.1) as served:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
        for _ in range(3):
            assert served.post("/generate", body).status_code == 200
        assert num_connections(served) == 1


def test_many_silent_connections_end_and_others_are_answered(engine):
    with serving(engine, body_timeout_s=0.5) as served:
        silent = [connect(served) for _ in range(500)]
        assert served.get("/health").status_code == 200
        assert {read_to_end(each) for each in silent} == {b""}
        wait_for(lambda: num_connections(served) == 1)


def test_too_many_get_503(engine):
    with serving(engine, max_connections=4) as served:
        silent = [connect(served) for _ in range(4)]
        wait_for(lambda: num_connections(served) == 4)
        answer = read_to_end(connect(served))
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in head
        message = json.loads(content)["error"]["message"]
        assert message == "4 connections are open, the limit is 4"
        for each in silent:
            each.close()
        wait_for(lambda: num_connections(served) == 0)
        assert served.get("/health").status_code == 200


def test_open_files_have_room_for_others():
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert ServerConfig().connection_limit <= files // 2
    assert ServerConfig(max_connections=7).connection_limit == 7
    for bad in (0, files, True, 1.5):
        with pytest.raises(InvalidConfigError, match=r"max_connections must be None or .* got"):
            ServerConfig.from_options({"max_connections": bad})


def test_a_client_that_takes_nothing_is_left(engine, monkeypatch):
    monkeypatch.setattr("sgljax_engine.server.connections._STALLED_S", 0.2)
    with serving(engine) as served:
        body = {
            "input_ids": [[5, 6]] * 20,  # 6 MB, more than the sockets' buffers hold
            "sampling_params": {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": 100,
        }
        content = json.dumps(body).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", served.server.port))
            head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content)
            with running():
                client.recv(1)
                wait_for(lambda: num_connections(served) == 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)  # quickly from here on
            head, _, came = read_to_end(client).partition(b"\r\n\r\n")
    (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    assert 0 < len(came) < int(length.split(b":")[1])


def test_headers_that_are_too_large(engine):
    with serving(engine) as served:
        connection = connect(served)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000)
        assert read_to_end(connection).startswith(b"HTTP/1.1 400")


HEAD = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def leaving(stream: bool) -> bytes:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    content = json.dumps({**body, "stream": stream})
    return f"{HEAD}Content-Length: {len(content)}\r\n\r\n{content}".encode()


@pytest.mark.parametrize(
    ("sent", "num_open", "how"),
    [
        (b"", 0, "reset"),
        (b"GET /health HT", 0, "close"),
        (f"{HEAD}Content-Length: 100\r\n\r\n{{".encode(), 0, "reset"),
        (leaving(False), 1, "close"),
        (leaving(True), 1, "reset"),
        (leaving(True) * 2, 1, "reset"),
    ],
)
def test_a_client_that_leaves_is_no_line_in_a_log(engine, caplog, sent, num_open, how):
    with serving(engine) as served, running():
        engine.pause_generation("retract")
        connection = connect(served)
        connection.sendall(sent)
        generation = served.server._context.generation
        wait_for(lambda: num_connections(served) == 1 and generation.num_open == num_open)
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
        wait_for(lambda: num_connections(served) == 0 and generation.num_open == 0)
        engine.continue_generation()
    assert not [record.getMessage() for record in caplog.records]


def test_a_client_that_leaves_its_stream_is_no_line_in_a_log(engine, caplog):
    """While events are being written to it."""
    with serving(engine) as served, running():
        for _ in range(20):
            connection = connect(served)
            connection.sendall(leaving(True))
            connection.recv(300)
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
        wait_for(lambda: num_connections(served) == 0)
        wait_for(lambda: served.server._context.generation.num_open == 0)
    assert not [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00 TLS\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\n"
        b"Connection: upgrade, close\r\n\r\n",
    ],
)
def test_what_is_no_request_is_no_line_in_a_log(engine, caplog, sent):
    with serving(engine) as served:
        connection = connect(served)
        connection.sendall(sent)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200" if b"h2c" in sent else b"HTTP/1.1 400")
    assert not [record.getMessage() for record in caplog.records]


CHILD = """
import os, socket, sys
from sgljax_engine import Engine
from sgljax_engine.server import Server, ServerConfig
from tests.server.served import FOLDER
from tests.geometry import SMALL
with Engine(FOLDER, **SMALL) as engine:
    server = Server(engine, ServerConfig(port=0))
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has looked
        os._exit(0)
    server.stop()
    assert client.recv(1000) == b"", "the connection is closed"
    again = socket.socket()
    again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    again.bind(("127.0.0.1", server.port))
    again.listen()
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0
sys.stdout.write("done")
"""


@pytest.mark.soak
def test_a_forked_child_keeps_neither_port_nor_connections():
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "engine")])}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, env=env, cwd=root, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout == "done", done.stderr
