"""Programs that are lowered from shapes, without weights and pages."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from sgljax_engine import Engine, EngineConfig
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.warmup import warm_calls
from tests import inside
from tests.engine.models import TINY
from tests.geometry import SMALL


def lowered(runner: ModelRunner) -> list[str]:
    state = runner.kv_memory.state(runner.weights)
    calls = warm_calls(runner, frozenset({"score", "table"}))
    return [runner.programs.lower(call, state).as_text() for call in calls]


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"max_loras": 2, "max_lora_rank": 4}, marks=pytest.mark.slow)],
    ids=["plain", "lora"],
)
def test_they_are_those_of_an_engine_with_arrays(more):
    options: dict[str, Any] = {**SMALL, **more}
    runner, memory = build_shapes(TINY, EngineConfig.from_options(options), "float32", None)
    state = runner.kv_memory.state(runner.weights)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    programs = lowered(runner)
    assert len(set(programs)) > 5
    with Engine(model_config=TINY, load_format="dummy", **options) as engine:
        found = engine.get_internal_state().memory
        assert (memory.kv_bytes, memory.weights_bytes) == (found.kv_bytes, found.weights_bytes)
        assert lowered(inside.runner(engine)) == programs
