"""Checks that new weights are finite, inside the programs that make them.

A weight that holds NaN turns all logits into NaN, and the engine would keep generating token 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.errors import WeightSyncError

_MAX_NAMED = 8
"""Maximum number of weights that an error names; a diverged trainer has NaN in all of them."""


def is_finite(x: jax.Array) -> jax.Array:
    """Whether an array holds neither NaN nor infinity: bool []. Traced by JAX.

    The sum of all elements, each times 0, is NaN if one is NaN or infinite. On CPUs XLA computes
    this several times as fast as a conjunction of `jnp.isfinite`, and compiles it in a fraction of
    the time; its maximum overlooks NaN.
    """
    return jnp.sum(x * 0) == 0


def refuse_not_finite(names: Sequence[str], flags: jax.Array | Sequence[bool] | None) -> None:
    """Raises WeightSyncError for new weights that are not finite; waits for the device."""
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
