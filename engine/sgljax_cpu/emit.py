"""Writes functions in LLVM IR.

A `Code` is one function that is being written; its methods append instructions and return their
results as `Value`s. A `Variable` holds what changes between iterations of a loop, on the stack;
LLVM turns it into a register. The IR is that of LLVM 20 and later.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

I1, I8, I32, I64, F32, F64, PTR, VOID = "i1", "i8", "i32", "i64", "float", "double", "ptr", "void"


class Value(NamedTuple):
    """A computed value: its LLVM type and its name, or a constant."""

    type: str
    text: str


Number = int | Value
"""An integer; Python's are 64-bit constants."""

NULL = Value(PTR, "null")


def vector(lanes: int, of: str = F32) -> str:
    """The type of a vector."""
    return f"<{lanes} x {of}>"


def lanes_of(type_: str) -> int:
    """Number of elements in a vector type."""
    return int(type_[1:].split()[0])


def element_of(type_: str) -> str:
    """The type of the elements of a vector type."""
    return type_.strip("<>").split()[-1]


def f32(value: float) -> Value:
    """A float constant. LLVM wants the bits of a double that is exactly a float."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return Value(F32, f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}")


def f64(value: float) -> Value:
    """A double constant."""
    return Value(F64, f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}")


def i32(value: int) -> Value:
    """An i32 constant."""
    return Value(I32, str(value))


class Module:
    """Functions and memory that are compiled together."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._declared: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The whole module as LLVM IR."""
        return "\n".join([*self._declared.values(), *self._parts]) + "\n"

    def declare(self, name: str, result: str, arguments: Sequence[str]) -> Value:
        """Declares an external function."""
        self._declared[name] = f"declare {result} @{name}({', '.join(arguments)})"
        return Value(PTR, f"@{name}")

    def memory(self, name: str, type_: str) -> Value:
        """Memory that lives as long as the process, 0 at first."""
        self._parts.append(f"@{name} = internal global {type_} zeroinitializer, align 64")
        return Value(PTR, f"@{name}")

    def constant(self, name: str, type_: str, values: Sequence[Value]) -> Value:
        """A list of constants."""
        listed = ", ".join(f"{type_} {value.text}" for value in values)
        self._parts.append(f"@{name} = internal constant [{len(values)} x {type_}] [{listed}]")
        return Value(PTR, f"@{name}")

    def add(self, text: str) -> None:
        """Adds a function."""
        self._parts.append(text)


class Variable:
    """A mutable value."""

    def __init__(self, code: Code, start: Value) -> None:
        self._code, self._type = code, start.type
        self._place = code.stack(start.type)
        self.set(start)

    def get(self) -> Value:
        """Its current value."""
        return self._code.load(self._place, self._type)

    def set(self, value: Value) -> None:
        """Sets its value."""
        self._code.store(value, self._place)


