"""How names and shapes of a source of weights map onto the engine's parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, ItemsView, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax

from sgljax_engine.errors import WeightSyncError

Hook = Callable[[jax.Array], jax.Array]
"""Transforms a weight; traced by JAX, so it must not depend on values in Python."""


class Rule(NamedTuple):
    """One mapping of source parameters to engine parameters.

    Attributes:
        source: Dotted source name; `*` stands for one component, such as a layer number, and `**`
            for one or more.
        target: Engine name, with `*`s filled from the source's matches; None ignores the source
            parameter on purpose.
        transpose: Permutation of the source's axes, or of the part's axes if `part` is set.
        hook: Applied after the transpose.
        part: Index on `part_axis` of a fused parameter, taken before the transpose; for several
            axes, one index on each. Rules with the same source must together take all indices.
            "each" maps every index of one axis to its own target, whose last `*` is the index: for
            layers stacked in one array, as MaxText's scan does.
        part_axis: Axis, or axes, of the source that `part` is taken from.
        num_parts: Number of equal parts that one `part_axis` is cut into; the parts keep the axis.
            None takes single indices, without the axis.
        into: Index of this source in a target that stacks several along its first axis, such as the
            experts of a layer. The sources must together fill all indices. "each" takes the index
            from the source's last `*`.
        is_shared: Whether the next rule with the same source applies too: a source for two targets,
            such as an embedding that a hook rounds for the head. Also for a part of a source.
    """

    source: str
    target: str | None
    transpose: tuple[int, ...] | None = None
    hook: Hook | None = None
    part: int | tuple[int, ...] | Literal["each"] | None = None
    part_axis: int | tuple[int, ...] = 0
    num_parts: int | None = None
    into: int | Literal["each"] | None = None
    is_shared: bool = False

    @property
    def part_axes(self) -> tuple[int, ...]:
        """`part_axis` as a tuple."""
        return self.part_axis if isinstance(self.part_axis, tuple) else (self.part_axis,)


class LoraRule(NamedTuple):
    """A LoRA pair of the source: `scale` A B is added to a weight before the weight's rules map it.

    Attributes:
        weight: Dotted source name of the weight W, which other rules map.
        a: Source name of A: the axes `in_axes` of W, `stacked_axes`, then the rank.
        b: Source name of B: the rank, `stacked_axes`, then the other axes of W in their order.
        scale: For example alpha / rank.
        in_axes: Axes of W that are contracted with the layer's input, ascending.
        stacked_axes: Axes of W on which each index is a weight with a pair of its own, ascending.
        is_merged: Whether A has its `in_axes`, and B the other axes of W, as one axis each.
    """

    weight: str
    a: str
    b: str
    scale: float
    in_axes: tuple[int, ...] = (0,)
    stacked_axes: tuple[int, ...] = ()
    is_merged: bool = False


WeightRule = Rule | LoraRule


class Match(NamedTuple):
    """A rule applied to one source name; the target is None for one that is ignored.

    `part` is an index on each of `part_axes`, and `into` the index of a stacked target, with "each"
    resolved.
    """

    target: str | None
    rule: Rule
    part: tuple[int, ...] | None
    into: int | None = None


class WeightSource(NamedTuple):
    """Named arrays, and the rules that map them onto the engine's parameters."""

    arrays: Any
    rules: Sequence[WeightRule]


def check_rules(rules: Sequence[WeightRule]) -> tuple[WeightRule, ...]:
    checked = tuple(rules)
    for rule in checked:
        if not isinstance(rule, (Rule, LoraRule)):
            raise WeightSyncError(f"rules must be a list of Rule, got {rule!r} in it")
    return checked


