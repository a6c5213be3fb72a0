"""The kernel for TPUs that applies the delta rule to a token of each row, interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from sgljax_engine.layers import delta_net
from sgljax_engine.layers.delta_net import Heads
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.layers.tpu import TpuHeads
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from tests.devices import run_python
from tests.tiers import tiered

HEADS = TpuHeads(interpret=True)
KERNELS = XlaKernels(heads=HEADS)


def case(num_groups, ratio, key_dim, value_dim, num_rows=3):
    """States and heads as nets have them; the second row neither decays nor changes."""
    rng = np.random.default_rng(0)
    num_heads = num_groups * ratio
    state = rng.normal(size=(num_rows, num_heads, key_dim, value_dim))
    q, k = rng.normal(size=(2, num_rows, num_groups, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(num_rows, num_groups, ratio, value_dim))
    decay = -rng.exponential(size=(num_rows, num_heads))
    rate = rng.uniform(size=(num_rows, num_heads))
    decay[1] = rate[1] = 0.0
    q, k, v, *rest = (jnp.asarray(x, jnp.float32) for x in (q, k, v, state, decay, rate))
    state, decay, rate = rest
    return state, Heads(q, k, v), decay, rate


def exact(state, heads, decay, rate):
    """The rule as it is written, in float64."""
    state, decay, rate = (np.asarray(x, np.float64) for x in (state, decay, rate))
    q, k, v = (np.asarray(x, np.float64) for x in heads)
    ratio = v.shape[2]
    q, k = (np.repeat(x, ratio, axis=1) for x in (q, k))
    state = state * np.exp(decay)[..., None, None]
    change = rate[..., None] * (
        v.reshape(*q.shape[:2], v.shape[-1]) - np.einsum("bvhd,bvh->bvd", state, k)
    )
    state = state + k[..., None] * change[:, :, None]
    return state, np.einsum("bvhd,bvh->bvd", state, q)


@pytest.mark.parametrize(
    "sizes",
    tiered([(2, 1, 128, 128), (4, 4, 128, 256), (1, 3, 128, 128)], [(2, 1, 128, 128)]),
    ids=["equal", "ratio_four", "one_key_head"],
)
def test_it_is_the_rule(sizes):
    arguments = case(*sizes)
    assert KERNELS.steps_in_slots(arguments[0])
    found = KERNELS.delta_step(*arguments, jnp.arange(3, dtype=jnp.int32))
    for ours, expected in zip(found, exact(*arguments), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6)
    np.testing.assert_array_equal(found[0][1], arguments[0][1])


@pytest.mark.parametrize(
    ("slots", "interpret"),
    [
        ([4, 1, 0], True),
        ([NO_SLOT, 3, NO_SLOT], True),
        # Blocks as on a chip: fetched and written back where their index changes, NaN before.
        ([4, NO_SLOT, 0], pltpu.InterpretParams(uninitialized_memory="nan")),
        ([NO_SLOT, NO_SLOT, 3], pltpu.InterpretParams(uninitialized_memory="nan")),
        ([2, NO_SLOT, NO_SLOT], pltpu.InterpretParams(uninitialized_memory="nan")),
        ([NO_SLOT] * 3, pltpu.InterpretParams(uninitialized_memory="nan")),
    ],
)
def test_states_change_in_their_slots(slots, interpret):
    """Those of used rows alone; the last row's begins with its token, whatever its slot held."""
    _, heads, decay, rate = case(4, 4, 128, 128)
    pool = np.random.default_rng(1).normal(size=(5, 16, 128, 128)).astype(np.float32)
    places = jnp.asarray(slots, jnp.int32)
    used = [row for row, slot in enumerate(slots) if slot != NO_SLOT]
    before = pool[[slots[row] for row in used]]
    decay = decay.at[2].set(-jnp.inf)
    if 2 in used:
        pool[slots[2]] = np.nan
        before[-1] = 0.0
    kernels = XlaKernels(heads=TpuHeads(interpret=interpret))
    new, out = kernels.delta_step(jnp.asarray(pool), heads, decay, rate, places)
    of_used = jax.tree.map(lambda x: x[jnp.asarray(used, jnp.int32)], (heads, decay, rate))
    expected = exact(before, *of_used)
    pool[[slots[row] for row in used]] = expected[0]
    np.testing.assert_allclose(new, pool, atol=2e-6)
    np.testing.assert_allclose(out[jnp.asarray(used, jnp.int32)], expected[1], atol=2e-6)
    skipped = [row for row in range(3) if row not in used]
    np.testing.assert_array_equal(out[jnp.asarray(skipped, jnp.int32)], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 64, 128), (2, 1, 128, 32), (3, 4, 128, 128)])
def test_other_states_are_left_to_xla(sizes):
    arguments = case(*sizes)
    assert not KERNELS.steps_in_slots(arguments[0])
    found, same = KERNELS.delta_step(*arguments), delta_net.token_step(*arguments)
    for ours, expected in zip(found, same, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
def test_heads_over_two_devices():
    run_python("-W", "ignore", "-m", "tests.engine.test_tpu_delta_step", num_devices=2)


def on_two_devices():
    """Each device steps its own heads."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    kernels = XlaKernels(heads=TpuHeads(mesh.abstract_mesh, interpret=True))
    arguments = case(2, 2, 128, 128)
    place = NamedSharding(mesh, PartitionSpec(None, "tp"))
    state = jax.device_put(arguments[0], place)
    with jax.set_mesh(mesh):
        found = jax.jit(kernels.delta_step)(state, *arguments[1:], jnp.arange(3, dtype=jnp.int32))
    assert found[0].sharding.shard_shape(state.shape) == (3, 2, 128, 128)
    for ours, expected in zip(found, exact(*arguments), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6)


if __name__ == "__main__":
    on_two_devices()
