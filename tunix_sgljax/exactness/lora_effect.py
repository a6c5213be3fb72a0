from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine import LoraRule, WeightRule
from tunix_sgljax.lora import LoraMode, in_device_memory


class LoraEffect(NamedTuple):
    """The change of the weights by the pairs: as the rollout has it, against scale A B exactly.

    `correlation` is the cosine of the two changes over all weights with a pair, `norm_ratio` the
    norm of the rollout's change over that of the exact one.
    """

    mode: LoraMode
    correlation: float
    norm_ratio: float


def lora_effect(
    named: Mapping[str, Any], rules: Sequence[WeightRule], mode: LoraMode, dtype: str
) -> LoraEffect | None:
    """What rounding to the engine's dtype leaves of the pairs.

    None if the pairs change nothing, as before the first step, or have MaxText's axes.
    """
    sums = np.zeros(3)
    for rule in rules:
        if not isinstance(rule, LoraRule):
            continue
        if rule.stacked_axes or rule.is_merged:
            return None
        arrays = [in_device_memory(named[name]) for name in (rule.weight, rule.a, rule.b)]
        sums += np.asarray(
            _products(*arrays, rule.scale, in_axes=rule.in_axes, mode=mode, dtype=dtype), np.float64
        )
    both, exact, kept = sums
    if not exact:
        return None
    correlation = both / np.sqrt(exact * kept) if kept else 0.0
    return LoraEffect(mode, float(correlation), float(np.sqrt(kept / exact)))


@functools.partial(jax.jit, static_argnames=("in_axes", "mode", "dtype"))
def _products(
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    *,
    in_axes: tuple[int, ...],
    mode: LoraMode,
    dtype: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Products of the exact and the kept change: of both, of the first and of the second."""
    a, b = a.astype(jnp.float32), scale * b.astype(jnp.float32)
    others = [axis for axis in range(weight.ndim) if axis not in in_axes]

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        out = jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
        return jnp.moveaxis(out, range(weight.ndim), (*in_axes, *others))

    exact = product(a, b)
    if mode == "adapter":
        rounded = [x.astype(dtype).astype(jnp.float32) for x in (a, b)]
        kept = product(*rounded)
    else:
        base = weight.astype(jnp.float32)
        kept = (base + exact).astype(dtype).astype(jnp.float32)
        kept -= weight.astype(dtype).astype(jnp.float32)
    return (exact * kept).sum(), (exact * exact).sum(), (kept * kept).sum()
