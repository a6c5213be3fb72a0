"""Checks of the numbers and strings of a checkpoint's parts."""

from __future__ import annotations

import functools
import sys
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sgljax_engine.errors import CheckpointError

_SCALARS = {str, int, float, NoneType}
_MAX_INT = 2**63 - 1


@functools.cache
def _scalars(owner: type) -> dict[str, tuple[type, ...]]:
    found = {}
    for name, hint in get_type_hints(owner).items():
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if _SCALARS.issuperset(kinds):
            found[name] = (*kinds, int) if float in kinds else kinds
    return found


def check_scalars(owner: Any, where: str) -> None:
    """Checks that each scalar has its field's type, and that numbers are finite and >= 0."""
    for name, kinds in _scalars(type(owner)).items():
        value = getattr(owner, name)
        is_sound = type(value) in kinds  # a bool is no count
        if is_sound and isinstance(value, (int, float)):
            is_sound = 0 <= value <= (sys.float_info.max if float in kinds else _MAX_INT)
        if not is_sound:
            known = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(
                f"{where}: {name} must be {known}, finite and >= 0, got {repr(value)[:100]}"
            )
