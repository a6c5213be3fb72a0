"""The KV cache that programs leave room for, on devices that hold little."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from sgljax_engine import EngineConfig, InvalidConfigError
from sgljax_engine.builder import compilation_cache, program_memory
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.runner.compile.compiled import ProgramCache
from sgljax_engine.runner.compile.program_fit import ProgramMemory
from sgljax_engine.runner.runner import ModelRunner
from tests.engine.models import TINY
from tests.geometry import WIDE

DEVICE_BYTES = 6_000_000


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the numbers are kept; JAX keeps its programs elsewhere."""
    monkeypatch.setattr(program_memory, "compilation_cache_path", lambda _: tmp_path)
    return tmp_path


def plan(fraction: float = 0.99, **options: Any) -> tuple[ModelRunner, Any]:
    config = EngineConfig.from_options({**WIDE, "mem_fraction_static": fraction, **options})
    return build_shapes(TINY, config, "float32", None, DEVICE_BYTES)


@pytest.mark.slow
def test_pages_take_what_programs_leave():
    """All memory is used but for what is rounded off, and all programs fit."""
    runner, report = plan()
    assert report.program_bytes > 0.05 * report.free_bytes
    taken = report.kv_bytes + report.program_bytes
    assert 0.9 * report.free_bytes <= taken <= report.free_bytes
    assert runner.kv_memory.num_pages * WIDE["page_size"] == report.kv_tokens
    for call in program_memory.largest(program_memory.warm_calls(runner)):
        compiled = runner.programs.compile_alone(call, runner.kv_memory.state(runner.weights))
        needed = ProgramMemory.of(compiled).extra_bytes
        assert report.kv_bytes + needed <= report.free_bytes, call.name


@pytest.mark.slow
def test_the_number_is_kept(folder, monkeypatch):
    _, first = plan()
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text())["program_bytes"] == first.program_bytes

    def compile_alone(*_: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(ProgramCache, "compile_alone", compile_alone)
    assert plan()[1] == first
    with pytest.raises(AssertionError, match="compiled again"):
        plan(decode_steps=2)  # another configuration
    with pytest.raises(AssertionError, match="compiled again"):
        plan(0.9)


def test_where_there_is_room_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(ProgramCache, "compile_alone", None)
    for options in ({"fraction": 0.4}, {"num_kv_tokens": 1024}):  # no engine
        _, report = plan(**options)
        assert report.program_bytes == 0
        assert report.kv_bytes < report.free_bytes / 2


@pytest.mark.slow
def test_a_pool_that_leaves_programs_no_room_is_refused():
    _, report = plan()
    tokens = report.free_bytes * report.kv_tokens // report.kv_bytes // 16 * 16
    with pytest.raises(InvalidConfigError) as error:
        plan(num_kv_tokens=tokens)
    assert f"num_kv_tokens {tokens} takes" in str(error.value)
    assert f"of which programs need {report.program_bytes}" in str(error.value)


def test_a_process_that_wants_no_cache_gets_none(monkeypatch):
    """JAX's empty folder is none, not the working directory."""
    config = types.SimpleNamespace(jax_compilation_cache_dir="")
    monkeypatch.setattr(compilation_cache, "jax", types.SimpleNamespace(config=config))
    assert compilation_cache.compilation_cache_path("auto") is None
    assert compilation_cache.compilation_cache_path(None) is None
    assert compilation_cache.compilation_cache_path("somewhere") == Path("somewhere")
