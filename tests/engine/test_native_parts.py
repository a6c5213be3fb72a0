"""The parts under the CPU kernels: XLA's interface and threads, the processor, functions."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu import abi, chain, kept_code, machine, math
from sgljax_cpu.emit import I64, PTR, VOID, Code, Module, vector
from sgljax_cpu.linear import linear
from sgljax_cpu.operation import Operation, Plan
from sgljax_cpu.panels import pack
from tests.engine.native_cases import needs_machine_code, vectors_of
from tests.threads import LIMIT_S, start

HEADER = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"


class TestInterface:
    def test_the_installed_header(self):
        api = abi.load_api()
        assert isinstance(api, abi.Api), api
        assert (api.major, api.num_threads) == (0, api.schedule + 8)

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("const XLA_FFI_Api* api;", "int x; const XLA_FFI_Api* api;", "XLA_FFI_CallFrame has"),
            ("int64_t rank;", "", "XLA_FFI_Buffer has another layout"),
            (
                "XLA_FFI_Api_Version api_version;\n  const",
                "const",
                "XLA_FFI_Api has another layout",
            ),
            ("#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MAJOR 1", "XLA lacks a version"),
            ("struct XLA_FFI_Args {", "struct Other {", "XLA_FFI_Args has another layout"),
            (
                "_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_ThreadPool_Schedule);",
                "",
                "XLA lacks ThreadPool_Schedule of foreign functions",
            ),
            ("#define XLA_FFI_API_MINOR", "#define OTHER", "XLA lacks a version"),
        ],
    )
    def test_another_layout_is_found(self, old, new, problem):
        text = HEADER.read_text()
        assert old in text
        found = abi.parse_api(text.replace(old, new))
        assert isinstance(found, str)
        assert problem in found

    def test_more_functions_shift_the_others(self):
        field = "_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Error_Destroy);"
        here = abi.parse_api(HEADER.read_text())
        there = abi.parse_api(
            HEADER.read_text().replace(field, f"_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_New);\n{field}")
        )
        assert isinstance(here, abi.Api)
        assert isinstance(there, abi.Api)
        assert np.subtract(there, here).tolist() == [0, 0, 8, 8, 8]

    def test_no_header(self, monkeypatch, tmp_path):
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
        assert "lacks the header" in str(abi.load_api.__wrapped__())


class TestMachine:
    @pytest.mark.parametrize(
        ("owner", "name", "value", "reason"),
        [
            (sys, "platform", "win32", "written for x86-64 and ARM64 with Linux .* with win32"),
            (machine.platform, "machine", lambda: "riscv64", "macOS, this is riscv64 with "),
            (machine.importlib.util, "find_spec", lambda _: None, "llvmlite is not installed"),
            (machine, "_OLDEST_LLVM", 99, r"needs LLVM 99, llvmlite has \d+"),
            (machine, "AVX2", ("avx2", "none"), "the processor lacks AVX2 or FMA"),
        ],
    )
    def test_why_there_is_none(self, monkeypatch, owner, name, value, reason):
        monkeypatch.setattr(owner, name, value)
        if name == "AVX2":
            monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
        if name != "platform" and name != "machine" and chain.unavailable() is not None:
            pytest.skip(f"there is none: {chain.unavailable()}")
        assert re.search(reason, machine.missing() or "")

    def test_an_llvmlite_that_makes_no_code(self, monkeypatch):
        if chain.unavailable() is not None:
            pytest.skip(f"there is none: {chain.unavailable()}")

        def fail(*_):
            raise RuntimeError("LLVM IR parsing error")

        monkeypatch.setattr(chain, "compile_threads", fail)
        reason = chain.unavailable.__wrapped__()
        assert reason == "llvmlite makes no code here: LLVM IR parsing error"

    def test_an_llvmlite_that_cannot_be_imported(self, monkeypatch):
        if chain.unavailable() is not None:
            pytest.skip(f"there is none: {chain.unavailable()}")
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
        assert "llvmlite cannot be imported: " in str(machine.missing())

    def test_importing_the_engine_does_not_load_llvm(self):
        code = "import sys, sgljax_engine.engine; assert 'llvmlite' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


@needs_machine_code
@pytest.mark.parametrize("lanes", [8, 16])
class TestFunctions:
    def apply(self, name, values, lanes):
        """A function of `sgljax_cpu.math`, of every number."""
        module = Module()
        with Code(module, "apply", VOID, [PTR, PTR, I64], is_public=True) as code:
            source, target, count = code.arguments
            with code.loop(0, count, lanes) as at:
                x = code.load(code.at(source, at), vector(lanes), 4)
                code.store(getattr(math, name)(code, x), code.at(target, at), 4)
        address = machine.compile_module(module.text, vectors_of(lanes), ("apply",))["apply"]
        x = np.resize(np.asarray(values, np.float32), -(-len(values) // lanes) * lanes)
        y = np.empty_like(x)
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
        run(x.ctypes.data, y.ctypes.data, len(x))
        return x[: len(values)], y[: len(values)]

    def test_exp(self, lanes):
        x, y = self.apply("exp", np.append(np.linspace(-86.9, 20, 100_001), 0.0), lanes)
        np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=2.5e-7)
        assert y[-1] == 1

    def test_exp_of_what_is_masked(self, lanes):
        _, y = self.apply("exp", [-87.1, -1e4, -1e30, -np.inf], lanes)
        np.testing.assert_array_equal(y, 0)

    def test_log(self, lanes):
        values = np.concatenate([np.linspace(1e-3, 40, 100_001), [1.0, 1.2e-38, 3e38]])
        x, y = self.apply("log", values, lanes)
        exact = np.log(x.astype(np.float64))
        np.testing.assert_allclose(y, exact, rtol=2.5e-7, atol=1e-7)
        assert y[-3] == 0

    def test_tanh(self, lanes):
        x, y = self.apply("tanh", np.linspace(-30, 30, 100_001), lanes)
        np.testing.assert_allclose(y, np.tanh(x.astype(np.float64)), atol=2.5e-7)


@needs_machine_code
class TestKeptCode:
    """In processes of their own, since code lives as long as one."""

    CODE = """
