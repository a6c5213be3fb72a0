"""Kernels that a GPU launches in a step of a compiled program, by kind.

XLA launches one kernel for each fusion, library call and kernel of others that is left in the
optimized HLO, and none for names of what is there (tuples, bitcasts, done-halves of exchanges).
Command buffers are made later, of thunks: the text does not show them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator

from tools.aot.hlo import Instruction, Module, called, operands

OWN = re.compile(r'custom_call_target="[^"]*(?:triton|mosaic)')
"""Calls of kernels that XLA did not make."""

_PRODUCT = re.compile(r'"kind":"__(?:triton_\w*gemm\w*|cublas[\w$]*|cudnn[\w$]*)"')
_LIBRARY = re.compile(r'custom_call_target="__(?:cublas|cudnn)')
_LAYER = re.compile(r'op_name="[^"]*/jit\(layer\)/')

_NOTHING = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "partition-id",
    "replica-id",
}
"""They launch nothing, like the second halves of pairs, whose names end in -done and -update."""

_COPIES = ("copy", "copy-start")
_WHOLE = ("copy", "transpose", "concatenate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLaunches:
    """Launches of a step: an iteration of the program's loop, or the program if it has no loop.

    A program with several loops is counted as one without: what they launch is not a step.

    Attributes:
        total: All launches; a conditional counts as one.
        products: Matrix products: those that XLA compiles by Triton, and calls of libraries.
        own: Kernels that XLA did not make.
        fusions: All else that XLA compiles.
        copies: Copies.
        conditionals: Branches, whose kernels do not count: which are taken, only a run tells.
        others: Exchanges between devices, inner loops, which count once, sorts, calls of the host.
        per_layer: How many of all these belong to a layer of the model, on average.
        large_copies: Copies, transpositions and concatenations in memory of arrays as large as a
            layer's KV pages or a weight.
    """

    total: int
    products: int
    own: int
    fusions: int
    copies: int
    conditionals: int
    others: int
    per_layer: float
    large_copies: int


def count_launches(module: Module, large: Collection[int], num_layers: int) -> StepLaunches:
    """Counts a module that was compiled for a GPU.

    Args:
        module: The module.
        large: Numbers of elements of a layer's KV pages on a device, and of each weight.
        num_layers: Layers of the model.
    """
    step = _step(module)
    instructions = list(_launched(module, step))
    kinds = Counter(map(_kind, instructions))
    return StepLaunches(
        total=len(instructions),
        products=kinds["products"],
        own=kinds["own"],
        fusions=kinds["fusions"],
        copies=kinds["copies"],
        conditionals=kinds["conditionals"],
        others=kinds["others"],
        per_layer=sum(map(_is_in_layer, instructions)) / num_layers,
        large_copies=sum(_is_large_copy(module, each, large) for each in instructions),
    )


def _step(module: Module) -> str:
    """The computation that is a step."""
    loops = [each for each in module.computations[module.entry] if each.opcode == "while"]
    if len(loops) != 1:
        return module.entry
    found = re.search(r"body=%?([^\s,}]+)", loops[0].text)
    assert found is not None
    return found[1]


def _launched(module: Module, name: str) -> Iterator[Instruction]:
    """Instructions of a computation that launch something, and of those that it calls."""
    for each in module.computations[name]:
        if each.opcode == "call":
            for callee in called(each):
                yield from _launched(module, callee)
        elif each.opcode not in _NOTHING and not each.opcode.endswith(("-done", "-update")):
            yield each


def _is_in_layer(instruction: Instruction) -> bool:
    return _LAYER.search(instruction.text) is not None


def _kind(instruction: Instruction) -> str:
    opcode, text = instruction.opcode, instruction.text
    if opcode == "fusion":
        return "products" if _PRODUCT.search(text) else "fusions"
    if opcode == "custom-call":
        if OWN.search(text):
            return "own"
        return "products" if _LIBRARY.search(text) else "others"
    if opcode in _COPIES:
        return "copies"
    return "conditionals" if opcode == "conditional" else "others"


def _is_large_copy(module: Module, instruction: Instruction, large: Collection[int]) -> bool:
    """Whether an instruction writes a large array as it is: whole, turned, or behind another."""
    array = instruction.arrays[0] if instruction.arrays else None
    if array is None or instruction.opcode not in ("fusion", *_COPIES, *_WHOLE):
        return False
    if instruction.opcode == "fusion":
        (inner,) = called(instruction)
        root, known = module.root(inner), module.by_name(inner)
    else:
        root, known = instruction, {}
    if root.opcode == "concatenate":
        parts = [known[name].arrays for name in operands(root) if name in known]
        return any(each.size in large for arrays in parts for each in arrays)
    return root.opcode in (*_COPIES, *_WHOLE) and array.size in large
