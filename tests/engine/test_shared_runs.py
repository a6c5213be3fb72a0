"""Keys that neighbouring rows share are read once for them, on GPUs and TPUs; interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.kernels.runs import find_runs
from tests.engine.gpu_interpreted import INVARIANT, PLAIN
from tests.engine.paged_cases import OPTIONS, RaggedCase, ragged_case, spread

QUICK_COMPILE = "interpreted kernels of GPUs and TPUs, which no user compiles for CPUs"

LENGTHS, PREFIXES = zip(
    # Rows of a prompt of 20 pages, one of which has only its first ones,
    *((330, 0), (331, 20), (420, 20), (340, 20), (329, 9), (321, 20), (600, 20)),
    # rows of another prompt, and rows on their own
    *((300, 0), (310, 18), (290, 17), (17, 0), (1, 0), (16, 0), (530, 0)),
    strict=True,
)


def with_runs(case: RaggedCase, size: int = 16, min_keys: int = 64) -> RaggedCase:
    page_size = case.layer.k.shape[2]
    keys = jnp.maximum(case.tables.kv_lens - 1, 0)
    runs = find_runs(case.tables.page_table, keys, page_size, jnp.int32(min_keys), size)
    return case._replace(tables=case.tables._replace(runs=runs))


def shared_case(dtype=np.float32, sizes=(4, 2, 32)) -> RaggedCase:
    num_heads, num_kv_heads, head_dim = sizes
    return ragged_case(
        LENGTHS,
        page_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=1,
        head_dim=head_dim,
        dtype=dtype,
        prefixes=PREFIXES,
    )


@pytest.mark.parametrize(("options", "dtype"), spread(list(OPTIONS), ["float32", "bfloat16"]))
def test_gpu(options, dtype):
    case = with_runs(shared_case(dtype))
    case.check(case.run(PLAIN.attend, OPTIONS[options]), OPTIONS[options], 2e-5 if dtype == "float32" else 2e-2)


if __name__ == "__main__":
    c = with_runs(shared_case())
    print(c.tables.runs)
