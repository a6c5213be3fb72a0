"""Start-up: programs compiled ahead of time, on several threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import jax
import pytest

from sgljax_engine import Engine
from sgljax_engine.builder import parts
from sgljax_engine.layers.devices import compiler_options
from sgljax_engine.runner.batches.batch import prefill_sizes, rows_above_smaller_bucket
from sgljax_engine.runner.compile.shapes import default_batch_buckets, default_token_buckets
from tests import inside
from tests.compilation import recorded_programs
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL, other
from tests.threads import LIMIT_S

CPU_ONLY = {"JAX_PLATFORMS": "cpu"}


def make_engine(**options: Any) -> Engine:
    return Engine(model_config=TINY, weights=spread_weights(), **{**SMALL, **options})


@pytest.fixture(autouse=True)
def options_are_known():
    """Which of XLA's options there are is found out once a process, by compiling something."""
    compiler_options(True)


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
                note.startswith("while compiling decode for shapes [(8,), ")
                for note in caught.value.__notes__
            )
            patch.undo()
            assert engine.warmup() > 1
            assert engine.generate(None, {"max_new_tokens": 3}, [1])["output_ids"]


class TestSeveralEngines:
    """Programs belong to the process: an engine made anew finds those of its predecessor."""

    def outputs(self, **options: Any) -> list[Any]:
        with make_engine(**options) as engine:
            engine.warmup()
            made = engine.generate(None, {"seed": 3, "max_new_tokens": 12}, [[1, 2], [3]])
            assert engine.get_internal_state().num_compiles > 0
            return [out["output_ids"] for out in made]

    def test_the_second_lowers_nothing(self):
        first = self.outputs()
        with recorded_programs() as lowered:
            assert self.outputs() == first
        assert lowered == []

    def test_one_of_other_steps_does(self):
        self.outputs()
        with recorded_programs() as lowered:
            self.outputs(**other("programs that no other test has made", decode_steps=9))
        assert len(lowered) > 0


class TestBuckets:
    @pytest.mark.parametrize(
        ("max_running", "platform", "sizes"),
        [
            (1, "gpu", (1,)),
            (8, "gpu", (1, 4, 8)),
            (256, "tpu", (1, 4, 16, 64, 256)),
            (1, "cpu", (1,)),
            (3, "cpu", (1, 3)),
            (20, "cpu", (1, 4, 8, 16, 20)),
            (64, "cpu", (1, 4, 8, 16, 32, 64)),
            (80, "cpu", (1, 4, 8, 16, 32, 64, 80)),
            (100, "cpu", (1, 4, 8, 16, 32, 64, 96, 100)),
            (256, "cpu", (1, 4, 8, 16, 32, 64, 96, 128, 192, 256)),
        ],
    )
    def test_of_batches(self, max_running, platform, sizes):
        assert default_batch_buckets(max_running, platform) == sizes

    @pytest.mark.parametrize(("size", "expected"), [(1, 2), (2, 1), (4, 3), (5, 1), (9, 5)])
    def test_rows_above_a_smaller_one(self, size, expected):
        assert rows_above_smaller_bucket((1, 4, 16), size) == expected

    def test_of_tokens(self):
        assert default_token_buckets(48, 256) == (48,)
        assert default_token_buckets(2048, 256) == (64, 2048)
        assert default_token_buckets(2000, 256) == (64, 2048)
        assert default_token_buckets(2048, None) == (256, 512, 1024, 2048)

    @pytest.mark.parametrize(
        ("buckets", "per_pass", "sizes"),
        [
            ((64, 256), 256, (64, 128, 192, 256)),
            ((64, 320, 512), 256, (64, 320, 384, 448, 512)),
            ((256, 512, 1024), None, (256, 512, 1024)),
            ((1000, 2048), 256, (1000, 1024, 1280, 1536, 1792, 2048)),
            ((48,), 256, (48,)),
        ],
    )
    def test_what_prefills_cost(self, buckets, per_pass, sizes):
        """Parts of passes where a bucket has any; else a bucket costs the same however full."""
        assert prefill_sizes(buckets, per_pass) == sizes

    @pytest.mark.slow
    def test_several_passes_prefill_what_one_does(self, monkeypatch):
        """With page sharing between requests of one dispatch, whichever pass computes the pages."""
        common = random_prompts(1, 60, 60)[0]
        prompts = [common + tail for tail in random_prompts(6, 20, 90, seed=1)] + [common] * 2
        options = other(
            "prefills of several sizes, and of several passes",
            chunked_prefill_size=1024,
            token_buckets=None,
        )
        outputs = []
        for per_pass, num_buckets in ((None, 3), (64, 2)):
            monkeypatch.setattr(parts, "prefill_pass", lambda _, size=per_pass: size)
            with make_engine(**options) as engine:
                assert len(inside.runner(engine).shapes.token_buckets) == num_buckets
                params = {"temperature": 0, "max_new_tokens": 12}
                outs = engine.generate(None, params, prompts, return_logprob=True)
                assert engine.get_internal_state().counters.num_cached_tokens > 7 * 56
            outputs.append([out["output_ids"] for out in outs])
        assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_the_compilation_cache_keeps_the_programs(tmp_path):
    """In a process of its own, whose cache is the engine's to configure."""
    code = f"""
import jax
from sgljax_engine import Engine
from tests.engine.models import TINY, spread_weights
for option, limit in (("auto", 1.0), ({str(tmp_path)!r}, 0.1)):
    if option == "auto":
        jax.config.update("jax_compilation_cache_dir", {str(tmp_path / "hosts")!r})
    Engine(model_config=TINY, weights=spread_weights(), compilation_cache_dir=option).shutdown()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == limit
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=LIMIT_S, env=os.environ | CPU_ONLY
    )
