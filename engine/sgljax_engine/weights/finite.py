"""Whether new weights are finite: found where they are made, by the programs that make them.

A weight that holds NaN turns all logits into NaN, of which the engine would go on taking token 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.errors import WeightSyncError

_MAX_NAMED = 8
"""Weights that an error names; a trainer that diverges has NaN in all of them."""


def is_finite(x: jax.Array) -> jax.Array:
    """Whether an array holds neither NaN nor infinity: bool []. Traced by JAX.

    The sum of all elements, each times 0, is NaN if one is NaN or infinite. XLA's code for CPUs
    finds it several times as fast as a conjunction of `jnp.isfinite`, and compiles it in a fraction
    of the time; its maximum overlooks NaN.
    """
    return jnp.sum(x * 0) == 0


def refuse_not_finite(names: Sequence[str], flags: jax.Array | Sequence[bool] | None) -> None:
    """Raises WeightSyncError for new weights that are not finite; waits for the device.

    Args:
        names: Of the weights.
        flags: From `is_finite`, one for each; None refuses nothing.
    """
    if flags is None:
        return
    bad = [name for name, good in zip(names, np.asarray(flags), strict=True) if not good]
    if not bad:
        return
    more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
    raise WeightSyncError(
        f"{len(bad)} of {len(names)} new weights hold NaN or infinity (check_finite=False takes "
        f"them all the same): {', '.join(map(repr, bad[:_MAX_NAMED]))}{more}"
    )