import sys, jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
from sgljax_cpu.copy import copy
x = np.arange(6, dtype=np.float32)
assert np.array_equal(jax.jit(copy)(x)[0], x)
"""

    def run(self, folder):
        subprocess.run([sys.executable, "-c", self.CODE, folder], check=True, timeout=LIMIT_S)
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("sgljax-native-*.o")}

    def test_is_found_again(self, tmp_path):
        first = self.run(tmp_path)
        assert len(first) == 3, "the operation, its chain, and what shares it among threads"
        assert self.run(tmp_path) == first

    @pytest.mark.slow
    def test_what_is_damaged_is_made_anew(self, tmp_path):
        first = self.run(tmp_path)
        for name, end in zip(first, (b"", b"something else", b""), strict=True):
            path = tmp_path / name
            path.write_bytes(path.read_bytes()[:-9] + end)
        again = self.run(tmp_path)
        assert again.keys() == first.keys()
        assert all(again[name] != first[name] for name in first)

    def test_nowhere(self, monkeypatch, tmp_path, caplog):
        for folder in (None, "", "gs://somewhere"):
            config = types.SimpleNamespace(jax_compilation_cache_dir=folder)
            monkeypatch.setattr(kept_code, "jax", types.SimpleNamespace(config=config))
            assert kept_code.path_of("a") is None
        assert kept_code.load(None) is None
        kept_code.save(None, b"code")
        (tmp_path / "file").write_bytes(b"")
        kept_code.save(tmp_path / "file" / "code.o", b"code")
        assert "machine code cannot be kept" in caplog.text
        assert kept_code.load(tmp_path / "file" / "code.o") is None

    def test_a_full_disk_is_left_as_it_was(self, monkeypatch, tmp_path, caplog):
        def fail(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(kept_code.os, "replace", fail)
        kept_code.save(tmp_path / "code.o", b"code")
        assert "No space left on device" in caplog.text
        assert list(tmp_path.iterdir()) == []


@needs_machine_code
class TestThreads:
    def product(self, seed):
        rng = np.random.default_rng(seed)
        weight = pack(jnp.asarray(rng.standard_normal((200, 300), dtype=np.float32)))
        x = rng.standard_normal((40, 200), dtype=np.float32)
        return weight, x

    def test_many_callers_at_once(self):
        """Several programs share XLA's threads, and none gets another one's chunks."""

        def several(weight, x):
            for _ in range(20):
                x = x + 1e-3 * linear(weight, x, 300)[:, :200]
            return x

        run = jax.jit(several)
        cases = [self.product(seed) for seed in range(6)]
        expected = [np.asarray(run(*case)) for case in cases]
        wrong: list[int] = []

        def call(index):
            for _ in range(30):
                if not np.array_equal(np.asarray(run(*cases[index])), expected[index]):
                    wrong.append(index)

        callers = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(6)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(LIMIT_S)
            assert not caller.is_alive()
        assert wrong == []

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot choose processors")
    def test_one_processor(self):
        """XLA has one thread then, so that nobody else comes."""
        code = """
import os
import re
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, numpy as np
from sgljax_cpu.linear import linear
weight, x = np.ones((20, 200, 16), np.float32), np.ones((40, 200), np.float32)
run = jax.jit(linear, static_argnums=2)
assert np.array_equal(run(weight, x, 320), np.full((40, 320), 200, np.float32))
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)

    def test_errors_of_python_leave_no_half_function(self):
        module = Module()
        with pytest.raises(ZeroDivisionError), Code(module, "broken", VOID, [I64]) as code:
            code.add(1, 1 // 0)
        assert "broken" not in module.text

    def test_engines_that_start_at_once(self):
        """Threads that register the same operation get one name."""
        operation = Operation("same", _nothing, _one_chunk)
        calls = [start(lambda: chain._register([operation])) for _ in range(8)]
        assert len({call.result(LIMIT_S) for call in calls}) == 1

    def test_names_tell_code_apart(self):
        first = chain._register([Operation("one", _nothing, _one_chunk)])
        assert first == chain._register([Operation("two", _nothing, _one_chunk)])  # equal code
        assert first != chain._register([Operation("three", _store_nothing, _one_chunk)])
        assert first.startswith("sgljax.")


def _nothing(module, vectors):
    del vectors
    with Code(module, "nothing", VOID, [PTR, I64]) as code:
        pass
    return code.function


def _store_nothing(module, vectors):
    del vectors
    with Code(module, "store_nothing", VOID, [PTR, I64]) as code:
        code.stack(I64)
    return code.function


def _one_chunk(arguments, results, threads):
    del arguments, results, threads
    return Plan(1, ())
