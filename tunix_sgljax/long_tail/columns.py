"""Columns of the data, of any kind, by the row; and the batches that Tunix makes of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl import utils as tunix_utils

from sgljax_engine import InvalidConfigError

Columns = dict[str, Any]

MicroBatches = Callable[[Iterator[Columns]], Iterator[Columns]]
"""Tunix's own division of a batch, with the size of its micro-batches."""


def split_rows(batch: Mapping[str, Any]) -> list[Columns]:
    """The rows of a batch, each as a batch of one whose columns are of the same kinds.

    A column is an array, a list, a tuple or a mapping of columns. What has no length belongs to
    every row.
    """
    num_rows = len(batch["prompts"])
    for name, values in batch.items():
        _check_length(name, values, num_rows)
    return [
        {name: _slice(values, row) for name, values in batch.items()} for row in range(num_rows)
    ]


def join_rows(rows: Sequence[Columns]) -> Columns:
    """The batch of these rows."""
    joined: Columns = {}
    for name in rows[0]:
        try:
            joined[name] = _join([row[name] for row in rows])
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidConfigError(
                f"the rows of a step cannot be put together, for the column {name!r}: {error}"
            ) from error
    return joined


def repeated(
    batch: Columns,
    num_samples: int,
    trajectory_ids: Callable[[Columns], list[str]],
    micro_batches: MicroBatches | None,
) -> Columns:
    """What Tunix's learner makes of a batch before it samples, by its own functions."""
    if micro_batches is not None:
        for name, values in batch.items():
            _check_divisible(name, values)
    parts = [batch] if micro_batches is None else list(micro_batches(iter([batch])))
    made = []
    for part in parts:
        example = jax.tree.map(lambda x: np.repeat(x, num_samples, axis=0), part)
        made.append(example | {"trajectory_ids": trajectory_ids(example)})
    return tunix_utils.merge_micro_batches(made)


def _check_length(name: str, values: Any, num_rows: int) -> None:
    if isinstance(values, Mapping):
        for key, inner in values.items():
            _check_length(f"{name}.{key}", inner, num_rows)
    elif not _has_no_rows(values) and len(values) != num_rows:
        raise InvalidConfigError(
            f"the column {name!r} has {len(values)} values for {num_rows} prompts; over-sampling "
            "needs one for each"
        )


def _has_no_rows(values: Any) -> bool:
    is_scalar = isinstance(values, (str, bytes)) or not isinstance(values, Sized)
    return is_scalar or (isinstance(values, (np.ndarray, jax.Array)) and values.ndim == 0)


def _slice(values: Any, row: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _slice(inner, row) for key, inner in values.items()}
    if _has_no_rows(values):
        return values
    if isinstance(values, (np.ndarray, jax.Array, list, tuple)):
        return values[row : row + 1]
    return np.asarray(values)[row : row + 1]  # as Tunix's np.repeat takes it


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _join([each[key] for each in values]) for key in first}
    if _has_no_rows(first):
        return first
    if isinstance(first, (list, tuple)):
        return type(first)(itertools.chain.from_iterable(values))
    join = jnp.concatenate if isinstance(first, jax.Array) else np.concatenate
    return join(values)


def _check_divisible(name: str, values: Any) -> None:
    """Refuses what Tunix divides wrongly: it flattens arrays, and takes a mapping for a value."""
    shape = values.shape if isinstance(values, (np.ndarray, jax.Array)) else None
    if isinstance(values, Mapping) or (shape is not None and len(shape) > 1):
        what = "a mapping" if shape is None else f"of shape {shape}"
        raise InvalidConfigError(
            f"the column {name!r} is {what}, which Tunix cannot divide into micro-batches: set "
            "train_micro_batch_size to the full batch, or give a list with a value for each prompt"
        )
