"""What tests of the JIT-compiled CPU kernels share."""

from __future__ import annotations

import jax
import pytest

from sgljax_cpu import chain
from sgljax_cpu.machine import Vectors, host_vectors
from tests.tiers import tiered

_PROBLEM = chain.unavailable()
needs_machine_code = pytest.mark.skipif(
    _PROBLEM is not None, reason=f"no JIT-compiled CPU kernels here: {_PROBLEM}"
)


def vectors_of(lanes: int) -> Vectors:
    """This machine's, or its code for processors without AVX-512, which it can run too."""
    host = host_vectors()
    if lanes > host.lanes:
        pytest.skip("the processor lacks AVX-512")
    return host._replace(lanes=lanes)


_OWN_LANES = host_vectors().lanes if _PROBLEM is None else 8


@pytest.fixture(params=tiered([8, 16], [_OWN_LANES]), ids=["AVX2", "AVX-512"])
def lanes(request, monkeypatch):
    """Operations made during the test are for vectors of so many lanes."""
    vectors = vectors_of(request.param)
    if vectors == host_vectors():
        yield request.param
        return
    monkeypatch.setattr(chain, "host_vectors", lambda: vectors)
    jax.clear_caches()  # else a function that was traced before calls the other code
    yield request.param
    jax.clear_caches()
