"""`serve` as a worker of a fleet, in a process of its own: from its store to its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
import pytest
from safetensors.numpy import load_file

from sgljax_engine.fleet import VersionWriter
from tests.cli import engine_words
from tests.engine.small_tokenizers import GOLDEN
from tests.fleet.routers import ScriptedRouter
from tests.threads import LIMIT_S, wait_for
from tunix_sgljax.cli.main import main

QUICK_COMPILE = "how a server starts and ends"

MODEL = GOLDEN / "qwen3_gqa_tied"


@pytest.mark.slow
def test_from_its_store_to_its_end(tmp_path):
    """It is registered once it serves the newest version, and gone before it ends."""
    writer = VersionWriter(tmp_path / "store")
    weights = load_file(MODEL / "model.safetensors")
    for step in range(3):
        writer.write({name: x + x.dtype.type(step / 64) for name, x in weights.items()})
    router = ScriptedRouter(has_ids=True)
    command = [sys.executable, "-m", "tunix_sgljax.cli.main", "serve", "--model", str(MODEL)]
    command += ["--port", "0", "--weights-store", str(tmp_path / "store"), "--join", router.url]
    command += ["--server", "replica_id=left", *engine_words.words()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        wait_for(lambda: bool(router.workers) or process.poll() is not None)
        assert process.poll() is None, process.stderr and process.stderr.read()
        (url,) = router.workers.values()
        body = {"input_ids": [1, 2], "session_params": {"min_weight_version": 3}}
        reply = httpx.post(f"{url}/generate", json=body, timeout=LIMIT_S)
        assert reply.status_code == 200, reply.text
        meta = reply.json()["meta_info"]
        assert (meta["replica_id"], meta["weight_version"]) == ("left", 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert router.workers == {}
    router.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--advertise", "http://a:1"], "--advertise goes with --join"),
        (["--join", "router:1"], "--join must be http://HOST:PORT, got 'router:1'"),
        (["--join", "http://r:1", "--advertise", "b"], "--advertise must be http://HOST:PORT"),
        (
            ["--join", "http://r:1", "--host", "0.0.0.0", "--api-key", "a", "--admin-key", "b"],
            "--join needs --advertise",
        ),
        (["--server", "weights_store=a"], "--server must not set ['weights_store']"),
    ],
)
def test_refused_before_a_model_is_loaded(capsys, options, message):
    assert main(["serve", "--model", str(MODEL), *options]) == 2
    assert message in capsys.readouterr().err
