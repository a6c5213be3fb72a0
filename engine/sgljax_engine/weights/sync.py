"""Plan, check, transform: from a source's arrays to the engine's physical weights.

`plan_sync` proves on shapes alone, before any data moves, that every engine parameter is covered
exactly once, that every source parameter is used or ignored on purpose, and that shapes fit.
`apply` then runs the whole plan as one device program. It never touches the weights in use, so a
failure leaves them serving; the caller swaps the returned weights in. `apply_donating` makes one
weight after another, and frees the memory of the old one first.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgljax_engine.errors import WeightsLostError, WeightSyncError
from sgljax_engine.kernels.cpu.chain import unavailable
from sgljax_engine.kernels.cpu.copy import copy
from sgljax_engine.kernels.cpu.pack import pack
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.layers.int8 import SCALE_SUFFIX
from sgljax_engine.weights.checksum import checksum, to_hex
from sgljax_engine.weights.finite import is_finite, refuse_not_finite
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.lora import LoraTerm, lora_terms, merge
from sgljax_engine.weights.moves import device_order, move, same_shards
from sgljax_engine.weights.quantize import Quantized
from sgljax_engine.weights.rules import (
    Hook,
    LoraRule,
    Match,
    Rule,
    RuleTable,
    WeightRule,
    flatten_named,
)

_MAX_PROBLEMS = 20
"""Problems of a source that an error names; an empty one has hundreds."""

Weights = dict[str, jax.Array]

Sources = tuple[Any, ...]
"""Source arrays that one step reads."""

Devices = tuple[Any, ...]
"""Devices in the order in which a program sees them."""

PreparedWeights = tuple[Weights, jax.Array | None]
"""Weights, and whether each is finite, in the order of the steps; None without that check."""


class TargetSpec(NamedTuple):
    """One engine parameter as weight sync sees it.

    Attributes:
        shape: Logical shape, the one that rules map onto ([in, out] for projections).
        dtype: Dtype of the stored parameter.
        form: How the engine stores it.
        sharding: Where it lives.
        alias: Another name that rules may use for it.
        quantized: What it is of a quantised weight; None for a weight itself.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    form: Form
    sharding: jax.sharding.Sharding
    alias: str
    quantized: Quantized | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The logical shape of the weight that it is made from."""
        return self.shape if self.quantized is None else self.quantized.shape

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """The stored form: physical shape, dtype and sharding."""
        return jax.ShapeDtypeStruct(self.stored_shape, self.dtype, sharding=self.sharding)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The physical shape."""
        return self.form.stored_shape(self.shape)

    @property
    def num_outputs(self) -> int | None:
        """Outputs of a weight in panels; None of others."""
        if not self.form.is_packed:
            return None
        return self.shape[-1 if self.form is Form.PANELS else -2]


