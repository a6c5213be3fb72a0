"""The kernel for TPUs that norms and rotates heads, interpreted, against XLA's code."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.kernels.tpu import rotate
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.layers.rope import rope_tables, rope_timescales
from sgljax_engine.layers.tpu import TpuHeads

KERNELS = XlaKernels(heads=TpuHeads(interpret=True))


def case(num_tokens, num_heads, head_dim, dtype, has_norm=True, offset=0.0):
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.normal(size=(num_tokens, num_heads, head_dim)), dtype)
    weight = jnp.asarray(rng.uniform(0.5, 1.5, size=head_dim), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 4096, size=num_tokens), jnp.int32)
    tables = rope_tables(positions, rope_timescales(head_dim, 1e4))
    return x, (weight, 1e-6, offset) if has_norm else None, *tables


def differs(kernels, arguments):
    x, norm, sin, cos = arguments
    found = kernels.rotate(x, norm, sin, cos).astype(jnp.float32)
    exact = XlaKernels().rotate(x.astype(jnp.float32), norm, sin, cos)
    assert found.shape == exact.shape
    return np.max(np.abs(np.asarray(found - exact)))


@pytest.mark.parametrize(
    ("arguments", "atol"),
    [
        (case(128, 4, 128, jnp.float32), 1e-5),
        pytest.param(case(384, 3, 256, jnp.float32, offset=1.0), 1e-5, marks=pytest.mark.slow),
        pytest.param(case(256, 2, 128, jnp.float32, has_norm=False), 1e-5, marks=pytest.mark.slow),
        pytest.param(case(144, 2, 128, jnp.bfloat16), 0.06, marks=pytest.mark.slow),
    ],
    ids=["norm", "offset", "no_norm", "bfloat16"],
)
def test_heads_are_rotated_after_their_norm(arguments, atol, monkeypatch):
    monkeypatch.setattr(rotate, "_MAX_STEP_TOKENS", 64)  # several steps
    assert differs(KERNELS, arguments) < atol


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [case(8, 2, 128, jnp.bfloat16), case(128, 2, 64, jnp.bfloat16)],
    ids=["part_of_a_tile", "narrow_heads"],
)
def test_other_heads_are_left_to_xla(arguments):
    found, same = (each.rotate(*arguments) for each in (KERNELS, XlaKernels()))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(same))
