"""Ctrl-C in a process of its own: exit code 130, no traceback, and what was made is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import engine_words
from tests.compilation import CACHE
from tests.engine.small_tokenizers import GOLDEN
from tests.threads import LIMIT_S

QUICK_COMPILE = "how interrupted commands end"

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start():
    """Starts `generate`, held at a moment of `held_main`; what goes on at the end is killed."""
    started: list[subprocess.Popen] = []

    def begin(moment, *argv):
        words = engine_words.words(compilation_cache_dir=str(CACHE), stream_interval=1)
        command = [sys.executable, "-m", "tests.cli.held_main", moment, "generate", *words]
        command += ["--model", str(GOLDEN / "qwen3_gqa_tied"), "--ignore-eos", *argv]
        process = subprocess.Popen(
            [*command, "--max-new-tokens", "500"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def assert_clean(process, out, err):
    assert process.returncode == 130
    assert "stopping; Ctrl-C again ends at once" in err
    assert "Traceback" not in err
    return out


def wait_for(process, *texts):
    """Reads stderr until these have come, in this order."""
    for text in texts:
        for line in process.stderr:
            if text in line:
                break
        else:
            raise AssertionError(f"the process ended before {text!r}")


@pytest.mark.slow
def test_while_decoding(start):
    process = start("decoding", "the quick")
    wait_for(process, "loaded", "held")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert first
    assert len(assert_clean(process, out, err)) < 2000
    assert "1 cut short" in err


@pytest.mark.slow
def test_a_second_one_ends_at_once(start):
    process = start("compiling", "the quick")
    wait_for(process, "loaded", "held")
    process.send_signal(signal.SIGINT)
    wait_for(process, "stopping")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "answer(s)" not in err