class SourceSpec(NamedTuple):
    """Shape and dtype of one source parameter."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


class Step(NamedTuple):
    """How one engine parameter is made.

    In this order: LoRA pair, part, transpose, hook, stack, reshape, cast, physical layout.

    Attributes:
        stacked: The sources of a stacked parameter, in order; `source` is the first. Empty for a
            parameter of one source.
        others: See `Rule`.
    """

    source: str
    target: str
    transpose: tuple[int, ...] | None
    hook: Hook | None
    part: int | None
    part_axis: int = 0
    num_parts: int | None = None
    lora: LoraTerm | None = None
    stacked: tuple[str, ...] = ()

    def arrays(self, source: Mapping[str, Any]) -> Sources:
        """The source arrays that it reads: a weight and the pair added to it, or those stacked."""
        pair = () if self.lora is None else (self.lora.a, self.lora.b)
        return tuple(source[name] for name in (*(self.stacked or (self.source,)), *pair))

    def without_names(self) -> Step:
        """The same step without names."""
        lora = None if self.lora is None else self.lora._replace(a="", b="")
        stacked = ("",) * len(self.stacked)
        return self._replace(source="", target="", lora=lora, stacked=stacked)

    def operands(self, source: Mapping[str, Any]) -> Sources:
        """`arrays` in one kind of memory, as a computation with several of them needs."""
        arrays = self.arrays(source)
        return arrays if self.lora is None else tuple(map(_in_device_memory, arrays))


class Program(NamedTuple):
    """A plan's transformation, compiled on first use; takes arrays in the order of the steps.

    Attributes:
        at_target: For sources on the engine's devices; its results are placed as `shardings`.
        at_source: For sources elsewhere: from their devices to a program whose results must be
            moved, which takes no fetching; None if they cut up no array as the engine does.
        one: `at_target` for one parameter, with its own flag. Takes its arrays, step, target, and
            whether to use JIT-compiled CPU kernels; compiled once for each.
        checksums: Checksums of the results, in logical shapes. One program computes all: many small
            ones in flight over several devices can starve one another on CPUs.
        shardings: Where each engine parameter lives.
        is_native: Whether `at_target` transposes with JIT-compiled CPU kernels.
    """

    at_target: Callable[[list[Sources]], PreparedWeights]
    at_source: Callable[[Devices], Callable[[list[Sources]], PreparedWeights] | None]
    one: Callable[[Sources, Step, TargetSpec, bool], tuple[jax.Array, jax.Array]]
    checksums: Callable[[list[Sources]], dict[str, jax.Array]]
    shardings: dict[str, jax.sharding.Sharding]
    is_native: bool


class SyncPlan(NamedTuple):
    """A checked plan. Reusable for every source of the same specification.

    Attributes:
        source_spec: Shapes and dtypes that the source must have.
        steps: One step per target parameter.
        targets: The parameters to make.
        program: The transformation of all parameters at once.
        checks_finite: Refuse weights that hold NaN or infinity.
    """

    source_spec: dict[str, SourceSpec]
    steps: tuple[Step, ...]
    targets: Mapping[str, TargetSpec]
    program: Program
    checks_finite: bool

    @property
    def names(self) -> frozenset[str]:
        """The engine parameters that it makes."""
        return frozenset(step.target for step in self.steps)

    @property
    def stacks(self) -> bool:
        """Whether it stacks arrays, thousands where each expert is one.

        One program of all would take minutes to compile. One by one, layers share their programs.
        """
        return any(step.stacked for step in self.steps)

    @property
    def is_on_one_device(self) -> bool:
        """Whether all engine parameters live on one device."""
        return len(_target_devices(self.program.shardings) or ()) == 1

    @property
    def is_on_own_cpus(self) -> bool:
        """Whether the engine's devices are CPUs of this process."""
        return _is_on_own_cpus(self.program.shardings)


def source_spec(source: Mapping[str, Any]) -> dict[str, SourceSpec]:
    """Shapes and dtypes of named arrays; raises WeightSyncError for a leaf that is no array."""
    spec = {}
    for name, array in source.items():
        try:
            spec[name] = SourceSpec(tuple(array.shape), jnp.dtype(array.dtype))
        except (AttributeError, TypeError):
            hint = "; jax.numpy.from_dlpack makes one of it" if _is_foreign(array) else ""
            raise WeightSyncError(
                f"source parameter {name!r} must be an array, got {type(array).__name__}{hint}"
            ) from None
    return spec


def _is_foreign(array: Any) -> bool:
    """Whether it is another framework's array, such as a torch.Tensor."""
    return hasattr(array, "__dlpack__")


