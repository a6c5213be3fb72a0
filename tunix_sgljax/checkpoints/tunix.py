"""Reads the checkpoints that Tunix's trainers write with Orbax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine import WeightLoadError, flatten_named

_ITEM = "model_params"
_ACTOR = "actor"
_MARKER = "_METADATA"


def find_step(path: str | Path, step: int | None = None) -> Path:
    """The folder of a model's parameters within a checkpoint folder.

    The path is the folder given to Tunix (which contains `actor`), a folder with steps, one step,
    or its `model_params`; the step is the latest by default. WeightLoadError lists the existing
    ones.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise WeightLoadError(f"no such checkpoint folder: {str(folder)!r}")
    if (folder / _ITEM).is_dir() or (folder / _MARKER).exists():
        if step is not None and folder.name != str(step):
            raise WeightLoadError(f"{folder} is one checkpoint, but step {step} is asked for")
        return folder / _ITEM if (folder / _ITEM).is_dir() else folder
    steps = _steps(folder)
    if not steps and (folder / _ACTOR).is_dir():
        folder = folder / _ACTOR
        steps = _steps(folder)
    if not steps:
        raise WeightLoadError(
            f"{path} holds no checkpoint: expected a folder named by a step number, with "
            f"{_ITEM!r} in it, here or below {_ACTOR!r}"
        )
    if step is not None and step not in steps:
        raise WeightLoadError(f"{folder} has no step {step}; it has {sorted(steps)}")
    return folder / str(max(steps) if step is None else step) / _ITEM


def _steps(folder: Path) -> list[int]:
    return [
        int(entry.name)
        for entry in folder.iterdir()
        if entry.name.isdecimal() and (entry / _ITEM).is_dir()
    ]


def find_latest(path: str | Path) -> Path | None:
    """`find_step` of the latest step; None where no checkpoint has been written yet."""
    folder = Path(path) / _ACTOR
    return find_step(folder) if folder.is_dir() and _steps(folder) else None


@contextlib.contextmanager
def _opened(folder: str | Path) -> Iterator[tuple[Any, Any]]:
    """Orbax's handler for a `model_params` folder, and its path."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler()
    try:
        yield handler, Path(folder).resolve()
    except Exception as error:  # whatever Orbax and its storage raise
        raise WeightLoadError(f"cannot read the checkpoint {folder}: {error}") from error
    finally:
        handler.close()


def stored_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters in a `model_params` folder, by the trainer's dotted names."""
    with _opened(folder) as (handler, path):
        named = flatten_named(handler.metadata(path).tree)
    return {_without_value(name): tuple(entry.shape) for name, entry in named.items()}


def read_checkpoint(folder: str | Path) -> dict[str, np.ndarray]:
    """The parameters in a `model_params` folder, on the host, by the trainer's dotted names.

    Weights that qwix quantised are refused.
    """
    import jax
    import orbax.checkpoint as ocp  # takes seconds, and only needed here

    with _opened(folder) as (handler, path):
        tree = handler.metadata(path).tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.PyTreeRestore(restore_args=restore_args)
        arrays = handler.restore(path, args=args)
    weights = {_without_value(name): array for name, array in flatten_named(arrays).items()}
    quantised = [name for name in weights if name.endswith(".array.qvalue")]
    if quantised:
        raise WeightLoadError(
            f"{folder} holds quantised weights ({quantised[0]!r} and {len(quantised) - 1} more), "
            "which cannot be converted; save the LoRA parameters alone, as Tunix's trainers do"
        )
    return weights


def root_of(step_folder: Path) -> Path:
    folder = step_folder.parent.parent
    return folder.parent if folder.name == _ACTOR else folder


def _without_value(name: str) -> str:
    """Removes "value", Orbax's name for the contents of an nnx.Variable."""
    return name.removesuffix(".value").removesuffix(".raw_value")
