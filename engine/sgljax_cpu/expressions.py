"""Expressions of elementwise arithmetic: how arrays spread over a result, and substitution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgljax_cpu.elementwise import Apply, Expression, Leaf


def spread_kind(
    source: Sequence[int], dims: Sequence[int], shape: Sequence[int]
) -> tuple[str, int] | None:
    """`Leaf.spread` and `Leaf.row_size` of a source whose axes are `dims` of a shape."""
    covered = [axis for axis, size in zip(dims, source, strict=True) if size > 1]
    if any(size not in (1, shape[axis]) for axis, size in zip(dims, source, strict=True)):
        return None
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    if covered == wide:
        return "full", 0
    if not covered:
        return "one", 0
    if covered == wide[-len(covered) :]:
        return "row", math.prod(source)
    if covered == wide[: len(covered)]:
        return "column", math.prod(shape) // math.prod(source)
    return None


def combined_kind(
    inside: tuple[str, int], outside: tuple[str, int] | None
) -> tuple[str, int] | None:
    """The combination of two results of `spread_kind`, if it is one of the kinds."""
    if outside is None or inside[0] == "full":
        return outside
    return inside if outside[0] == "full" or inside[0] == "one" else None


def shifted(expression: Expression, first: int) -> Expression:
    """The expression with `first` added to the indices of its leaves."""
    if isinstance(expression, Leaf):
        return expression._replace(argument=expression.argument + first)
    if isinstance(expression, Apply):
        return Apply(expression.function, tuple(shifted(e, first) for e in expression.arguments))
    return expression


def renumbered(expression: Expression, indices: Sequence[int]) -> Expression:
    """The expression with other indices of its leaves."""
    if isinstance(expression, Leaf):
        return expression._replace(argument=indices[expression.argument])
    if isinstance(expression, Apply):
        inner = tuple(renumbered(e, indices) for e in expression.arguments)
        return Apply(expression.function, inner)
    return expression
