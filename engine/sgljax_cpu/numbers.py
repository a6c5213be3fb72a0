"""Numbers as arrays store them, in JIT-compiled CPU kernels; they are computed with as float32."""

from __future__ import annotations

from sgljax_cpu.emit import F32, Code, Value, lanes_of, vector

STORED = {"float32": F32, "bfloat16": "i16", "float16": "half", "int8": "i8"}
"""LLVM's types of stored numbers, by the name of their dtype."""

_ALIGNMENTS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def load_as_float(code: Code, address: Value, dtype: str, lanes: int) -> Value:
    """Loads a vector of stored numbers as float32."""
    found = code.load(address, vector(lanes, STORED[dtype]), _ALIGNMENTS[dtype])
    return widen(code, found, dtype)


def store_float(code: Code, value: Value, address: Value, dtype: str) -> None:
    """Stores a vector of float32, rounded to a floating-point dtype."""
    code.store(rounded(code, value, dtype), address, _ALIGNMENTS[dtype])


def widen(code: Code, stored: Value, dtype: str) -> Value:
    """Stored numbers as float32."""
    lanes = lanes_of(stored.type)
    floats, integers = vector(lanes), vector(lanes, "i32")
    if dtype == "float32":
        return stored
    if dtype == "float16":
        return code.convert("fpext", stored, floats)
    if dtype == "int8":
        return code.convert("sitofp", code.convert("sext", stored, integers), floats)
    shift = code.splat(Value("i32", "16"), lanes)
    wide = code.convert("zext", stored, integers)
    return code.convert("bitcast", code.shift_left(wide, shift), floats)


def rounded(code: Code, value: Value, dtype: str) -> Value:
    """A vector of float32 as a floating-point dtype stores it, rounded to the nearest even."""
    lanes = lanes_of(value.type)
    if dtype == "float32":
        return value
    if dtype == "float16":
        return code.convert("fptrunc", value, vector(lanes, STORED[dtype]))
    bits = code.convert("bitcast", value, vector(lanes, "i32"))
    shift, half, one = (code.splat(Value("i32", text), lanes) for text in ("16", "32767", "1"))
    last = code.both(code.shift_right(bits, shift), one)
    upper = code.shift_right(code.add(code.add(bits, half), last), shift)
    is_nan = code.float_compare("uno", value, value)
    nan = code.splat(Value("i32", str(0x7FC0)), lanes)
    return code.convert("trunc", code.select(is_nan, nan, upper), vector(lanes, STORED[dtype]))