def plan_sync(
    source: Mapping[str, SourceSpec],
    rules: Sequence[WeightRule],
    targets: Mapping[str, TargetSpec],
    check_finite: bool = True,
) -> SyncPlan:
    """Matches rules and proves coverage and shapes.

    Args:
        source: Shapes and dtypes by name.
        rules: Map them onto `targets`.
        targets: The parameters to make.
        check_finite: Refuse weights that hold NaN or infinity when the plan is applied.

    Raises:
        WeightSyncError: names every parameter that is missing, unused, mapped twice, mapped to an
            unknown name or of the wrong shape or kind, with both shapes; and every LoRA pair that
            is incomplete, does not fit or changes an ignored weight.
    """
    scales = {name for name, spec in targets.items() if spec.quantized and spec.quantized.is_scale}
    weights = [name for name in targets if name not in scales]
    names = {targets[name].alias: name for name in weights} | {name: name for name in weights}
    steps: dict[str, Step] = {}
    mapping = RuleTable([rule for rule in rules if isinstance(rule, Rule)])
    pairs = [rule for rule in rules if isinstance(rule, LoraRule)]
    terms, problems = lora_terms(pairs, source)
    factors = {name for pair in pairs for name in (pair.a, pair.b)}
    stacks: dict[str, dict[int, Step]] = {}
    for name, spec in source.items():
        if name in factors:
            continue
        matches = mapping.match(name, spec.shape)
        problems.extend(_coverage_problems(name, spec, matches))
        for found in matches:
            if found.target is None:
                if name in terms:
                    problems.append(f"{name!r} has a LoRA pair, but a rule ignores it")
                continue
            target = names.get(found.target)
            if target is None:
                problems.append(f"{name!r} maps to {found.target!r}, which the model does not have")
            elif found.into is not None and target not in steps:
                stack = stacks.setdefault(target, {})
                if found.into in stack:
                    other = stack[found.into].source
                    problems.append(
                        f"{name!r} and {other!r} both map to index {found.into} of {target!r}"
                    )
                else:
                    stack[found.into] = _step(name, target, found, terms)
            elif target in steps or target in stacks:
                other = steps[target] if target in steps else next(iter(stacks[target].values()))
                problems.append(f"{name!r} and {other.source!r} both map to {target!r}")
            else:
                steps[target] = _step(name, target, found, terms)
                problems.extend(_shape_problems(spec, steps[target], targets[target].source_shape))
    for target, stack in stacks.items():
        steps[target], found_problems = stacked_step(stack, source, targets[target].shape)
        problems.extend(found_problems)
    problems.extend(
        f"parameter {name!r} {list(targets[name].source_shape)} is missing from the source"
        for name in weights
        if name not in steps
    )
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = problems if more <= 0 else [*problems[:_MAX_PROBLEMS], f"and {more} more"]
        raise WeightSyncError(
            f"weights do not fit the model ({len(problems)} problem(s)):\n  " + "\n  ".join(shown)
        )
    for name in scales:
        steps[name] = steps[name.removesuffix(SCALE_SUFFIX)]._replace(target=name)
    ordered = tuple(steps[name] for name in targets)
    return _with_program(dict(source), ordered, targets, check_finite)


def _step(name: str, target: str, found: Match, terms: Mapping[str, LoraTerm]) -> Step:
    rule = found.rule
    return Step(
        name,
        target,
        rule.transpose,
        rule.hook,
        found.part,
        rule.part_axis,
        rule.num_parts,
        terms.get(name),
    )


def part_of_plan(plan: SyncPlan, names: AbstractSet[str]) -> SyncPlan:
    """The plan that makes some of a plan's parameters from the same source."""
    steps = tuple(step for step in plan.steps if step.target in names)
    targets = {name: target for name, target in plan.targets.items() if name in names}
    return _with_program(plan.source_spec, steps, targets, plan.checks_finite)


def _with_program(
    source: dict[str, SourceSpec],
    steps: tuple[Step, ...],
    targets: Mapping[str, TargetSpec],
    check_finite: bool,
) -> SyncPlan:
    # A hook belongs to the caller and may hold much memory, so it lives no longer than its plan.
    has_hooks = any(step.hook is not None for step in steps)
    build = _build_program.__wrapped__ if has_hooks else _build_program
    program = build(steps, tuple(targets.items()), check_finite)
    return SyncPlan(source, steps, targets, program, check_finite)


def _coverage_problems(name: str, spec: SourceSpec, matches: Sequence[Match]) -> list[str]:
    """Describes parts of a source parameter that no rule, or more than one, takes."""
    where = f"source parameter {name!r} {list(spec.shape)}"
    if not matches:
        return [f"{where} is mapped by no rule"]
    parts = [found.part for found in matches if found.part is not None]
    if not parts:
        return []
    if len(parts) < len(matches):
        return [f"{where} is mapped both whole and in parts"]
    axes = {found.rule.part_axis for found in matches}
    if len(axes) > 1 or not all(-len(spec.shape) <= axis < len(spec.shape) for axis in axes):
        return [f"{where} has no axis that all of its rules take parts of: {sorted(axes)}"]
    counts = {found.rule.num_parts for found in matches}
    size = spec.shape[axes.pop()]
    if counts != {None}:
        count = counts.pop()
        if counts or count is None or count < 1 or size % count:
            return [f"{where} cannot be cut into the num_parts of its rules"]
        size = count
    if sorted(parts) != list(range(size)):
        return [f"{where} has {size} parts, the rules take {sorted(parts)}"]
    return []