class RuleTable:
    """Finds the rules of source names, fast: a multimodal model has thousands of both."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_source: dict[str, list[Rule]] = {}
        for rule in rules:
            self._by_source.setdefault(rule.source, []).append(rule)
        # Sources in the order of their first rules.
        self._places = {source: index for index, source in enumerate(self._by_source)}
        self._patterns = [(s, re.compile(_pattern(s))) for s in self._by_source if "*" in s]

    def match(self, source: str, shape: Sequence[int] = ()) -> list[Match]:
        """The first rule that matches the source name; if it takes a part, all such rules.

        One match for each target of a shared parameter and each part of a fused or stacked one, or
        none.
        """
        found: list[Match] = []
        pattern, groups = self._first(source)
        for rule in self._by_source.get(pattern, ()):
            if rule.part == "each":
                axis = rule.part_axes[0]
                size = shape[axis] if -len(shape) <= axis < len(shape) else 0
                for part in range(size):
                    found.append(Match(_fill(rule.target, (*groups, str(part))), rule, (part,)))
                break
            own, into = groups, rule.into
            if into == "each":
                if not groups or not groups[-1].isdecimal():
                    continue
                own, into = groups[:-1], int(groups[-1])
            part = (rule.part,) if isinstance(rule.part, int) else rule.part
            found.append(Match(_fill(rule.target, own), rule, part, into))
            if part is None and not rule.is_shared:
                break
        return found

    def ignores(self, source: str) -> bool:
        pattern, _ = self._first(source)
        rules = self._by_source.get(pattern)
        return bool(rules) and rules[0].target is None

    def _first(self, source: str) -> tuple[str, tuple[str, ...]]:
        """The source of the first rule that matches a name, and what its wildcards stand for.

        The name itself if no rule does.
        """
        limit = self._places.get(source, len(self._places))
        for pattern, compiled in self._patterns:
            if self._places[pattern] >= limit:
                break
            names = compiled.fullmatch(source)
            if names is not None:
                return pattern, names.groups()
        return source, ()


def _pattern(source: str) -> str:
    return re.escape(source).replace(r"\*\*", r"(.+)").replace(r"\*", r"([^.]+)")


def _fill(target: str | None, groups: Sequence[str]) -> str | None:
    if target is None:
        return None
    parts = target.split("*")
    filled = parts[0]
    for i, part in enumerate(parts[1:]):
        filled += (groups[i] if i < len(groups) else "*") + part
    return filled


def indices_by_axis(
    part: Sequence[int], part_axes: Sequence[int], num_axes: int
) -> list[tuple[int, int]]:
    """(axis, index) of each axis of a part, the last axis first.

    Taken one after another in this order, they leave the axes still to come in their places.
    """
    axes = [axis % num_axes for axis in part_axes]
    return sorted(zip(axes, part, strict=True), reverse=True)


def flatten_named(tree: Any) -> dict[str, Any]:
    """Flattens a pytree of arrays into `{"layers.0.attn.q_proj.w": array, ...}`.

    Args:
        tree: Nested dicts and lists, or a `flax.nnx.State`, whose `Variable` wrappers do not appear
            in the names. A flat dict with dotted keys stays unchanged. Or (name, array) pairs: a
            list, `dict.items()` or an iterator.

    Returns:
        The leaves, not copied, by their dotted names.

    Raises:
        WeightSyncError: for a leaf without a name, or two with the same name.
    """
    if isinstance(tree, (Iterator, ItemsView)):
        tree = list(tree)
    if isinstance(tree, (list, tuple)) and tree and all(map(_is_pair, tree)):
        pairs, tree = tree, dict(tree)
        if len(tree) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightSyncError(f"two parameters of the source are both called {twice!r}")
    leaves, structure = jax.tree_util.tree_flatten(tree)
    names = _leaf_names(structure)
    if "" in names:
        bare = leaves[names.index("")]
        raise WeightSyncError(f"weights must be named, got a bare {type(bare).__name__}")
    return dict(zip(names, leaves, strict=True))


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


@functools.lru_cache(maxsize=16)
def _leaf_names(structure: Any) -> tuple[str, ...]:
    """Names of the leaves of a PyTreeDef. Cached, since JAX is slower to find paths than leaves."""
    tree = structure.unflatten(range(structure.num_leaves))
    names: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [_key_name(key) for key in path]
        # An nnx.Variable is a node with a single child called "value".
        is_attribute = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey)
        if is_attribute and keys[-1] in ("value", "raw_value"):
            keys.pop()
        name = ".".join(keys)
        if name in names:
            raise WeightSyncError(f"two parameters of the source are both called {name!r}")
        names[name] = None
    return tuple(names)


def _key_name(key: Any) -> str:
    if isinstance(key, jax.tree_util.DictKey):
        return str(key.key)
    if isinstance(key, jax.tree_util.SequenceKey):
        return str(key.idx)
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    return str(key)
