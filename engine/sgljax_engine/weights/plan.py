"""Plans of a weight sync: proof, on shapes alone, that a source covers the engine's parameters.

`plan_sync` proves before any data moves that every engine parameter is covered exactly once, that
every source parameter is used or ignored on purpose, and that shapes fit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax.numpy as jnp

from sgljax_engine.errors import WeightSyncError
from sgljax_engine.layers.int8 import SCALE_SUFFIX
from sgljax_engine.weights.lora import LoraTerm, lora_terms
from sgljax_engine.weights.moves import in_device_memory
from sgljax_engine.weights.problems import coverage_problems, shape_problems, stacked_step
from sgljax_engine.weights.programs import Program, build_program
from sgljax_engine.weights.rules import (
    LoraRule,
    Match,
    Rule,
    RuleTable,
    WeightRule,
    flatten_named,
)
from sgljax_engine.weights.specs import Sources, SourceSpec, Step, TargetSpec, source_spec

_MAX_PROBLEMS = 20
"""Problems of a source that an error names; an empty one has hundreds."""


@dataclasses.dataclass(frozen=True)
class SyncPlan:
    """A checked plan. Reusable for every source of the same specification.

    It has one step for each target, in their order.
    """

    source_spec: dict[str, SourceSpec]
    steps: tuple[Step, ...]
    targets: Mapping[str, TargetSpec]
    program: Program
    checks_finite: bool

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The engine parameters that it makes."""
        return frozenset(self.targets)

    @functools.cached_property
    def reads(self) -> tuple[tuple[str, ...], ...]:
        return tuple(step.reads for step in self.steps)

    @functools.cached_property
    def nameless(self) -> dict[str, tuple[Step, TargetSpec]]:
        """Each parameter's step and target without names, so that equal ones share a program."""
        return {
            step.target: (step.without_names(), self.targets[step.target]._replace(alias=""))
            for step in self.steps
        }

    @functools.cached_property
    def stacks(self) -> bool:
        """Whether it stacks arrays, thousands where each expert is one, or takes quantised ones.

        One program of all would take minutes to compile, or the memory of both forms. One by one,
        layers share their programs.
        """
        is_quantized = any(spec.dtype == jnp.uint8 for spec in self.source_spec.values())
        return is_quantized or any(step.stacked for step in self.steps)

    @property
    def is_on_one_device(self) -> bool:
        return len(self.program.devices or ()) == 1

    def arrays(self, source: Mapping[str, Any]) -> list[Sources]:
        """The source arrays that each step reads."""
        return [tuple(map(source.__getitem__, names)) for names in self.reads]

    def operands(self, source: Mapping[str, Any]) -> Iterator[Sources]:
        """`arrays` as each step takes them: several in one kind of memory. Copies lazily."""
        for step, arrays in zip(self.steps, self.arrays(source), strict=True):
            yield arrays if step.lora is None else tuple(map(in_device_memory, arrays))


def plan_sync(
    source: Mapping[str, SourceSpec],
    rules: Sequence[WeightRule],
    targets: Mapping[str, TargetSpec],
    check_finite: bool = True,
) -> SyncPlan:
    """Matches rules and proves coverage and shapes.

    Raises WeightSyncError that names every parameter that is missing, unused, mapped twice, mapped
    to an unknown name or of the wrong shape or kind, with both shapes; and every LoRA pair that is
    incomplete, does not fit or changes an ignored weight.
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
        problems.extend(coverage_problems(name, spec, matches))
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
                    stack[found.into] = _plan_step(name, target, found, terms)
            elif target in steps or target in stacks:
                other = steps[target] if target in steps else next(iter(stacks[target].values()))
                problems.append(f"{name!r} and {other.source!r} both map to {target!r}")
            else:
                steps[target] = _plan_step(name, target, found, terms)
                problems.extend(shape_problems(spec, steps[target], targets[target].source_shape))
    for target, stack in stacks.items():
        steps[target], found_problems = stacked_step(stack, source, targets[target].shape)
        problems.extend(found_problems)
    problems.extend(
        f"parameter {name!r} {list(targets[name].source_shape)} is missing from the source"
        for name in weights
        if name not in steps
    )
    _refuse(problems)
    for name in scales:
        steps[name] = steps[name.removesuffix(SCALE_SUFFIX)]._replace(target=name)
    ordered = tuple(steps[name] for name in targets)
    return _with_program(dict(source), ordered, targets, check_finite)


def _plan_step(name: str, target: str, found: Match, terms: Mapping[str, LoraTerm]) -> Step:
    rule = found.rule
    return Step(
        name,
        target,
        rule.transpose,
        rule.hook,
        found.part,
        rule.part_axes,
        rule.num_parts,
        terms.get(name),
    )


def _refuse(problems: Sequence[str]) -> None:
    if not problems:
        return
    more = len(problems) - _MAX_PROBLEMS
    shown = problems if more <= 0 else [*problems[:_MAX_PROBLEMS], f"and {more} more"]
    raise WeightSyncError(
        f"weights do not fit the model ({len(problems)} problem(s)):\n  " + "\n  ".join(shown)
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
    build = build_program.__wrapped__ if has_hooks else build_program
    program = build(steps, tuple(targets.items()), check_finite)
    return SyncPlan(source, steps, targets, program, check_finite)


class WeightPlanner:
    """Plans the updates of an engine, anew only when source or rules change.

    Not thread-safe: the thread that builds the engine uses it first, then the update thread.
    """

    def __init__(self, targets: Mapping[str, TargetSpec]) -> None:
        self.targets = targets
        self._plan: tuple[Any, SyncPlan] | None = None

    def plan(
        self, tree: Any, rules: Sequence[WeightRule], *, check_finite: bool = True
    ) -> tuple[SyncPlan, dict[str, Any]]:
        """The plan for a pytree of arrays, and its arrays by name; see `plan_sync`."""
        source = flatten_named(tree)
        spec = source_spec(source)
        key = (spec, tuple(rules), check_finite)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, plan_sync(spec, rules, self.targets, check_finite))
        return self._plan[1], source
