"""Commands under Pathways: a stand-in for pathwaysutils registers CPU devices as the proxy's.

The devices are those of tests/engine/remote_devices.py, here as the only ones that JAX has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.threads import LIMIT_S
from tunix_sgljax.cli import pathways
from tunix_sgljax.cli.main import main

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "golden" / "qwen3_gqa_tied"

STAND_IN = """
import os
from jax.extend import backend
from jaxlib import _pathways

def initialize():
    assert os.environ["JAX_BACKEND_TARGET"] == "grpc://nowhere:1"
    make = lambda: _pathways._create_cpu_client({0, 1}, {0: 7, 1: 7})
    backend.register_backend_factory("proxy", make, priority=-1)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a command where pathwaysutils is the stand-in."""
    module = pytest.importorskip("jaxlib._pathways")
    if not hasattr(module, "_create_cpu_client"):
        pytest.skip("this jaxlib makes no CPU client for tests")
    (tmp_path / "pathwaysutils.py").write_text(STAND_IN)
    information = tmp_path / "pathwaysutils-0.1.13.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: pathwaysutils\nVersion: 0.1.13\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "engine")])
    env = {**os.environ, "PYTHONPATH": path, "JAX_BACKEND_TARGET": "grpc://nowhere:1"}

    def run_command(*argv: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tunix_sgljax.cli.main", *map(str, argv)],
            env={**env, "JAX_PLATFORMS": "proxy"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return run_command


@pytest.mark.slow
def test_doctor_explains_the_set_up(run):
    result = run("doctor", "--model", MODEL)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        "  pathwaysutils 0.1.13",
        "Pathways: this one process controls the devices of all hosts",
        "  proxy (JAX_BACKEND_TARGET): grpc://nowhere:1",
        "  not tried: Pathways itself",
        "  not native, since it is for a CPU of this process",
        "note: the devices do not say how much memory is free",
    ):
        assert f"\n{line}" in result.stdout


@pytest.mark.soak
def test_a_model_completes_prompts(run):
    greedy = ["--temperature", "0", "--max-new-tokens", "4"]
    result = run("generate", "--model", MODEL, *greedy, "1 + 1 =")
    assert result.returncode == 0, result.stdout + result.stderr


def test_commands_want_pathwaysutils(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    assert main(["generate", "--model", str(MODEL), "x"]) == 2
    assert "error: JAX_PLATFORMS asks for Pathways" in capsys.readouterr().err


@pytest.mark.parametrize("platforms", [None, "cpu", "tpu,cpu"])
def test_nothing_happens_elsewhere(monkeypatch, platforms):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    pathways.initialize()
