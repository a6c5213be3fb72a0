"""Start-up: programs compiled ahead of time, on several threads."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from sgljax_engine import Engine
from tests.engine.models import TINY, spread_weights

OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "max_running_requests": 2,
    "chunked_prefill_size": 64,
    "num_kv_tokens": 1024,
}


def make_engine(**options: Any) -> Engine:
    return Engine(model_config=TINY, weights=spread_weights(), **OPTIONS | options)


class TestWarmup:
    def test_lowers_on_one_thread_and_compiles_on_others(self, monkeypatch):
        threads: dict[str, set[str]] = {"lower": set(), "compile": set()}

        def watch(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                threads[name].add(threading.current_thread().name)
                return real(*args, **kwargs)

            monkeypatch.setattr(owner, name, watched)

        with make_engine() as engine:
            watch(jax.stages.Traced, "lower")
            watch(jax.stages.Lowered, "compile")
            assert engine.warmup() > 1
            assert all(name.startswith("sgljax-engine-") for name in threads["lower"])
            assert all(name.startswith("sgljax-compile") for name in threads["compile"])
            left = [t.name for t in threading.enumerate() if t.name.startswith("sgljax-compile")]
            assert left == []

    @pytest.mark.parametrize("stage", ["lower", "compile"])
    def test_errors_name_the_program(self, monkeypatch, stage):
        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("out of luck")

        with make_engine() as engine, monkeypatch.context() as patch:
            owner = {"lower": jax.stages.Traced, "compile": jax.stages.Lowered}[stage]
            patch.setattr(owner, stage, broken)
            with pytest.raises(ValueError, match="out of luck") as caught:
                engine.warmup()
            assert any(
                note.startswith("while compiling decode for shapes [(1,), ")
                for note in caught.value.__notes__
            )
            patch.undo()
            assert engine.warmup() > 1
            assert engine.generate(None, {"max_new_tokens": 3}, [1])["output_ids"]

    def test_a_second_one_compiles_nothing(self):
        with make_engine() as engine:
            assert engine.warmup() > 1
            assert engine.warmup() == 0