def stacked_step(
    stack: Mapping[int, Step], source: Mapping[str, SourceSpec], shape: tuple[int, ...]
) -> tuple[Step, list[str]]:
    """The step that stacks several sources, and the problems with them.

    Args:
        stack: Their steps by the index that each becomes.
        source: Specifications of all source parameters.
        shape: The target's logical shape, whose first axis they make.
    """
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
    problems += _shape_problems(source[first.source], first, shape[1:])
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


def _shape_problems(spec: SourceSpec, step: Step, wanted: tuple[int, ...]) -> list[str]:
    """Describes why a source does not fit a target, or an index of it, of shape `wanted`."""
    where = f"{step.source!r} {list(spec.shape)} for {step.target!r} {list(wanted)}"
    if step.lora is not None and step.num_parts is not None:
        return [f"{where}: a LoRA pair of a weight that is cut into num_parts is not supported"]
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        return [f"{where}: dtype {spec.dtype.name} is not a floating-point type"]
    dtype = jax.dtypes.canonicalize_dtype(spec.dtype)  # of NumPy's float64, JAX warns else
    try:
        found = jax.eval_shape(
            lambda x: _mapped_axes(x, step), jax.ShapeDtypeStruct(spec.shape, dtype)
        )
    except Exception as error:  # a user's hook may raise anything
        return [f"{where}: {error}"]
    if not _is_regrouping(found.shape, wanted):
        return [f"{where}: shapes do not fit{_after(spec, step, wanted, found.shape)}"]
    return []


