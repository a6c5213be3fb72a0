"""Describes this processor, and compiles code for it. Any thread."""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from typing import TYPE_CHECKING, NamedTuple

from sgljax_cpu import kept_code

if TYPE_CHECKING:
    import llvmlite.binding as llvm


class Vectors(NamedTuple):
    """The vectors of a processor, and what else kernels for it depend on.

    Attributes:
        lanes: Floats in a vector of the kernels. ARM64 holds one in two registers of its own.
        features: The processor's features, as LLVM names them.
        cpu: The processor's name in LLVM.
        triple: Processor family, operating system and object format, as LLVM names them.
    """

    lanes: int
    features: str
    cpu: str
    triple: str

    @property
    def is_arm(self) -> bool:
        """Whether this is ARM64, which macOS calls arm64 and all others aarch64."""
        return self.triple.startswith(("aarch64", "arm64"))


AVX512 = ("avx512f", "avx512dq", "avx512vl", "avx512bw")
AVX2 = ("avx2", "fma")


def missing() -> str | None:
    """Why code cannot be compiled here; None if it can."""
    family = platform.machine()
    if (family, sys.platform) not in _SUPPORTED:
        return (
            "written for x86-64 and ARM64 with Linux and for ARM64 with macOS, this is "
            f"{family} with {sys.platform}"
        )
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    try:
        import llvmlite.binding as llvm
    except Exception as error:  # from the loader or llvmlite itself
        return f"llvmlite cannot be imported: {error}"
    if llvm.llvm_version_info[0] < _OLDEST_LLVM:
        return f"needs LLVM {_OLDEST_LLVM}, llvmlite has {llvm.llvm_version_info[0]}"
    if family == "x86_64" and not all(llvm.get_host_cpu_features().get(name) for name in AVX2):
        return "the processor lacks AVX2 or FMA"
    return None


_SUPPORTED = {("x86_64", "linux"), ("aarch64", "linux"), ("arm64", "darwin")}
"""Processor families and systems. macOS is supported by reading: code for it was only compiled."""

_OLDEST_LLVM = 20
"""The LLVM of llvmlite 0.45. Version 0.44 still has typed pointers."""


@functools.cache
def host_vectors() -> Vectors:
    """The vectors of this machine."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    cpu, triple = llvm.get_host_cpu_name(), llvm.get_process_triple()
    if all(features.get(name) for name in AVX512):
        # By default LLVM uses half of such vectors on processors that once slowed down for them.
        return Vectors(16, features.flatten() + ",-prefer-256-bit", cpu, triple)
    return Vectors(8, features.flatten(), cpu, triple)


_PIPELINE = "1"
"""Raise it with each change to how `compile_module` makes code, or old code is found on disk."""


@functools.cache
def compile_module(text: str, vectors: Vectors, names: tuple[str, ...]) -> dict[str, int]:
    """Compiles a module; returns the addresses of public functions by name.

    The code is never freed: compiled programs call it, and XLA's threads may run it while Python
    exits. Where JAX keeps compiled programs, the code is kept too (`kept_code`).

    Args:
        text: The module in LLVM IR.
        vectors: Vectors of the processor to compile for.
        names: Names of the public functions.
    """
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = target_machine(vectors)
    path = kept_code.path_of(text, *vectors[1:], llvmlite.__version__, _PIPELINE)
    code = kept_code.load(path)
    if code is None:
        optimise(module, machine)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.set_object_cache(
        notify_func=lambda _, made: kept_code.save(path, made), getbuffer_func=lambda _: code
    )
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in names}
    engine.detach()
    return addresses


def target_machine(vectors: Vectors) -> llvm.TargetMachine:
    """LLVM's code generator for a processor, which may be another than this one.

    Args:
        vectors: Vectors of the processor. Its target must be initialised.
    """
    import llvmlite.binding as llvm

    target = llvm.Target.from_triple(vectors.triple)
    return target.create_target_machine(cpu=vectors.cpu, features=vectors.features, opt=3)


def optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Optimises a module in place.

    Args:
        module: The module.
        machine: Code generator of the processor that the module is for.
    """
    import llvmlite.binding as llvm

    # The IR has explicit vectors where they pay.
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
