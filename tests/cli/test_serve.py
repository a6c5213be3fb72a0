"""`serve` in a process of its own: keys, readiness, and a clean end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.cli import engine_words
from tests.engine.small_tokenizers import GOLDEN
from tests.threads import LIMIT_S
from tunix_sgljax.cli.main import main

QUICK_COMPILE = "how a server starts and ends"

MODEL = GOLDEN / "qwen3_gqa_tied"


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM]
)
def test_from_start_to_end(tmp_path, end):
    (tmp_path / "key").write_text("data\n")
    command = [sys.executable, "-m", "tunix_sgljax.cli.main", "serve", "--model", str(MODEL)]
    command += ["--port", "0", "--api-key-file", str(tmp_path / "key")]
    command += engine_words.words()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TUNIX_SGLJAX_ADMIN_KEY": "admin"},
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()  # comes when requests are answered
        assert line.startswith("serving qwen3_gqa_tied on http://127.0.0.1:"), line
        url = line.split()[-1]
        with httpx.Client(base_url=url, timeout=LIMIT_S) as http:
            body = {"prompt": "the fox", "max_tokens": 4, "model": "qwen3_gqa_tied"}
            assert http.post("/v1/completions", json=body).status_code == 401
            good = {"authorization": "Bearer data"}
            reply = http.post("/v1/completions", json=body, headers=good)
            assert reply.json()["usage"]["completion_tokens"] <= 4
            assert http.post("/pause_generation", headers=good).status_code == 401
            admin = {"authorization": "Bearer admin"}
            assert http.post("/pause_generation", headers=admin).status_code == 200
        process.send_signal(end)
        assert process.wait(LIMIT_S) == 0
        assert process.stderr is not None
        assert f"a page that shows the engine at work: {url}/\n" in process.stderr.read()


def test_a_taken_port_is_refused_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(MODEL), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert "loaded" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "needs api_key and admin_key"),
        (["--api-key", "a", "--api-key-file", "b"], "give --api-key or --api-key-file"),
        (["--api-key-file", "/no/such/file"], "No such file"),
        (["--server", "port=3"], r"--server must not set ['port']"),
        (["--server", "max_requests=0"], "max_requests must be an integer >= 1, got 0"),
        (["--server", "prot=0"], "unknown server option 'prot'"),
        (["--weights-root", "/no/such"], "weights_root must be a folder"),
    ],
)
def test_refused_before_a_model_is_loaded(capsys, monkeypatch, options, message):
    monkeypatch.delenv("TUNIX_SGLJAX_API_KEY", raising=False)
    assert main(["serve", "--model", str(MODEL), *options]) == 2
    assert message in capsys.readouterr().err
