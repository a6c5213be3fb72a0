"""Describes what does not fit between a source and the engine's parameters, from shapes alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from sgljax_engine.weights.rules import Match, indices_by_axis
from sgljax_engine.weights.specs import SourceSpec, Step
from sgljax_engine.weights.transform import map_axes


def coverage_problems(name: str, spec: SourceSpec, matches: Sequence[Match]) -> list[str]:
    """Describes parts of a source parameter that no rule, or more than one, takes."""
    where = f"source parameter {name!r} {list(spec.shape)}"
    if not matches:
        return [f"{where} is mapped by no rule"]
    parts = [found.part for found in matches if found.part is not None]
    if not parts:
        return []
    if len(parts) < len(matches):
        return [f"{where} is mapped both whole and in parts"]
    all_axes = {found.rule.part_axes for found in matches}
    axes, num_axes = next(iter(all_axes)), len(spec.shape)
    is_inside = all(-num_axes <= axis < num_axes for axis in axes)
    is_distinct = is_inside and len({axis % num_axes for axis in axes}) == len(axes)
    if len(all_axes) > 1 or not is_distinct:
        listed = sorted(map(_unwrapped, all_axes), key=str)
        return [f"{where} has no axis that all of its rules take parts of: {listed}"]
    if any(len(part) != len(axes) for part in parts):
        return [f"{where}: the rules take an index on each of the axes {list(axes)}, got {parts}"]
    counts = {found.rule.num_parts for found in matches}
    sizes = [spec.shape[axis] for axis in axes]
    if counts != {None}:
        count = counts.pop()
        if counts or count is None or count < 1 or len(sizes) > 1 or sizes[0] % count:
            return [f"{where} cannot be cut into the num_parts of its rules"]
        sizes = [count]
    last = [found.part for found in matches if found.part and not found.rule.is_shared]
    if sorted(last) != list(itertools.product(*map(range, sizes))):
        taken = sorted(map(_unwrapped, parts), key=str)
        wanted = " x ".join(map(str, sizes))
        return [f"{where} has {wanted} parts, the rules take {taken}"]
    return []


def _unwrapped(indices: tuple[int, ...]) -> int | tuple[int, ...]:
    return indices[0] if len(indices) == 1 else indices


def stacked_step(
    stack: Mapping[int, Step], source: Mapping[str, SourceSpec], shape: tuple[int, ...]
) -> tuple[Step, list[str]]:
    """The step that stacks several sources, and the problems with them."""
    indices = sorted(stack)
    ordered = [stack[index] for index in indices]
    first = ordered[0]
    where = f"parameter {first.target!r} {list(shape)}"
    problems = []
    absent = sorted(set(range(shape[0])) - set(indices))
    if absent:
        listed = f"{absent[:8]}{' and more' if len(absent) > 8 else ''}"
        problems.append(f"{where} lacks index(es) {listed} of its {shape[0]}")
    beyond = [stack[index].source for index in indices if index >= shape[0]]
    problems += [f"{name!r} is beyond the {shape[0]} indices of {where}" for name in beyond]
    problems += shape_problems(source[first.source], first, shape[1:])
    for step in ordered:
        if step.lora is not None:
            problems.append(f"{step.source!r} has a LoRA pair, which stacked weights cannot have")
        if step.without_names() != first.without_names():
            problems.append(f"{step.source!r} and {first.source!r} of {where} have unlike rules")
        if source[step.source] != source[first.source]:
            specs = [source[name] for name in (step.source, first.source)]
            listed = " and ".join(f"{list(x.shape)} {x.dtype.name}" for x in specs)
            problems.append(f"{step.source!r} and {first.source!r} of {where} differ: {listed}")
    return first._replace(stacked=tuple(step.source for step in ordered)), problems


def shape_problems(spec: SourceSpec, step: Step, wanted: tuple[int, ...]) -> list[str]:
    """Describes why a source does not fit a target, or an index of it, of shape `wanted`."""
    where = f"{step.source!r} {list(spec.shape)} for {step.target!r} {list(wanted)}"
    if step.lora is not None and step.num_parts is not None:
        return [f"{where}: a LoRA pair of a weight that is cut into num_parts is not supported"]
    dtype = jax.dtypes.canonicalize_dtype(spec.dtype)  # of NumPy's float64, JAX warns else
    try:
        found = jax.eval_shape(lambda x: map_axes(x, step), jax.ShapeDtypeStruct(spec.shape, dtype))
    except Exception as error:  # a user's hook may raise anything
        return [f"{where}: {error}"]
    if not jnp.issubdtype(found.dtype, jnp.floating):  # whole numbers may be quantised ones
        return [f"{where}: dtype {found.dtype.name} is not a floating-point type"]
    if not _is_regrouping(found.shape, wanted):
        return [f"{where}: shapes do not fit{_after(spec, step, wanted, found.shape)}"]
    return []


def _after(spec: SourceSpec, step: Step, wanted: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Describes a shape that does not fit after a rule, and whether another transpose would fit."""
    done = [] if step.part is None else [f"part {_unwrapped(step.part)}"]
    if step.transpose is not None:
        done.append(f"transpose {step.transpose}")
    if step.hook is not None:
        done.append("hook")
    after = f" (after {' and '.join(done)}: {list(shape)})" if done else ""
    taken = list(spec.shape)
    if step.part is not None and step.num_parts is None:
        for axis, _ in indices_by_axis(step.part, step.part_axes, len(taken)):
            del taken[axis]
    taken = tuple(taken)
    if step.hook is None and len(taken) == 2:
        if step.transpose == (1, 0) and _is_regrouping(taken, wanted):
            return f"{after}; without the transpose they do, see logical_rules"
        if step.transpose is None and _is_regrouping(taken[::-1], wanted):
            return f"{after}; with transpose=(1, 0) they do"
    return after


def _is_regrouping(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """True when one shape becomes the other by merging or splitting neighbouring axes."""
    if math.prod(a) != math.prod(b):
        return False
    few, many = sorted((a, b), key=len)
    rest = list(many)
    for size in few:
        product = 1
        while product < size and rest:
            product *= rest.pop(0)
        if product != size:
            return False
    return all(size == 1 for size in rest)
