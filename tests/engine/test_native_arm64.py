"""The CPU kernels compiled for ARM64, on any processor: llvmlite has both targets.

Nothing runs here; `tests/arm64` runs them on an emulated processor.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

import jax
import llvmlite.binding as llvm
import pytest

from sgljax_cpu import abi, chain, machine
from sgljax_cpu.machine import Vectors
from sgljax_cpu.operation import Operation
from sgljax_cpu.threads import threads_module
from sgljax_engine import EngineConfig
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.runner.warmup import warm_calls
from tests.engine.models import TINY
from tests.engine.native_cases import needs_machine_code
from tests.geometry import SMALL

pytestmark = [needs_machine_code, pytest.mark.slow]

LINUX = Vectors(8, "", "generic", "aarch64-unknown-linux-gnu")
MACOS = Vectors(8, "", "apple-m1", "arm64-apple-macosx")

LIBRARY = {"malloc", "free", "sched_yield", "memcpy", "memset", "bzero"}
"""What kernels may call: functions that the C libraries of both systems have."""

FUSED = {"attention", "draw", "linear", "rms_norm", "rope_tables", "rotate", "sum_weights"}
"""Kernels that have fused products and sums."""


@pytest.fixture(scope="module")
def code() -> Sequence[tuple[str, str]]:
    """Names and LLVM IR of all modules of a small engine, optimised once for both systems."""
    kernels: dict[Operation, None] = {}

    def register(operations):
        kernels.update(dict.fromkeys(operations))
        return "sgljax.never_called"

    jax.clear_caches()  # else functions that were traced before register nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "_register", register)
        runner, _ = build_shapes(TINY, EngineConfig.from_options(SMALL), "float32", None)
        state = runner.kv_memory.state(runner.weights)
        for call in warm_calls(runner, frozenset({"score", "table"})):
            runner.programs.lower(call, state)
    jax.clear_caches()
    api = abi.load_api()
    assert isinstance(api, abi.Api), api
    texts = [(kernel.name, chain.kernel_text(kernel, LINUX)) for kernel in kernels]
    texts.append(("threads", threads_module(api, LINUX).text))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = machine.target_machine(LINUX)
    modules = [llvm.parse_assembly(text) for _, text in texts]
    for module in modules:
        machine.optimise(module, target)
    return [(name, str(module)) for (name, _), module in zip(texts, modules, strict=True)]


@pytest.mark.parametrize("vectors", [LINUX, MACOS], ids=["Linux", "macOS"])
def test_every_module_compiles(code, vectors):
    """To vectors with fused products and sums, and to no call that is not resolved there."""
    target = machine.target_machine(vectors)
    found = collections.defaultdict(str)
    for name, text in code:
        assert "llvm.x86." not in text, name  # LLVM would end the process
        module = llvm.parse_assembly(text)
        module.data_layout = str(target.target_data)  # which the JIT compiler sets too
        assembly = target.emit_assembly(module)
        assert used(assembly) - defined(assembly) <= LIBRARY, name
        found[name] += assembly
    assert len(found) > 12
    assert {name for name, text in found.items() if re.search(r"\tfmla[.\t]", text)} >= FUSED
    assert [name for name, text in found.items() if re.search(r"\tisb$", text, re.M)] == ["threads"]


def used(assembly: str) -> set[str]:
    """Symbols that code calls or takes the address of, as C names them."""
    return {
        name.removeprefix("_") for name in re.findall(r"\t(?:bl?\t|adrp\t\w+, )(\w+)", assembly)
    }


def defined(assembly: str) -> set[str]:
    """Symbols of a module's own functions, blocks and variables, as C names them."""
    found = re.findall(r"^(\w+):|(?:\.comm\t|\.zerofill __DATA,__bss,)(\w+)", assembly, re.M)
    return {name.removeprefix("_") for pair in found for name in pair}
