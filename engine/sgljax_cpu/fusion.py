"""Joins the operations of a function into chains, each computed by one foreign function call.

`fuse` traces a function and goes through its equations in order. Operations, and the elementwise
arithmetic and changes of shape between them, are gathered; a chain ends where another equation
needs one of its results. What depends on no chain stays XLA's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from sgljax_cpu.chain import Step, run_chain
from sgljax_cpu.elementwise import FUNCTIONS, Apply, Expression, Leaf, elementwise
from sgljax_cpu.expressions import (
    combined_kind,
    renumbered,
    shifted,
    spread_kind,
)
from sgljax_cpu.primitive import OPERATION

_SAME_ORDER = ("reshape", "squeeze", "expand_dims")
"""Equations that leave elements in memory as they are."""

_SPREAD = "broadcast_in_dim"

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
"""Equations that call a function, and the parameter that holds it."""

_POWERS = {2: "square", 3: "cube"}


def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with chains in place of operations, to be called inside a program.

    Args:
        function: Takes and returns pytrees of arrays.
    """

    def fused(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = _Fusion(traced).run(jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return fused


class _Equation(NamedTuple):
    """An equation whose operands are numbers of values, or literals."""

    source: Any
    operands: tuple[Any, ...]
    results: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.source.primitive.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.source.outvars[0].aval.shape


class _Pending(NamedTuple):
    """A result of the chain that is being gathered, in some shape."""

    number: int
    shape: tuple[int, ...]


class _Spread(NamedTuple):
    """A value repeated to a larger shape by an equation; see `Leaf` for `kind` and `row_size`."""

    equation: _Equation
    kind: str
    row_size: int


class _Node(NamedTuple):
    """Elementwise arithmetic in the chain.

    Attributes:
        expression: Its leaves' indices are positions in `leaves`.
        leaves: Numbers of the values it reads.
        row_size: D of its result [R, D]; None for any.
    """

    expression: Expression
    leaves: tuple[int, ...]
    row_size: int | None


class _Fusion:
    """One pass over a function's equations."""

    def __init__(self, traced: core.ClosedJaxpr) -> None:
        self._count = 0
        self._known: dict[int, Any] = {}
        """Arrays, or what will become one, by number."""
        self._chain: dict[int, Step | _Node] = {}
        """Steps by the number of their first result, in order."""
        self._shapes: dict[int, jax.ShapeDtypeStruct] = {}
        """Shapes of the chain's results."""
        jaxpr = traced.jaxpr
        names: dict[Any, Any] = {}
        for variable, value in zip(jaxpr.constvars, traced.consts, strict=True):
            names[variable] = self._new()
            self._known[names[variable]] = value
        self._parameters = [self._new() for _ in jaxpr.invars]
        names |= dict(zip(jaxpr.invars, self._parameters, strict=True))
        self._equations = list(self._inlined(jaxpr, names))
        self._returned = [_operand(atom, names) for atom in jaxpr.outvars]
        self._last_use: dict[int, int] = {}
        self._num_uses: Counter[int] = Counter()
        self._find_uses()

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Computes the function."""
        self._known |= dict(zip(self._parameters, arguments, strict=True))
        for index, equation in enumerate(self._equations):
            self._add(index, equation)
        self._finish_chain(len(self._equations))
        return [self._array(operand) for operand in self._returned]

    # ------------------------------------------------------------------ before

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _inlined(self, jaxpr: Any, names: dict[Any, Any]) -> Iterator[_Equation]:
        """The equations, with those of called functions in the place of the calls."""
        for equation in jaxpr.eqns:
            operands = tuple(_operand(atom, names) for atom in equation.invars)
            parameter = _CALLS.get(equation.primitive.name)
            if parameter is None:
                results = tuple(self._new() for _ in equation.outvars)
                names |= dict(zip(equation.outvars, results, strict=True))
                yield _Equation(equation, operands, results)
                continue
            called = equation.params[parameter]
            inside = dict(zip(called.jaxpr.invars, operands, strict=True))
            for variable, value in zip(called.jaxpr.constvars, called.consts, strict=True):
                inside[variable] = self._new()
                self._known[inside[variable]] = value
            yield from self._inlined(called.jaxpr, inside)
            results = [_operand(atom, inside) for atom in called.jaxpr.outvars]
            names |= dict(zip(equation.outvars, results, strict=True))

    def _find_uses(self) -> None:
        end = len(self._equations)
        for operand in self._returned:
            if isinstance(operand, int):
                self._num_uses[operand] += 1
                self._last_use[operand] = end
        for index, equation in reversed(list(enumerate(self._equations))):
            last = index
            if equation.name in (*_SAME_ORDER, _SPREAD):  # read where its result is read
                last = self._last_use.get(equation.results[0], index)
            for operand in equation.operands:
                if isinstance(operand, int):
                    self._num_uses[operand] += 1
                    self._last_use[operand] = max(self._last_use.get(operand, 0), last)

    # ------------------------------------------------------------------ equations

    def _add(self, index: int, equation: _Equation) -> None:
        if equation.source.primitive is OPERATION:
            self._add_operation(index, equation)
        elif equation.name == _SPREAD and (spread := _spread(equation)) is not None:
            self._known[equation.results[0]] = spread
        elif not any(self._is_pending(operand) for operand in equation.operands):
            self._compute(equation)
        elif equation.name in _SAME_ORDER and isinstance(
            pending := self._known[equation.operands[0]], _Pending
        ):
            self._known[equation.results[0]] = _Pending(pending.number, equation.shape)
        elif not self._add_elementwise(equation):
            self._finish_chain(index)
            self._compute(equation)

    def _is_pending(self, operand: Any) -> bool:
        known = self._known[operand] if isinstance(operand, int) else None
        if isinstance(known, _Spread):
            return self._is_pending(known.equation.operands[0])
        return isinstance(known, _Pending)

    def _compute(self, equation: _Equation) -> None:
        """Leaves an equation to XLA."""
        primitive = equation.source.primitive
        bound = primitive.get_bind_params(equation.source.params)
        # Up to JAX 0.9 functions come apart from the other parameters.
        functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
        operands = [self._array(operand) for operand in equation.operands]
        found = primitive.bind(*functions, *operands, **parameters)
        found = found if primitive.multiple_results else [found]
        self._known |= dict(zip(equation.results, found, strict=True))

    def _array(self, operand: Any) -> Any:
        """The array of an operand that is not pending."""
        if not isinstance(operand, int):
            return operand.val
        known = self._known[operand]
        if isinstance(known, _Spread):
            self._compute(known.equation)
            known = self._known[operand]
        assert not isinstance(known, _Pending), operand
        return known

    def _add_operation(self, index: int, equation: _Equation) -> None:
        parameters = equation.source.params
        for operand in equation.operands:
            known = self._known[operand] if isinstance(operand, int) else None
            if isinstance(known, _Spread):  # the operation reads it in memory
                if self._is_pending(operand):
                    self._finish_chain(index)
                self._array(operand)
        arguments = tuple(self._number(operand) for operand in equation.operands)
        taken = tuple(_spec_of(atom.aval) for atom in equation.source.invars)
        made = parameters["results"]
        step = Step(parameters["operation"], arguments, equation.results, taken, made)
        self._append(step, equation.results, made)

    def _append(
        self, step: Step | _Node, results: Sequence[int], shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> None:
        self._chain[results[0]] = step
        for number, shape in zip(results, shapes, strict=True):
            self._shapes[number] = shape
            self._known[number] = _Pending(number, shape.shape)

    def _number(self, operand: Any) -> int:
        """The number of an operand's memory."""
        if not isinstance(operand, int):
            number = self._new()
            self._known[number] = jnp.asarray(operand.val)
            return number
        known = self._known[operand]
        return known.number if isinstance(known, _Pending) else operand

    # ------------------------------------------------------------------ elementwise

    def _add_elementwise(self, equation: _Equation) -> bool:
        """Adds arithmetic to the chain; returns False if it is of another kind."""
        name, aval = equation.name, equation.source.outvars[0].aval
        if name == "integer_pow":
            name = _POWERS.get(equation.source.params["y"], "")
        if name not in FUNCTIONS or aval.dtype != jnp.float32:
            return False
        leaves: list[int] = []
        parts: list[Expression] = []
        row_sizes: set[int] = set()
        for operand in equation.operands:
            part = self._part(operand, aval, leaves, row_sizes)
            if part is None:
                return False
            parts.append(part)
        if len(row_sizes) > 1:
            return False
        for operand in equation.operands:  # inlined: they are part of this expression now
            inner = self._inner(operand, aval)
            if inner is not None:
                self._chain.pop(inner, None)
        node = _Node(Apply(name, tuple(parts)), tuple(leaves), next(iter(row_sizes), None))
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        self._append(node, equation.results, [shape])
        return True

    def _inner(self, operand: Any, aval: Any) -> int | None:
        """The number of the arithmetic that an operand alone is used for, of the same size."""
        if not isinstance(operand, int) or self._num_uses[operand] != 1:
            return None
        known = self._known[operand]
        if not isinstance(known, _Pending) or math.prod(known.shape) != aval.size:
            return None
        is_node = isinstance(self._chain.get(known.number), _Node)
        return known.number if is_node and self._num_uses[known.number] == 1 else None

    def _part(
        self, operand: Any, aval: Any, leaves: list[int], row_sizes: set[int]
    ) -> Expression | None:
        """An operand as part of an expression; None if it cannot be one. Adds to the lists."""
        if not isinstance(operand, int):
            return float(operand.val) if np.ndim(operand.val) == 0 else None
        inner = self._inner(operand, aval)
        if inner is not None:
            node = self._chain[inner]
            assert isinstance(node, _Node)
            if node.row_size is not None:
                row_sizes.add(node.row_size)
            first = len(leaves)
            leaves += node.leaves
            return shifted(node.expression, first)
        known, value = self._known[operand], operand
        inside = ("full", 0)
        if isinstance(known, _Spread):
            inside, value = (known.kind, known.row_size), known.equation.operands[0]
            if not isinstance(value, int):
                return float(value.val) if np.ndim(value.val) == 0 else None
            if isinstance(self._known[value], _Spread):
                return None
        shape, dtype = self._spec(value)
        if isinstance(known, _Spread):
            shape = known.equation.shape
        axes = range(len(aval.shape) - len(shape), len(aval.shape))
        outside = spread_kind(shape, axes, aval.shape)
        found = combined_kind(inside, outside)
        if found is None:
            return None
        kind, row_size = found
        if dtype not in ("float32", "bool"):
            return None
        if row_size:
            row_sizes.add(row_size)
        leaves.append(self._number(value))
        return Leaf(len(leaves) - 1, kind, dtype)

    def _spec(self, number: int) -> tuple[tuple[int, ...], str]:
        known = self._known[number]
        if isinstance(known, _Pending):
            return known.shape, self._shapes[known.number].dtype.name
        return np.shape(known), jnp.result_type(known).name

    # ------------------------------------------------------------------ chains

    def _finish_chain(self, index: int) -> None:
        """Computes the chain; equations from `index` on read its results from arrays."""
        if not self._chain:
            return
        waiting = {n: known for n, known in self._known.items() if isinstance(known, _Pending)}
        steps = [self._step(number, step) for number, step in self._chain.items()]
        made = {number for step in steps for number in step.results}
        kept = sorted(
            {known.number for n, known in waiting.items() if self._last_use.get(n, -1) >= index}
        )
        arguments = {n for step in steps for n in step.arguments} - made
        arrays = {number: self._array(number) for number in sorted(arguments)}
        found = dict(zip(kept, run_chain(steps, arrays, kept), strict=True))
        for number, known in waiting.items():
            if known.number in found:
                self._known[number] = found[known.number].reshape(known.shape)
            else:
                del self._known[number]
        self._chain, self._shapes = {}, {}

    def _step(self, number: int, step: Step | _Node) -> Step:
        if isinstance(step, Step):
            return step
        shape = self._shapes[number]
        row_size = shape.shape[-1] if step.row_size is None else step.row_size
        leaves = tuple(dict.fromkeys(step.leaves))
        expression = renumbered(step.expression, [leaves.index(n) for n in step.leaves])
        operation = elementwise(expression, len(leaves), row_size)
        return Step(operation, leaves, (number,), (), (shape,))


def _spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _operand(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, core.Literal) else names[atom]


def _spread(equation: _Equation) -> _Spread | None:
    """How an equation repeats a value, if an expression can read it so."""
    dims = equation.source.params["broadcast_dimensions"]
    found = spread_kind(equation.source.invars[0].aval.shape, dims, equation.shape)
    return None if found is None else _Spread(equation, *found)
