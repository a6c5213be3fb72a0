"""The fleet's launcher: processes that are restarted, killed and ended; rows that are counted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import fleet.launch
from fleet.audit import Audit
from fleet.processes import Fleet, LaunchError, Service, free_port
from fleet.services import ROUTERS, router_service, worker_services
from tests.devices import ROOT
from tests.threads import LIMIT_S, wait_for

QUICK_COMPILE = "processes and counts, no numbers"

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
print("started", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def service(name="worker0", program=SERVER, **keywords):
    """A server that answers /health, and nothing else."""
    port = free_port()
    command = [sys.executable, "-c", program, str(port)]
    return Service(name=name, command=command, url=f"http://127.0.0.1:{port}", **keywords)


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class TestProcesses:
    def test_one_that_is_killed_is_started_again(self, tmp_path):
        events = []
        services = [service("worker0"), service("worker1")]
        with Fleet(services, tmp_path, on_event=events.append) as processes:
            processes.wait_until_healthy(LIMIT_S)
            before = processes.pids()
            psutil.Process(before["worker1"]).kill()
            wait_for(lambda: processes.pids()["worker1"] != before["worker1"])
            processes.wait_until_healthy(LIMIT_S)
            after = processes.pids()
        assert before["worker0"] == after["worker0"]
        assert events == ["worker1 ended with exit code -9, and is started again"]
        assert processes.num_restarts == 1
        assert not any(is_running(pid) for pid in (*before.values(), *after.values()))
        assert (tmp_path / "worker1.log").read_text() == "started\n" * 2

    def test_kills_only_those_that_may_be_killed(self, tmp_path):
        services = [service("router", may_be_killed=False), service("worker0")]
        with Fleet(services, tmp_path, kill_every_s=0.01) as processes:
            processes.wait_until_healthy(LIMIT_S)
            router = processes.pids()["router"]
            assert processes.num_kills == 0
            processes.start_killing()
            wait_for(lambda: processes.num_restarts >= 3)
            processes.stop_killing()
            processes.wait_until_healthy(LIMIT_S)
            assert processes.pids()["router"] == router
        assert processes.num_kills >= processes.num_restarts

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("import sys; sys.exit('no such model')", r"exit code 1:\nno such model"),
            ("import sys; sys.stdin.read()", "ended with exit code 0"),
        ],
    )
    def test_one_that_cannot_start(self, tmp_path, program, said):
        with (
            Fleet([service(program=program)], tmp_path) as processes,
            pytest.raises(LaunchError, match=said),
        ):
            processes.wait_until_healthy(LIMIT_S)
        assert processes.num_restarts == 0

    def test_one_that_ignores_sigterm_is_killed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fleet.processes._DRAIN_S", 0.1)
        deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVER
        with Fleet([service(program=deaf)], tmp_path) as processes:
            processes.wait_until_healthy(LIMIT_S)
            (pid,) = processes.pids().values()
        assert not is_running(pid)

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
    @pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    def test_children_end_with_their_parent(self, tmp_path, signal_number):
        program = textwrap.dedent(f"""
            import signal, sys, threading
            from pathlib import Path
            from fleet.processes import Fleet, Service, free_port
            def end(*_):
                raise KeyboardInterrupt
            signal.signal(signal.SIGTERM, end)
            port = free_port()
            command = [sys.executable, "-c", {SERVER!r}, str(port)]
            worker = Service(name="worker0", command=command, url=f"http://127.0.0.1:{{port}}")
            with Fleet([worker], Path({str(tmp_path)!r})) as processes:
                processes.wait_until_healthy()
                print(processes.pids()["worker0"], flush=True)
                threading.Event().wait()
            """)
        parent = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT / "examples",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert is_running(child)
            parent.send_signal(signal_number)
            parent.wait(LIMIT_S)
        wait_for(lambda: not is_running(child))


class TestServices:
    def test_workers_have_ports_of_their_own_and_join_the_router(self):
        router = service("router")
        options = {"stream_interval": 16, "dtype": "float32"}
        workers = worker_services(3, Path("model"), "gs://bucket/weights", options, router)
        assert len({worker.url for worker in workers}) == 3
        for worker in workers:
            text = " ".join(worker.command)
            assert worker.url.endswith(text.partition("--port ")[2].split()[0])
            assert f"--join {router.url} --advertise {worker.url} " in text
            assert "--weights-store gs://bucket/weights" in text
            assert text.endswith('--engine stream_interval=16 --engine dtype="float32"')

    def test_the_trainer_may_know_workers_by_their_addresses(self):
        (worker,) = worker_services(1, Path("model"), "weights", {})
        assert "--join" not in worker.command

    @pytest.mark.parametrize("name", ROUTERS)
    def test_a_router_that_is_not_installed(self, name, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(LaunchError, match=f"needs {ROUTERS[name][0]}: pip install"):
            router_service(name)


def row(*ids):
    return np.array(ids, np.int32)


def example(prompts, completions):
    """What Tunix trains on: prompts padded on the left by 0, completions on the right."""
    prompt_ids, completion_ids = np.array(prompts), np.array(completions)
    return SimpleNamespace(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_ids != 0,
        completion_ids=completion_ids,
        completion_mask=completion_ids != 0,
    )


class TestAudit:
    @pytest.fixture
    def audit(self):
        """Three rows were sampled, of which two are equal."""
        audit = Audit()
        prompts = np.array([[0, 1, 5], [0, 1, 5], [1, 5, 6]])
        audit.add_sampled(prompts, [row(7, 2), row(7, 2), row(8)], pad=0)
        return audit

    ROWS = ([[0, 1, 5], [0, 1, 5], [1, 5, 6]], [[7, 2], [7, 2], [8, 0]])

    def test_all_rows_once(self, audit):
        audit.add_trained(example(*self.ROWS))
        assert (audit.num_rows, audit.num_trained_twice, audit.num_lost) == (3, 0, 0)

    @pytest.mark.parametrize(
        ("rows", "twice", "lost"),
        [((0, 1, 2, 2), 1, 0), ((0, 1), 0, 1), ((0, 0, 0, 2), 1, 0), ((0, 2, 2), 1, 1)],
    )
    def test_rows_that_come_twice_or_not_at_all(self, audit, rows, twice, lost):
        audit.add_trained(example(*([part[i] for i in rows] for part in self.ROWS)))
        assert (audit.num_trained_twice, audit.num_lost) == (twice, lost)
        config: Any = SimpleNamespace(batch_size=1, num_generations=len(rows))
        step: Any = None
        assert not fleet.launch.is_right([step], audit, config)

    def test_a_row_with_another_token_is_another_row(self, audit):
        prompts, completions = self.ROWS
        audit.add_trained(example(prompts, [*completions[:2], [9, 0]]))
        assert (audit.num_trained_twice, audit.num_lost) == (1, 1)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--workers", "0"], "--workers must be at least 1, got 0"),
            (["--kill-every", "0"], "--kill-every must be above 0, got 0.0"),
            (["--minutes", "-1"], "--minutes must be above 0, got -1.0"),
            (["--embedded", "--kill-every", "5"], "--embedded has no servers"),
        ],
    )
    def test_options_that_contradict(self, capsys, arguments, said):
        with pytest.raises(SystemExit):
            fleet.launch.parse_args(arguments)
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "num_batches"),
        [([], 50), (["--steps", "3"], 3), (["--minutes", "1", "--steps", "3"], 3)],
    )
    def test_steps(self, arguments, num_batches):
        config = fleet.launch.read_config(fleet.launch.parse_args(arguments))
        assert config.num_batches == num_batches

    def test_minutes_are_not_cut_short_by_the_configs_steps(self):
        config = fleet.launch.read_config(fleet.launch.parse_args(["--minutes", "10"]))
        assert config.num_batches >= 1000

    def test_is_run_as_a_script(self):
        shown = subprocess.run(
            [sys.executable, "examples/fleet/run.py", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "--kill-every" in shown.stdout
