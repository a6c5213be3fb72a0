"""Bytes between memory and chip, read off programs as libtpu writes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tools.aot.hlo import Module
from tools.aot.traffic import count_traffic

HEAD = """HloModule m
%slicing (p: f32[64,128], i: s32[]) -> f32[1,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %b = f32[64,128]{1,0} bitcast(%p)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,128]{1,0} dynamic-slice(%b, %i, %z), dynamic_slice_sizes={1,128}
}

%updating (p: f32[64,128], u: f32[1,128], i: s32[]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %u = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[64,128]{1,0} dynamic-update-slice(%p, %u, %i, %z)
}

%scattering (p: f32[64,128], i: s32[1,1], u: f32[1,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %i = s32[1,1]{1,0} parameter(1)
  %u = f32[1,128]{1,0} parameter(2)
  ROOT %s = f32[64,128]{1,0} scatter(%p, %i, %u), to_apply=%second
}

%adding (p: f32[64,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  ROOT %a = f32[64,128]{1,0} add(%p, %p)
}

ENTRY %main (x: f32[64,128], i: s32[], r: f32[1,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[1,128]{1,0} parameter(2)
  %v = f32[8]{0:S(1)} constant({...})
"""
WHOLE, ROW, NUMBER = 64 * 128 * 4, 128 * 4, 4


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("add = f32[64,128]{1,0} add(%x, %x)", 3 * WHOLE),
        ("b = f32[8192]{0} bitcast(%x)", 0),
        ("f = f32[64,128]{1,0} fusion(%x), kind=kLoop, calls=%adding", 2 * WHOLE),
        # To memory on the chip, whole or in part: read once. And back from there.
        ("c = (f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]) copy-start(%x)", WHOLE),
        (
            "s = ((f32[64,128]{1,0}), f32[1,128]{1,0:S(1)}, s32[]) slice-start(%x), "
            "slice={[0:1], [0:128]}",
            ROW,
        ),
        ("w = f32[64,128]{1,0:S(1)} fusion(%x), kind=kLoop, calls=%adding", WHOLE),
        # A row that is read, and one that is written in place.
        ("f = f32[1,128]{1,0} fusion(%x, %i), kind=kLoop, calls=%slicing", 2 * ROW + NUMBER),
        ("f = f32[64,128]{1,0} fusion(%x, %r, %i), kind=kLoop, calls=%updating", 2 * ROW + NUMBER),
        (
            "f = f32[64,128]{1,0} fusion(%x, %i, %r), kind=kLoop, calls=%scattering",
            2 * ROW + NUMBER,
        ),
        ("d = f32[64,128]{1,0} dynamic-update-slice(%x, %r, %i, %i)", 2 * ROW),
        ("g = f32[1,128]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,128}", 2 * ROW),
        # A kernel says what it moves.
        (
            'k = f32[64,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", '
            'backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"77"}}',
            77,
        ),
        # What it is given and leaves on the chip is part of that.
        (
            "k = (f32[8]{0:S(1)}, f32[64,128]{1,0}) custom-call(%v, %x), "
            'custom_call_target="tpu_custom_call", backend_config={"bytes_accessed":"777"}',
            777 - 2 * 32,
        ),
    ],
)
def test_what_an_instruction_moves(line, num_bytes):
    text = f"{HEAD}  %{line}\n  ROOT %y = f32[64,128]{{1,0}} bitcast(%x)\n}}\n"
    assert count_traffic(Module(text)) == num_bytes


def test_loops_count_once_and_branches_not():
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)

    def bytes_of(function):
        text = jax.jit(function).lower(x, jnp.int32(9)).compile().as_text()
        assert text is not None
        return count_traffic(Module(text))

    def loop(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.sort(x, axis=0), x)

    def branch(x, n):
        return jax.lax.cond(n > 3, lambda x: jnp.sort(x, axis=0), lambda x: x, x)

    sort = bytes_of(lambda x, _: jnp.sort(x, axis=0))
    assert sort >= 2 * WHOLE
    assert sort <= bytes_of(loop) < 5 * sort  # it also copies what comes in and goes out
    assert bytes_of(branch) < 2 * sort  # it copies what is passed on
