"""Counting what a GPU launches in a step: a text as XLA writes it for one."""

from __future__ import annotations

from tools.aot.hlo import Module
from tools.aot.launches import StepLaunches, count_launches

TEXT = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
%joined (p.0: bf16[8,4], p.1: bf16[8,4]) -> bf16[8,8] {
  %p.0 = bf16[8,4]{1,0} parameter(0)
  %p.1 = bf16[8,4]{1,0} parameter(1)
  ROOT %c = bf16[8,8]{1,0} concatenate(%p.0, %p.1), dimensions={1}
}
%small (p.2: bf16[4,4]) -> bf16[4,4] {
  %p.2 = bf16[4,4]{1,0} parameter(0)
  ROOT %n = bf16[4,4]{1,0} negate(%p.2)
}
%branch (p.3: bf16[4,4]) -> bf16[4,4] {
  ROOT %in.branch = bf16[4,4]{1,0} fusion(%p.3), kind=kLoop, calls=%small
}
%body (p.4: bf16[8,4]) -> bf16[8,4] {
  %p.4 = bf16[8,4]{1,0} parameter(0)
  %w = bf16[8,8]{1,0} fusion(%p.4, %p.4), kind=kLoop, calls=%joined
  %dot = bf16[4,4]{1,0} fusion(%w), kind=kCustom, calls=%small, metadata={op_name="d/while/body\
/jit(layer)/dot"}, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %norm = bf16[4,4]{1,0} fusion(%dot), kind=kCustom, calls=%small, metadata={op_name="d/while/body\
/jit(layer)/mul"}, backend_config={"fusion_backend_config":{"kind":"__triton"}}
  %lib = (bf16[4,4]{1,0}, s8[64]{0}) custom-call(%norm), custom_call_target="__cublas$lt$matmul"
  %own = bf16[4,4]{1,0} custom-call(%norm), custom_call_target="__gpu$xla.gpu.triton", metadata={op\
_name="d/while/body/jit(layer)/paged_attention"}
  %cast = bf16[16]{0} bitcast(%own)
  %copied = bf16[8,4]{0,1} copy(%p.4)
  %sum = bf16[4,4]{1,0} all-reduce-start(%own), to_apply=%add
  %done = bf16[4,4]{1,0} all-reduce-done(%sum)
  %taken = bf16[4,4]{1,0} conditional(%pred, %own, %own), branch_computations={%branch, %branch}
  ROOT %out = bf16[8,4]{1,0} get-tuple-element(%taken), index=0
}
%condition (p.5: bf16[8,4]) -> pred[] {
  ROOT %go = pred[] constant(true)
}
ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %before = bf16[8,4]{1,0} copy(%p)
  ROOT %loop = bf16[8,4]{1,0} while(%before), condition=%condition, body=%body
}
"""


def test_the_body_of_the_loop_is_counted_by_kind():
    assert count_launches(Module(TEXT), {32}, num_layers=2) == StepLaunches(
        total=8,
        products=2,
        own=1,
        fusions=2,
        copies=1,
        conditionals=1,
        others=1,
        per_layer=1.5,
        large_copies=2,
    )


def test_without_a_loop_all_is_a_step_and_calls_are_followed():
    text = TEXT.replace("while(%before), condition=%condition, body=%body", "call(%before)")
    text = text.replace("call(%before)", "call(%before), to_apply=%body")
    found = count_launches(Module(text), {32}, num_layers=1)
    assert (found.total, found.copies, found.large_copies) == (9, 2, 3)


def test_small_arrays_are_no_large_copies():
    assert count_launches(Module(TEXT), {31}, num_layers=1).large_copies == 0
