"""Engines on CPUs that run the kernels of GPUs, interpreted."""

from __future__ import annotations

import pytest

from sgljax_engine.attention import pallas
from sgljax_engine.attention.base import AttentionBackend
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.layers import fused, invariant, kernels
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.target import Target
from sgljax_engine.placement import submeshes

ATTENTION = PallasAttention(interpret=True)
INVARIANT = PallasAttention(is_invariant=True, interpret=True)
OPTIONS = {"attention_backend": "pallas", "linear_backend": "xla"}
"""Options of an engine; what stands for "pallas" products is asked for by a name of CPUs."""


def use_gpu_kernels(patch: pytest.MonkeyPatch, products: fused.FusedProducts) -> None:
    """Has engines of this process use `products`, and attention, of GPUs."""

    def backend(target: Target, head_dims: object) -> AttentionBackend:
        del head_dims
        return pallas.backend_of(target, interpret=True)

    def pick(name: str, target: object) -> kernels.LinearBackend:
        del name, target
        return kernels.LinearBackend("pallas", kernels.XlaKernels(fused=products))

    made = invariant.InvariantKernels.make(interpret=True)
    patch.setattr(pallas, "gpu_backend", backend)
    patch.setattr("sgljax_engine.builder.parts.pick_kernels", pick)
    patch.setattr(invariant.InvariantKernels, "make", lambda: made)
    patch.setattr(submeshes, "default_layout", lambda platform: Layout.TOKENS_FIRST)
