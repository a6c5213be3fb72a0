"""Chains of operations: the same numbers as operations alone, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu import fusion
from sgljax_cpu.fusion import fuse
from sgljax_cpu.linear import linear
from sgljax_cpu.norm import rms_norm
from sgljax_cpu.panels import pack
from tests.engine.native_cases import lanes, needs_machine_code

__all__ = ["lanes"]
pytestmark = [needs_machine_code, pytest.mark.usefixtures("lanes")]

RNG = np.random.default_rng(0)
SIZE = 40
WEIGHT = RNG.standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE**0.5
ROW = RNG.standard_normal(SIZE).astype(np.float32)
TOKENS = RNG.standard_normal((70, SIZE)).astype(np.float32)
COLUMN = RNG.standard_normal(70).astype(np.float32)
IS_KEPT = RNG.random(70) < 0.7


def project(x):
    return linear(jnp.asarray(pack(jnp.asarray(WEIGHT))), x, SIZE)


def count_chains(monkeypatch) -> list[list[str]]:
    """The operations of each chain that is traced from now on."""
    found: list[list[str]] = []
    run = fusion.run_chain

    def counted(steps: Any, *rest: Any) -> Any:
        found.append([step.operation.name for step in steps])
        return run(steps, *rest)

    monkeypatch.setattr(fusion, "run_chain", counted)
    return found


EXPRESSIONS = {
    "silu": lambda x: jax.nn.silu(x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "tanh": lambda x: 30.0 * jnp.tanh(x / 30.0),
    "powers": lambda x: x**2 - x**3 + jnp.sqrt(jnp.maximum(x, 0.0)),
    "row": lambda x: (x + ROW) * ROW[None, :] - 2.0,
    "column": lambda x: x * COLUMN[: x.shape[0], None] + (-x),
    "both": lambda x: x * ROW + jnp.tanh(x) * x,
    "where": lambda x: jnp.where(IS_KEPT[: x.shape[0], None], x, 0.0),
    "used_twice": lambda x: (x + 1.0) * (x + 1.0) / (1.0 + (x + 1.0) ** 2),
}


@pytest.mark.parametrize(
    "counts", [(1, 5, 33), pytest.param((*range(1, 20), 33, 64), marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic_between_operations(name, counts, monkeypatch):
    """One chain, whatever is between the operations; each step of it rounded alone."""
    chains = count_chains(monkeypatch)

    def run(x):
        return project(EXPRESSIONS[name](project(x)))

    together = np.asarray(jax.jit(fuse(run))(TOKENS))
    assert len(chains) == 1
    assert chains[0][0] == chains[0][-1] == "linear"
    exact = np.asarray(jax.jit(run)(TOKENS), np.float64)
    np.testing.assert_allclose(together, exact, rtol=2e-5, atol=2e-5)
    for count in counts:
        alone = jax.jit(fuse(run))(TOKENS[:count])
        np.testing.assert_array_equal(alone, together[:count])


def test_what_it_does_not_know_ends_a_chain(monkeypatch):
    chains = count_chains(monkeypatch)

    def run(x):
        x = project(x)
        return project(jnp.sort(x, axis=-1)) + jnp.sin(x)

    found = jax.jit(fuse(run))(TOKENS)
    np.testing.assert_allclose(found, jax.jit(run)(TOKENS), atol=1e-5)
    assert chains == [["linear"], ["linear", "elementwise"]]


def test_shapes_change_within_a_chain(monkeypatch):
    """The norm sees heads, the products see tokens: memory is the same."""
    chains = count_chains(monkeypatch)

    def run(x, norm):
        heads = rms_norm(project(x).reshape(-1, 5, 8), norm, 1e-6, 0.0)
        return project(heads.reshape(-1, SIZE)), heads

    norm = ROW[:8]
    found = jax.jit(fuse(run))(TOKENS, norm)
    assert chains == [["linear", "rms_norm", "linear"]]
    for one, other in zip(found, jax.jit(run)(TOKENS, norm), strict=True):
        np.testing.assert_array_equal(one, other)


def test_calls_are_looked_into(monkeypatch):
    chains = count_chains(monkeypatch)
    layer = jax.jit(lambda x: jax.nn.silu(project(x)))

    def run(x):
        for _ in range(3):
            x = layer(x) + x
        return {"x": x, "same": x, "number": 3.0 * jnp.ones(2)}

    found = jax.jit(fuse(run))(TOKENS)
    assert len(chains) == 1
    np.testing.assert_allclose(found["x"], jax.jit(run)(TOKENS)["x"], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found["x"], found["same"])


def test_long_chains_reuse_scratch_memory():
    """Against the same chain of which every value is returned."""

    def run(x):
        seen = []
        for _ in range(20):
            y = project(x)
            x = jnp.tanh(y) + project(y * ROW) * 0.5
            seen.append(x)
        return x, seen

    last = jax.jit(fuse(lambda x: run(x)[0]))(TOKENS)
    np.testing.assert_array_equal(last, jax.jit(fuse(run))(TOKENS)[0])
    np.testing.assert_array_equal(last, jax.jit(fuse(run))(TOKENS)[1][-1])


def test_nothing_to_join():
    np.testing.assert_array_equal(jax.jit(fuse(lambda x: x + 1.0))(TOKENS), TOKENS + 1.0)
    assert jax.jit(fuse(lambda: ()))() == ()
