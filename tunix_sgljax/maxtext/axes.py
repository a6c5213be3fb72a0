"""MaxText's logical axes on a mesh with Tunix's axes."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path

import yaml


def logical_rules(mesh_axes: Collection[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """MaxText's rules for a mesh: its own of base.yml, without axes that the mesh does not have.

    A model that MaxText made names logical axes, which Tunix's trainer looks up in the rules of its
    `ClusterConfig`. Tunix's command gives none.

    Args:
        mesh_axes: Names of the mesh's axes.

    Returns:
        A logical axis and the mesh axes it is sharded over, as flax takes them.
    """
    folder = importlib.import_module("maxtext.utils.globals").MAXTEXT_CONFIGS_DIR
    text = (Path(folder) / "base.yml").read_text(encoding="utf-8")
    rules: dict[tuple[str, tuple[str, ...]], None] = {}
    for logical, axes in yaml.safe_load(text)["logical_axis_rules"]:
        named = [axes] if isinstance(axes, str) else axes or []
        rules[logical, tuple(axis for axis in named if axis in mesh_axes)] = None
    return tuple(rules)
