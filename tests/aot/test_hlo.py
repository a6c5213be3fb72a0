"""Reading compiled programs: XLA's own for CPUs, and lines as libtpu writes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.engine.remote_devices import remote_devices
from tools.aot.hlo import Array, Module
from tools.aot.report import (
    count_collectives,
    count_copies,
    count_kernels,
    read_program,
)

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


def module_of(program):
    text = program.as_text()
    assert text is not None
    return Module(text)


def repeat(body, x, n):
    return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (body(c[0]), c[1] + 1), (x, 0))[0]


def test_instructions_know_their_loops_and_branches():
    def function(x, n):
        def body(x):
            x = repeat(jnp.sort, x, n)
            return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.cumsum(x @ x.T @ x, 0), lambda x: x, x)

        return repeat(body, x, n)

    module = module_of(compiled(function, X, N))
    visits = list(module.visits())
    whiles = sorted(v.num_loops for v in visits if v.instruction.opcode == "while")
    assert whiles[:2] == [0, 1]
    (sort,) = [v for v in visits if v.instruction.opcode == "sort"]
    assert (sort.num_loops, sort.is_conditional) == (2, False)
    dots = [v for v in visits if v.instruction.opcode == "dot"]
    assert {(v.num_loops, v.is_conditional) for v in dots} <= {(1, True)}


def test_types_of_results():
    text = """HloModule m
%branch (p: f32[2]) -> f32[2] {
  ROOT %p = f32[2]{0} parameter(0)
}
ENTRY %main (a: bf16[8,128]) -> (bf16[8,128], pred[3], s4[3], f8e4m3fn[<=5], f32[]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %t = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, pred[3]{0}, /*index=2*/s4[3]{0:E(4)}, \
f8e4m3fn[<=5]{0}, f32[]) custom-call(%a), custom_call_target="x"
}
"""
    *_, visit = Module(text).visits()
    assert visit.instruction.arrays == (
        Array("bf16", (8, 128), 1),
        Array("pred", (3,), 0),
        Array("s4", (3,), 0),
        Array("f8e4m3fn", (5,), 0),
        Array("f32", (), 0),
    )
    assert [array.num_bytes for array in visit.instruction.arrays] == [2048, 3, 2, 5, 4]
    assert str(visit.instruction.arrays[0]) == "bf16[8,128]"


def test_collectives_are_counted_with_their_bytes():
    devices = np.array(remote_devices(8)[:4])
    mesh = jax.sharding.Mesh(devices, ("tp",))
    split = NamedSharding(mesh, PartitionSpec(None, "tp"))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=split)

    def function(x, n):
        return repeat(lambda x: x + jnp.sum(x, 1, keepdims=True), x, n)

    replicated = NamedSharding(mesh, PartitionSpec())
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    module = module_of(jax.jit(function, out_shardings=split).lower(x, n).compile())
    (found,) = count_collectives(module)
    assert (found.name, found.count, found.num_loops) == ("all-reduce", 1, 1)
    assert (found.num_bytes, found.array.split("[")[0]) == (64 * 4, "f32")


TPU_PROGRAM = """HloModule jit_decode, is_scheduled=true

%turn (p.1: bf16[4,8]) -> bf16[8,4] {
  %p.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %transpose.3 = bf16[8,4]{1,0} transpose(%p.1), dimensions={1,0}
}

%body.2 (c: (bf16[4,8], s32[])) -> (bf16[4,8], s32[]) {
  %c = (bf16[4,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %x.1 = bf16[4,8]{1,0} get-tuple-element(%c), index=0
  %i.1 = s32[]{:T(128)} get-tuple-element(%c), index=1
  %turned.1 = bf16[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%turn
  %attention.7 = bf16[4,8]{1,0:T(8,128)(2,1)} custom-call(%x.1, %turned.1), \
custom_call_target="tpu_custom_call", backend_config={"flag_configs":[]}
  %all-gather-start.1 = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x.1), dimensions={0}
  %all-gather-done.1 = bf16[16,8]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %out.1 = (bf16[4,8]{1,0}, s32[]{:T(128)}) tuple(%attention.7, %i.1)
}

%condition.2 (c.1: (bf16[4,8], s32[])) -> pred[] {
  %c.1 = (bf16[4,8]{1,0}, s32[]{:T(128)}) parameter(0)
  ROOT %less.1 = pred[] constant(true)
}

ENTRY %main.5 (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %prefetch.1 = (bf16[4,8]{1,0:S(1)}, bf16[4,8]{1,0}, u32[]{:S(2)}) copy-start(%p)
  %done.1 = bf16[4,8]{1,0:S(1)} copy-done(%prefetch.1)
  %relayout.1 = (bf16[4,8]{0,1}, bf16[4,8]{1,0}, u32[]{:S(2)}) copy-start(%p)
  %done.2 = bf16[4,8]{0,1} copy-done(%relayout.1)
  %small.1 = bf16[2,8]{1,0} copy(%p)
  %concat.1 = bf16[4,8]{1,0} custom-call(%p), custom_call_target="ConcatBitcast"
  %zero.1 = s32[]{:T(128)} constant(0)
  %start.1 = (bf16[4,8]{1,0}, s32[]{:T(128)}) tuple(%p, %zero.1)
  %loop.1 = (bf16[4,8]{1,0}, s32[]{:T(128)}) while(%start.1), condition=%condition.2, body=%body.2
  ROOT %result.1 = bf16[4,8]{1,0} get-tuple-element(%loop.1), index=0
}
"""


def test_programs_of_tpus():
    module = Module(TPU_PROGRAM)
    (kernel,) = count_kernels(module)
    assert (kernel.name, kernel.count, kernel.num_loops) == ("tpu_custom_call attention", 1, 1)
    (gather,) = count_collectives(module)
    assert (gather.name, gather.num_bytes, gather.num_loops) == ("all-gather", 256, 1)
    assert gather.array == "bf16[16,8]"
    copies = [(op.name, op.array, op.count, op.num_loops) for op in count_copies(module, {32})]
    assert copies == [("copy", "bf16[4,8]", 1, 0), ("transpose", "bf16[8,4]", 1, 1)]


def test_a_report_has_the_compilers_numbers():
    def function(x, y):
        return jnp.tanh(x @ y)

    y = jax.ShapeDtypeStruct((128, 32), jnp.float32)
    program = compiled(function, X, y)
    found = read_program(program, name="score", size=64, large=(), compile_s=1.5)
    assert found.memory is not None
    assert found.memory.argument_bytes == 4 * (64 * 128 + 128 * 32)
    assert found.memory.output_bytes == 4 * 64 * 32
    assert found.memory.peak_bytes >= found.memory.argument_bytes + found.memory.output_bytes
    assert found.flops is not None
    assert found.flops >= 2 * 64 * 128 * 32
    assert found.memory_bytes is not None
    assert found.memory_bytes >= found.memory.argument_bytes
    assert (found.name, found.size, found.compile_s) == ("score", 64, 1.5)
