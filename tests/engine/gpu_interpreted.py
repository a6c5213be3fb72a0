"""Engines on CPUs that run the kernels of GPUs, interpreted."""

from __future__ import annotations

import functools

import pytest

from sgljax_engine.attention import pallas
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.layers import fused, invariant, kernels

PLAIN = PallasAttention(interpret=True)
FUSED = PallasAttention(is_fused=True, interpret=True)
INVARIANT = PallasAttention(is_invariant=True, interpret=True)
OPTIONS = {"attention_backend": "pallas", "linear_backend": "xla"}
"""Options of an engine; what stands for "pallas" products is asked for by a name of CPUs."""


def use_gpu_kernels(patch: pytest.MonkeyPatch, products: fused.FusedProducts | None) -> None:
    """Has engines of this process use `products`, and attention, of GPUs."""

    def pick(name: str, target: object) -> kernels.LinearBackend:
        del name, target
        return kernels.LinearBackend("pallas", kernels.XlaKernels(fused=products))

    made = invariant.InvariantKernels.make(interpret=True)
    attention = functools.partial(pallas.gpu_attention, interpret=True)
    patch.setattr(pallas, "gpu_problem", lambda target, head_dims: None)
    patch.setattr(pallas, "gpu_attention", attention)
    patch.setattr("sgljax_engine.builder.backends.pick_kernels", pick)
    patch.setattr(invariant.InvariantKernels, "make", lambda: made)