def _after(spec: SourceSpec, step: Step, wanted: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Describes a shape that does not fit after a rule, and whether another transpose would fit."""
    done = [] if step.part is None else [f"part {step.part}"]
    if step.transpose is not None:
        done.append(f"transpose {step.transpose}")
    if step.hook is not None:
        done.append("hook")
    after = f" (after {' and '.join(done)}: {list(shape)})" if done else ""
    taken = list(spec.shape)
    if step.part is not None and step.num_parts is None:
        del taken[step.part_axis]
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


def _transform(sources: Sources, step: Step) -> jax.Array:
    if step.stacked:
        return jnp.stack([_mapped_axes(x, step) for x in sources])
    if step.lora is None:
        return _mapped_axes(sources[0], step)
    weight, a, b = sources
    merged = merge(weight, a, b, step.lora, step.part, step.part_axis)
    return _mapped_axes(merged, step._replace(part=None))


def _mapped_axes(x: jax.Array, step: Step) -> jax.Array:
    if step.part is not None and step.num_parts is not None:
        size = x.shape[step.part_axis] // step.num_parts
        x = lax.slice_in_dim(x, step.part * size, (step.part + 1) * size, axis=step.part_axis)
    elif step.part is not None:
        x = lax.index_in_dim(x, step.part, step.part_axis, keepdims=False)
    if step.transpose is not None:
        x = jnp.transpose(x, step.transpose)
    return step.hook(x) if step.hook is not None else x


def _mapped(sources: Sources, step: Step, target: TargetSpec) -> jax.Array:
    """The engine parameter in its logical shape."""
    weight = _transform(sources, step).reshape(target.source_shape)
    return weight.astype(target.dtype) if target.quantized is None else target.quantized.of(weight)


def _stored(
    sources: Sources, step: Step, target: TargetSpec, is_native: bool
) -> tuple[jax.Array, jax.Array]:
    """The engine parameter in its stored form, and whether it is finite.

    Copies keep JAX from returning the source itself.
    """
    if target.quantized is not None:
        weight = _transform(sources, step).reshape(target.source_shape)
        return jnp.copy(target.form.store(target.quantized.of(weight))), is_finite(weight)
    # Rows of outputs, which a rule transposes and the form may transpose back.
    is_by_output = step.transpose in ((1, 0), (0, 2, 1)) and step.hook is None
    if is_by_output and step.stacked and target.form is not Form.LOGICAL:
        step = step._replace(transpose=None)
        *stacked, num_inputs, num_outputs = target.shape
        return _stored_rows(
            _transform(sources, step).reshape(*stacked, num_outputs, num_inputs), target, is_native
        )
    x = _transform(sources, step)
    is_copied = target.form is Form.LOGICAL and x.dtype == target.dtype == jnp.float32
    if is_native and is_copied and step.part is None:  # a kernel would need the part sliced first
        return copy(x.reshape(target.shape))
    if is_native and _is_packed_natively(x, target):
        if target.form is Form.TABLE_PANELS:
            return pack(x.reshape(target.shape), target.dtype, is_by_output=True)
        if is_by_output and x.ndim == len(target.shape):  # XLA drops both transposes
            return pack(x.swapaxes(-1, -2), target.dtype, is_by_output=True)
        return pack(x.reshape(target.shape), target.dtype, is_by_output=False)
    if target.form is not Form.TRANSPOSED:
        stored = jnp.copy(target.form.store(x.reshape(target.shape).astype(target.dtype)))
    elif x.dtype.itemsize >= target.dtype.itemsize:
        stored = jnp.copy(_swapped(x.astype(target.dtype), target.shape))
    else:
        # XLA on CPUs takes twice as long to transpose and widen at once.
        stored = lax.optimization_barrier(jnp.copy(_swapped(x, target.shape))).astype(target.dtype)
    return stored, is_finite(x.astype(target.dtype))  # in source order: sequential reads


_NATIVE = {"float32", "bfloat16", "float16"}
"""Dtypes that the JIT-compiled CPU kernels read and write."""


def _is_packed_natively(x: jax.Array, target: TargetSpec) -> bool:
    return target.form.is_packed and {x.dtype.name, target.dtype.name} <= _NATIVE


def _stored_rows(x: jax.Array, target: TargetSpec, is_native: bool) -> tuple[jax.Array, jax.Array]:
    """As `_stored`, from rows of outputs [..., out, in]."""
    if is_native and target.form is Form.PANELS and _is_packed_natively(x, target):
        return pack(x, target.dtype, is_by_output=True)
    cast = x.astype(target.dtype)
    stored = cast if target.form is Form.TRANSPOSED else target.form.store(cast.swapaxes(-1, -2))
    return jnp.copy(stored), is_finite(cast)


def _swapped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x.reshape(shape)` with its last two axes swapped.

    Permutes the axes of `x` where possible: XLA on CPUs copies an array that is reshaped before it
    is transposed.
    """
    *stacked, _, _ = shape
    if stacked:
        return x.reshape(shape).swapaxes(-1, -2)
    for split in range(x.ndim + 1):
        if math.prod(x.shape[:split]) == shape[0]:
            axes = (*range(split, x.ndim), *range(split))
            return x.transpose(axes).reshape(shape[::-1])
    return x.reshape(shape).T


@functools.lru_cache(maxsize=16)
def _build_program(
    steps: tuple[Step, ...],
    named_targets: tuple[tuple[str, TargetSpec], ...],
    check_finite: bool,
) -> Program:
    """Returns the same object for equal plans, so that a new engine recompiles nothing."""
    targets = dict(named_targets)

    def run(sources: list[Sources], is_native: bool) -> PreparedWeights:
        made = {
            step.target: _stored(x, step, targets[step.target], is_native)
            for x, step in zip(sources, steps, strict=True)
        }
        flags = jnp.stack([flag for _, flag in made.values()]) if check_finite else None
        return {name: stored for name, (stored, _) in made.items()}, flags

    def sums(sources: list[Sources]) -> dict[str, jax.Array]:
        return {
            step.target: checksum(_mapped(x, step, targets[step.target]))
            for x, step in zip(sources, steps, strict=True)
        }

    shardings = {step.target: targets[step.target].sharding for step in steps}
    is_own = _is_on_own_cpus(shardings)
    is_on_one_device = len(_target_devices(shardings) or ()) == 1
    is_native = is_own and is_on_one_device and unavailable() is None
    at_target = functools.partial(run, is_native=is_native)
    elsewhere = functools.partial(run, is_native=False)

    @functools.lru_cache(maxsize=4)
    def at_source(devices: Devices) -> Callable[[list[Sources]], PreparedWeights] | None:
        if len(devices) == 1:
            return jax.jit(elsewhere)
        there = {name: same_shards(sharding, devices) for name, sharding in shardings.items()}
        return None if None in there.values() else jax.jit(elsewhere, out_shardings=(there, None))

    return Program(
        jax.jit(at_target, out_shardings=(shardings, None)),
        at_source,
        jax.jit(_stored, static_argnums=(1, 2, 3)),
        jax.jit(sums),
        shardings,
        is_native,
    )


def await_source(source: Mapping[str, Any]) -> None:
    """Waits until the source's arrays are computed. Any thread; only the calling thread waits.

    Raises:
        WeightSyncError: when arrays were deleted, or their computation fails.
    """
    _check_alive(source)
    try:
        jax.block_until_ready([x for x in source.values() if isinstance(x, jax.Array)])
    except Exception as error:
        raise WeightSyncError(f"computing the new weights failed: {error}") from error


def placement(plan: SyncPlan, source: Mapping[str, Any]) -> frozenset[Any] | None:
    """Placement that programs are compiled for; None unless the source is where the engine is."""
    target = _target_devices(plan.program.shardings)
    arrays = source.values()
    if any(not isinstance(x, jax.Array) or device_order(x.sharding) != target for x in arrays):
        return None
    return frozenset((x.sharding, x.committed) for x in arrays)


def apply(plan: SyncPlan, source: Mapping[str, Any], *, verify: bool = False) -> Weights:
    """Makes all engine parameters from the source and waits for them. Any thread.

    A source on other devices than the engine is transformed there and then moved. The result never
    shares memory with the source.

    Args:
        plan: From `plan_sync`.
        source: Arrays by name, of exactly the plan's `source_spec`.
        verify: Compare checksums of the result and of the source.

    Raises:
        WeightSyncError: when the source does not fit the plan, the transformation fails, the plan's
            check finds weights that are not finite, or the checksums differ.
    """
    _check_planned(plan, source)
    try:
        arrays = [step.operands(source) for step in plan.steps]
        made = jax.block_until_ready(_make(plan, arrays))
    except WeightSyncError:
        raise
    except Exception as error:
        raise WeightSyncError(f"transforming the new weights failed: {error}") from error
    if verify:
        check_same(plan, source, made)
    return made


def apply_donating(
    plan: SyncPlan, source: Mapping[str, Any], olds: Sequence[Weights], *, verify: bool = False
) -> Weights:
    """`apply` in the memory of about one model: frees each old weight before it makes the new one.

    Args:
        plan: From `plan_sync`.
        source: Arrays by name, of exactly the plan's `source_spec`.
        olds: The weights in use, of each engine. This call empties the mappings; do not use them
            again.
        verify: Compare checksums of the result and of the source.

    Raises:
        WeightSyncError: when the source does not fit the plan, or the new weights are not finite;
            the old weights are intact.
        WeightsLostError: when it fails later.
    """
    _check_planned(plan, source)
    _check_finite(plan, source)
    try:
        made: Weights = {}
        for step in plan.steps:
            target = plan.targets[step.target]
            for old in olds:
                if step.target in old:  # absent after a failed update
                    old.pop(step.target).delete()
            with _near(target):
                one = _store_one(plan, step.operands(source), step)[0]
            made[step.target] = jax.block_until_ready(move(one, target.sharding))
        if verify:
            check_same(plan, source, made)
    except Exception as error:
        raise WeightsLostError(
            f"making new weights in the place of the old ones failed half-way: {error}"
        ) from error
    return made


def _store_one(plan: SyncPlan, sources: Sources, step: Step) -> tuple[jax.Array, jax.Array]:
    """One parameter in its stored form, and whether it is finite; equal steps share a program."""
    is_native = plan.program.is_native and all(
        not isinstance(x, jax.Array) or all(map(is_own_cpu, x.devices())) for x in sources
    )
    target = plan.targets[step.target]._replace(alias="")
    return plan.program.one(sources, step.without_names(), target, is_native)


def _check_finite(plan: SyncPlan, source: Mapping[str, Any]) -> None:
    """Checks the mapped source, one weight after the other, before any old weight is freed.

    Raises:
        WeightSyncError: when a weight is not finite, or cannot be computed.
    """
    if not plan.checks_finite:
        return
    flags: list[bool] = []
    for step in plan.steps:
        target = plan.targets[step.target]
        nameless = step.without_names()  # so that equal ones are compiled once
        with _near(target):
            flag = _is_mapped_finite(step.operands(source), nameless, target._replace(alias=""))
            flags.append(bool(flag))
    refuse_not_finite([step.target for step in plan.steps], flags)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _is_mapped_finite(sources: Sources, step: Step, target: TargetSpec) -> jax.Array:
    if target.quantized is None:
        return is_finite(_mapped(sources, step, target))
    return is_finite(_transform(sources, step))


def _in_device_memory(x: Any) -> Any:
    """The array; a copy on its devices if the trainer keeps it in host memory."""
    if not isinstance(x, jax.Array):
        return x
    kind = _first_device(x.sharding).default_memory().kind
    is_there = x.sharding.memory_kind == kind
    return x if is_there else jax.device_put(x, x.sharding.with_memory_kind(kind))


def _near(target: TargetSpec) -> contextlib.AbstractContextManager[Any]:
    """A context in which host arrays are processed on a device of the target."""
    return jax.default_device(_first_device(target.sharding))


def _first_device(sharding: jax.sharding.Sharding) -> Any:
    return min(sharding.device_set, key=lambda device: device.id)


def _check_planned(plan: SyncPlan, source: Mapping[str, Any]) -> None:
    if source_spec(source) != plan.source_spec:
        raise WeightSyncError("the source changed its names, shapes or dtypes since it was planned")
    _check_alive(source)


def _check_alive(source: Mapping[str, Any]) -> None:
    deleted = [n for n, x in source.items() if isinstance(x, jax.Array) and x.is_deleted()]
    if deleted:
        raise WeightSyncError(f"source parameters were deleted, or donated to a program: {deleted}")


def _make(plan: SyncPlan, arrays: list[Sources]) -> Weights:
    """Dispatches the transformation, at the source if that is in one place, and the moves.

    If weights must be finite, it waits for the transformation and refuses those that are not. JAX
    takes longer to find that a hundred arrays need no move than to check the source.
    """
    arrays, source = _together(plan, arrays)
    if plan.stacks:
        return _make_one_by_one(plan, arrays)
    is_at_target = source is None
    run = plan.program.at_target if source is None else plan.program.at_source(source)
    if run is None:
        return _make_one_by_one(plan, arrays)
    weights, flags = run(arrays)
    refuse_not_finite([step.target for step in plan.steps], flags)
    return weights if is_at_target else jax.device_put(weights, plan.program.shardings)


def _make_one_by_one(plan: SyncPlan, arrays: list[Sources]) -> Weights:
    """Transforms at the source and moves one weight after another: `move` needs room for each."""
    made, flags = {}, []
    for step, sources in zip(plan.steps, arrays, strict=True):
        target = plan.targets[step.target]
        with _near(target):
            one, flag = _store_one(plan, sources, step)
        made[step.target] = jax.block_until_ready(move(one, target.sharding))
        flags.append(flag)
    if plan.checks_finite:
        refuse_not_finite([step.target for step in plan.steps], [bool(flag) for flag in flags])
    return made


def _together(plan: SyncPlan, arrays: list[Sources]) -> tuple[list[Sources], Devices | None]:
    """The arrays where one program can take them all, and its devices; None for the engine's."""
    target = _target_devices(plan.program.shardings)
    sources = {
        device_order(x.sharding) for each in arrays for x in each if isinstance(x, jax.Array)
    }
    if sources <= {target}:
        return arrays, None
    if len(sources) == 1 and None not in sources:
        return arrays, sources.pop()
    # Scattered over devices: a program takes inputs only from one set of devices.
    shardings = plan.program.shardings
    return [tuple(_gather(x, target, shardings) for x in each) for each in arrays], None


def check_same(plan: SyncPlan, source: Mapping[str, Any], weights: Weights) -> None:
    """Raises WeightSyncError unless every weight holds the bits of its mapped source."""
    wrong = differing(plan, source, weights)
    if wrong:
        raise WeightSyncError(f"checksums of the new weights differ from the source's: {wrong}")


def differing(plan: SyncPlan, source: Mapping[str, Any], weights: Weights) -> list[str]:
    """Names of weights that do not hold the bits of their mapped source, sorted.

    The source is mapped again at its own place, without the engine's physical layout. This gives
    the same bits if hooks only move and cast: arithmetic may round differently in another program.
    """
    arrays, _ = _together(plan, [step.operands(source) for step in plan.steps])
    with _near(plan.targets[plan.steps[0].target]):
        wanted = to_hex(
            _checksums_one_by_one(plan, arrays) if plan.stacks else plan.program.checksums(arrays)
        )
    found = checksums(weights, plan.targets)
    return sorted(name for name in wanted if wanted[name] != found[name])


def _checksums_one_by_one(plan: SyncPlan, arrays: list[Sources]) -> dict[str, jax.Array]:
    found = {}
    for step, sources in zip(plan.steps, arrays, strict=True):
        target = plan.targets[step.target]
        one = _mapped_alone(sources, step.without_names(), target._replace(alias=""))
        found[step.target] = jax.block_until_ready(_checksum_alone(one))
    return found


_mapped_alone = jax.jit(_mapped, static_argnums=(1, 2))
_checksum_alone = jax.jit(checksum)


def checksums(
    weights: Mapping[str, jax.Array], targets: Mapping[str, TargetSpec]
) -> dict[str, str]:
    """Checksums of stored weights in their logical shapes, 16 hexadecimal digits each.

    Args:
        weights: Stored weights.
        targets: Their specifications; a weight without one is stored in its logical shape.
    """
    forms = tuple(
        (name, target.form, target.shape)
        for name, target in targets.items()
        if name in weights and target.form is not Form.LOGICAL
    )
    return to_hex(_stored_checksums(dict(weights), forms))


@functools.partial(jax.jit, static_argnums=1)
def _stored_checksums(
    weights: Weights, forms: tuple[tuple[str, Form, tuple[int, ...]], ...]
) -> dict[str, jax.Array]:
    logical = {name: form.restore(weights[name], shape) for name, form, shape in forms}
    return {name: checksum(logical.get(name, w)) for name, w in weights.items()}


class WeightMaker:
    """Makes engine weights from sources, and plans again only when source or rules change.

    Not thread-safe: the thread that builds the engine uses it first, then the update thread.

    Attributes:
        targets: The parameters that it makes.
    """

    def __init__(self, targets: Mapping[str, TargetSpec]) -> None:
        """Makes the parameters of `targets`."""
        self.targets = targets
        self._plan: tuple[Any, SyncPlan] | None = None

    def plan(
        self, tree: Any, rules: Sequence[WeightRule], *, check_finite: bool = True
    ) -> tuple[SyncPlan, dict[str, Any]]:
        """The plan for a pytree of arrays, and its arrays by name; see `plan_sync`."""
        source = flatten_named(tree)
        spec = source_spec(source)
        key = (tuple(spec.items()), tuple(rules), check_finite)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, plan_sync(spec, rules, self.targets, check_finite))
        return self._plan[1], source

    def make(self, tree: Any, rules: Sequence[WeightRule], *, check_finite: bool = True) -> Weights:
        """All engine parameters from a pytree of arrays; see `plan_sync` and `apply`."""
        return apply(*self.plan(tree, rules, check_finite=check_finite))


def _target_devices(shardings: Mapping[str, jax.sharding.Sharding]) -> tuple[Any, ...] | None:
    (devices,) = {device_order(sharding) for sharding in shardings.values()}
    return devices


def _is_on_own_cpus(shardings: Mapping[str, jax.sharding.Sharding]) -> bool:
    return all(map(is_own_cpu, next(iter(shardings.values())).device_set))


def _gather(
    x: Any,
    target: tuple[Any, ...] | None,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> Any:
    """The array on the target's devices: itself if it is there, else a copy on each."""
    if not isinstance(x, jax.Array) or device_order(x.sharding) == target:
        return x
    some = next(iter(shardings.values()))
    if isinstance(some, jax.sharding.NamedSharding):
        some = jax.sharding.NamedSharding(some.mesh, jax.sharding.PartitionSpec())
    return move(x, some)