class Code:
    """A function being written in a `with` block, which adds it to the module at its end.

    Attributes:
        arguments: Its arguments.
        function: The function itself.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        result: str,
        arguments: Sequence[str],
        *,
        is_public: bool = False,
    ) -> None:
        """Begins the function.

        Args:
            module: Module that gets the function.
            name: Name of the function.
            result: Type of its result.
            arguments: Types of its arguments.
            is_public: Whether it is called from outside the module.
        """
        self.arguments = [Value(type_, f"%a{i}") for i, type_ in enumerate(arguments)]
        self.function = Value(PTR, f"@{name}")
        self._module = module
        listed = ", ".join(f"{value.type} {value.text}" for value in self.arguments)
        linkage = "" if is_public else "internal "
        self._head = f"define {linkage}{result} @{name}({listed}) nounwind {{"
        self._returns_nothing = result == VOID
        self._places: list[str] = []
        self._lines: list[str] = []
        self._count = 0

    def __enter__(self) -> Code:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._lines.append("ret void" if self._returns_nothing else "unreachable")
            parts = [self._head, "entry:", *self._places, *self._lines, "}"]
            self._module.add("\n".join(parts))

    # ------------------------------------------------------------------ integers

    def add(self, a: Number, b: Number) -> Value:
        """A + b."""
        return self._binary("add", a, b)

    def sub(self, a: Number, b: Number) -> Value:
        """A - b."""
        return self._binary("sub", a, b)

    def mul(self, a: Number, b: Number) -> Value:
        """A * b."""
        return self._binary("mul", a, b)

    def div(self, a: Number, b: Number) -> Value:
        """A // b of numbers >= 0."""
        return self._binary("udiv", a, b)

    def rem(self, a: Number, b: Number) -> Value:
        """A % b of numbers >= 0."""
        return self._binary("urem", a, b)

    def ceil_div(self, a: Number, b: Number) -> Value:
        """A / b rounded up, of numbers >= 0."""
        return self.div(self.sub(self.add(a, b), 1), b)

    def shift_left(self, a: Value, b: Value) -> Value:
        """A << b, of vectors too."""
        return self._op(a.type, f"shl {a.type} {a.text}, {b.text}")

    def shift_right(self, a: Value, b: Value) -> Value:
        """A >> b of numbers without a sign, of vectors too."""
        return self._op(a.type, f"lshr {a.type} {a.text}, {b.text}")

    def both(self, a: Value, b: Value) -> Value:
        """A and b, of conditions, and of integers bit by bit."""
        return self._op(a.type, f"and {a.type} {a.text}, {b.text}")

    def either(self, a: Value, b: Value) -> Value:
        """A or b, of integers bit by bit."""
        return self._op(a.type, f"or {a.type} {a.text}, {b.text}")

    def differ(self, a: Value, b: Value) -> Value:
        """The bits in which two integers differ."""
        return self._op(a.type, f"xor {a.type} {a.text}, {b.text}")

    def compare(self, how: str, a: Number, b: Number) -> Value:
        """A condition: `how` is LLVM's, such as "eq", "ne", "slt", "sge"; of vectors too."""
        left, right = self._number(a), self._number(b)
        return self._op(
            _of_conditions(left.type), f"icmp {how} {left.type} {left.text}, {right.text}"
        )

    def less(self, a: Number, b: Number) -> Value:
        """A < b."""
        return self.compare("slt", a, b)

    def equal(self, a: Number, b: Number) -> Value:
        """A == b."""
        return self.compare("eq", a, b)

    def select(self, condition: Value, a: Number, b: Number) -> Value:
        """A where the condition holds, else b."""
        yes, no = self._number(a), self._number(b)
        kind = condition.type
        return self._op(
            yes.type, f"select {kind} {condition.text}, {yes.type} {yes.text}, {no.type} {no.text}"
        )

    def min(self, a: Number, b: Number) -> Value:
        """The smaller one."""
        return self.select(self.less(a, b), a, b)

    def max(self, a: Number, b: Number) -> Value:
        """The larger one."""
        return self.select(self.less(a, b), b, a)

    def convert(self, how: str, value: Value, type_: str) -> Value:
        """LLVM's conversions, such as "sext", "bitcast", "fptosi"."""
        return self._op(type_, f"{how} {value.type} {value.text} to {type_}")

    # ------------------------------------------------------------------ memory

    def stack(self, type_: str) -> Value:
        """A place on the stack, of a cache line's alignment."""
        name = self._name()
        self._places.append(f"{name} = alloca {type_}, align 64")
        return Value(PTR, name)

    def variable(self, start: Number) -> Variable:
        """A variable with the value `start`."""
        return Variable(self, self._number(start))

    def at(self, base: Value, index: Number, type_: str = F32) -> Value:
        """The address of an element."""
        number = self._number(index)
        place = f"{number.type} {number.text}"
        return self._op(PTR, f"getelementptr {type_}, ptr {base.text}, {place}")

    def load(self, address: Value, type_: str, align: int | None = None) -> Value:
        """Loads a value."""
        return self._op(type_, f"load {type_}, ptr {address.text}{_alignment(align)}")

    def store(self, value: Value, address: Value, align: int | None = None) -> None:
        """Stores a value."""
        place = f"ptr {address.text}{_alignment(align)}"
        self._lines.append(f"store {value.type} {value.text}, {place}")

    def load_int(self, base: Value, index: Number) -> Value:
        """An element of an array of int32, as an i64."""
        return self.convert("sext", self.load(self.at(base, index, I32), I32), I64)

    def load_field(self, base: Value, offset: int, type_: str) -> Value:
        """Loads a value at a byte offset from an address."""
        return self.load(self.at(base, offset, I8), type_)

    def store_field(self, value: Number, base: Value, offset: int) -> None:
        """Stores a value at a byte offset from an address."""
        self.store(self._number(value), self.at(base, offset, I8))

    def prefetch(self, address: Value) -> None:
        """Prefetches a cache line. The address may be invalid."""
        self.intrinsic("llvm.prefetch.p0", VOID, [address, i32(0), i32(3), i32(1)])

    def atomic(self, how: str, address: Value, value: Number) -> Value:
        """Changes an i64 atomically: "add", "sub", "xchg"; returns the old value."""
        number = self._number(value)
        return self._op(I64, f"atomicrmw {how} ptr {address.text}, i64 {number.text} seq_cst")

    def atomic_load(self, address: Value) -> Value:
        """Loads an i64 that other threads write."""
        return self._op(I64, f"load atomic i64, ptr {address.text} seq_cst, align 8")

    def exchange_if(self, address: Value, expected: Number, new: Number) -> Value:
        """Replaces an i64 if it is as expected; returns the condition whether it was."""
        old, put = self._number(expected), self._number(new)
        pair = self._op(
            "{i64, i1}",
            f"cmpxchg ptr {address.text}, i64 {old.text}, i64 {put.text} seq_cst seq_cst",
        )
        return self._op(I1, f"extractvalue {pair.type} {pair.text}, 1")

    # ------------------------------------------------------------------ floats

    def float_op(self, how: str, a: Value, b: Value) -> Value:
        """LLVM's "fadd", "fsub", "fmul", "fdiv", of vectors too."""
        return self._op(a.type, f"{how} {a.type} {a.text}, {b.text}")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """A * b + c, rounded once."""
        return self._elementwise("llvm.fma", [a, b, c])

    def square_root(self, a: Value) -> Value:
        """The square root."""
        return self._elementwise("llvm.sqrt", [a])

    def round_even(self, a: Value) -> Value:
        """The nearest whole number."""
        return self._elementwise("llvm.rint", [a])

    def float_max(self, a: Value, b: Value) -> Value:
        """The larger one; NaN if either is."""
        return self._elementwise("llvm.maximum", [a, b])

    def negative(self, a: Value) -> Value:
        """-a."""
        return self._op(a.type, f"fneg {a.type} {a.text}")

    def float_compare(self, how: str, a: Value, b: Value) -> Value:
        """A condition: `how` is LLVM's, such as "olt"."""
        return self._op(_of_conditions(a.type), f"fcmp {how} {a.type} {a.text}, {b.text}")

    def zeros(self, lanes: int, of: str = F32) -> Value:
        """A vector of 0."""
        return Value(vector(lanes, of), "zeroinitializer")

    def splat(self, value: Value, lanes: int) -> Value:
        """A vector with the value in each lane."""
        type_ = vector(lanes, value.type)
        first = self._op(type_, f"insertelement {type_} poison, {value.type} {value.text}, i32 0")
        same = f"{vector(lanes, I32)} zeroinitializer"
        return self._op(type_, f"shufflevector {type_} {first.text}, {type_} poison, {same}")

    def lane(self, value: Value, index: int) -> Value:
        """One element of a vector."""
        of = element_of(value.type)
        return self._op(of, f"extractelement {value.type} {value.text}, i32 {index}")

    def shuffle(self, a: Value, b: Value, picks: Sequence[int]) -> Value:
        """Lanes picked from those of `a` followed by those of `b`."""
        mask = ", ".join(f"i32 {pick}" for pick in picks)
        kind = vector(len(picks), I32)
        return self._op(
            vector(len(picks), element_of(a.type)),
            f"shufflevector {a.type} {a.text}, {b.type} {b.text}, {kind} <{mask}>",
        )

    def sum_lanes(self, value: Value) -> Value:
        """The sum of a vector's lanes, by adding halves."""
        return self._fold(value, functools.partial(self.float_op, "fadd"))

    def max_lanes(self, value: Value) -> Value:
        """The largest of a vector's lanes."""
        return self._fold(value, self.float_max)

    def lane_numbers(self, lanes: int) -> Value:
        """A vector of i32: 0, 1, 2, ..."""
        numbers = ", ".join(f"i32 {i}" for i in range(lanes))
        return Value(vector(lanes, I32), f"<{numbers}>")

    def first_lanes(self, count: Value, lanes: int) -> Value:
        """Conditions: whether a lane is one of the first `count`, an i64."""
        limit = self.splat(self.convert("trunc", count, I32), lanes)
        return self.compare("slt", self.lane_numbers(lanes), limit)

    def load_lanes(self, address: Value, conditions: Value, lanes: int) -> Value:
        """Loads floats where conditions hold, else 0; reads nothing else."""
        arguments = [address, i32(4), conditions, self.zeros(lanes)]
        return self.intrinsic(f"llvm.masked.load.v{lanes}f32.p0", vector(lanes), arguments)

    def store_lanes(self, value: Value, address: Value, conditions: Value, lanes: int) -> None:
        """Stores lanes where conditions hold; writes nothing else."""
        arguments = [value, address, i32(4), conditions]
        self.intrinsic(f"llvm.masked.store.v{lanes}f32.p0", VOID, arguments)

    # ------------------------------------------------------------------ control

    def call(self, function: Value, result: str, arguments: Sequence[Value]) -> Value:
        """Calls a function, also by its address."""
        listed = ", ".join(f"{value.type} {value.text}" for value in arguments)
        text = f"call {result} {function.text}({listed})"
        if result == VOID:
            self._lines.append(text)
            return NULL
        return self._op(result, text)

    def intrinsic(self, name: str, result: str, arguments: Sequence[Value]) -> Value:
        """Calls one of LLVM's own functions."""
        kinds = [value.type for value in arguments]
        return self.call(self._module.declare(name, result, kinds), result, arguments)

    def fence(self) -> None:
        """Other threads see earlier writes before later ones."""
        self._lines.append("fence seq_cst")

    def ret(self, value: Value = NULL) -> None:
        """Returns from the function."""
        self._lines.append(
            "ret void" if self._returns_nothing else f"ret {value.type} {value.text}"
        )
        self._begin(self._label("unreached"))

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Code inside the block runs only if the condition holds."""
        inside, after = self._label("then"), self._label("after")
        self._branch(condition, inside, after)
        yield
        self._end_with(after, after)

    @contextlib.contextmanager
    def unless(self, condition: Value) -> Iterator[None]:
        """Code inside the block runs only if the condition does not hold."""
        inside, after = self._label("otherwise"), self._label("after")
        self._lines.append(f"br i1 {condition.text}, label %{after}, label %{inside}")
        self._begin(inside)
        yield
        self._end_with(after, after)

    @contextlib.contextmanager
    def repeat(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Code inside the block repeats while the condition, evaluated each time, holds."""
        head, inside, after = map(self._label, ("head", "inside", "after"))
        self._end_with(head, head)
        self._branch(condition(), inside, after)
        yield
        self._end_with(head, after)

    @contextlib.contextmanager
    def loop(self, start: Number, stop: Number, step: Number = 1) -> Iterator[Value]:
        """A loop over integers; yields the integer."""
        index, end = self.variable(start), self._number(stop)
        with self.repeat(lambda: self.less(index.get(), end)):
            yield index.get()
            index.set(self.add(index.get(), step))

    # ------------------------------------------------------------------ inside

    def _fold(self, value: Value, join: Callable[[Value, Value], Value]) -> Value:
        lanes = lanes_of(value.type)
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(value, value, range(lanes))
            value = join(low, self.shuffle(value, value, range(lanes, 2 * lanes)))
        return self.lane(value, 0)

    def _binary(self, how: str, a: Number, b: Number) -> Value:
        left, right = self._number(a), self._number(b)
        return self._op(left.type, f"{how} {left.type} {left.text}, {right.text}")

    def _elementwise(self, name: str, arguments: Sequence[Value]) -> Value:
        type_ = arguments[0].type
        kind = type_.strip("<>").replace(" x ", "").replace("float", "f32").replace("double", "f64")
        suffix = f"v{kind}" if type_.startswith("<") else kind
        return self.intrinsic(f"{name}.{suffix}", type_, arguments)

    @staticmethod
    def _number(value: Number) -> Value:
        return value if isinstance(value, Value) else Value(I64, str(value))

    def _op(self, type_: str, text: str) -> Value:
        name = self._name()
        self._lines.append(f"{name} = {text}")
        return Value(type_, name)

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _label(self, name: str) -> str:
        self._count += 1
        return f"{name}{self._count}"

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")

    def _end_with(self, target: str, following: str) -> None:
        self._lines.append(f"br label %{target}")
        self._begin(following)

    def _branch(self, condition: Value, yes: str, no: str) -> None:
        self._lines.append(f"br i1 {condition.text}, label %{yes}, label %{no}")
        self._begin(yes)


def _alignment(align: int | None) -> str:
    return "" if align is None else f", align {align}"


def _of_conditions(type_: str) -> str:
    """The type of a comparison's result, for operands of a type."""
    return vector(lanes_of(type_), I1) if type_.startswith("<") else I1
