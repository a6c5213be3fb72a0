"""What this machine can do at best, measured: matrix products, reading memory, copying it.

Each ceiling is the best of several ways to reach it, so that no library's weakness lowers it.
Buffers are made and touched before the clock starts: fresh memory comes page by page from the
operating system, many times slower than memory that is there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.lib.environment import num_cores

_MATMULS = (
    (64, 512, 1536),
    (128, 1024, 3072),
    (512, 512, 1536),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
)
"""(M, K, N): decode-sized, prefill-sized and square."""

_MIN_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The machine's limits.

    Attributes:
        flops_per_s: Float32 operations a second in matrix products, a multiply-add being two.
        read_bytes_per_s: Bytes read a second, from a buffer of a given size.
        copy_bytes_per_s: Bytes copied a second between two such buffers, each byte counted once.
        probes: All that was measured, in these units, by name.
    """

    flops_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float
    probes: dict[str, float]

    def reading(self, num_bytes: int, *, seconds: float = 0.5) -> Ceilings:
        """These, but for reading from a buffer of another size, which caches hold less or more."""
        probes = _read_probes(num_bytes, seconds)
        return dataclasses.replace(
            self,
            read_bytes_per_s=max(probes.values()),
            probes=self.probes | probes,
        )

    def in_words(self) -> str:
        """For reports."""
        return (
            f"{self.flops_per_s / 1e9:.0f} GFLOP/s, read {self.read_bytes_per_s / 1e9:.1f} GB/s, "
            f"copy {self.copy_bytes_per_s / 1e9:.1f} GB/s"
        )


def measure_ceilings(num_bytes: int, *, seconds: float = 0.5) -> Ceilings:
    """Measures the default device's limits.

    Args:
        num_bytes: Size of the buffers that are read and copied, such as that of the weights: caches
            may hold them as far as they hold those.
        seconds: How long each probe runs.
    """
    probes: dict[str, float] = {}
    for shape in _MATMULS:
        probes |= _matmul_probes(shape, seconds)
    probes |= _read_probes(num_bytes, seconds)
    probes |= _copy_probes(max(num_bytes, _MIN_BYTES), seconds)

    def best(kind: str) -> float:
        return max(value for name, value in probes.items() if name.startswith(kind))

    return Ceilings(
        flops_per_s=best("matmul"),
        read_bytes_per_s=best("read"),
        copy_bytes_per_s=best("copy"),
        probes=probes,
    )


def measure_copy(num_bytes: int, *, seconds: float = 0.1) -> float:
    """The copy ceiling alone, bytes a second, for comparing with what is timed beside it."""
    return max(_copy_probes(num_bytes, seconds).values())


def _read_probes(num_bytes: int, seconds: float) -> dict[str, float]:
    num_bytes = max(num_bytes, _MIN_BYTES)
    matrix, vector = jnp.ones((num_bytes // 4096, 1024)), jnp.ones(1024)
    product = jax.jit(jnp.matmul)
    probes = {
        "read, XLA matrix-vector": _rate(
            num_bytes, seconds, lambda: product(matrix, vector).block_until_ready()
        )
    }
    if jax.default_backend() == "cpu":
        parts = _parts(num_bytes)
        probes["read, numpy dot"] = _rate_on_cores(
            num_bytes, seconds, lambda i: np.dot(parts[i], parts[i])
        )
    return probes


def _copy_probes(num_bytes: int, seconds: float) -> dict[str, float]:
    copy = jax.jit(lambda source, _: jnp.copy(source), donate_argnums=1, keep_unused=True)
    source, target = jnp.ones(num_bytes // 4), [jnp.zeros(num_bytes // 4)]

    def run() -> None:
        """Copies into a donated buffer, which is the next call's again."""
        target[0] = copy(source, target[0]).block_until_ready()

    probes = {"copy, XLA": _rate(num_bytes, seconds, run)}
    if jax.default_backend() == "cpu":
        sources, targets = _parts(num_bytes), _parts(num_bytes)
        probes["copy, numpy"] = _rate_on_cores(
            num_bytes, seconds, lambda i: np.copyto(targets[i], sources[i])
        )
    return probes


def _matmul_probes(shape: tuple[int, int, int], seconds: float) -> dict[str, float]:
    """Products with a weight stored [out, in], as the engine stores it on CPUs; several a call."""
    m, k, n = shape
    repeats = max(1, 2**31 // (2 * m * k * n))
    amount, label = 2.0 * m * k * n * repeats, "x".join(map(str, shape))

    @jax.jit
    def products(x: jax.Array, weight: jax.Array) -> jax.Array:
        def body(_: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, out = carry
            # The next product needs the last one, so none is left out.
            out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
            return x.at[0, 0].set(out[0, 0] * 1e-30), out

        start = (x, jnp.zeros((m, n), jnp.float32))
        return lax.fori_loop(0, repeats, body, start)[1][0, 0]

    x, weight = np.ones((m, k), np.float32), np.full((n, k), 1e-3, np.float32)
    operands = jnp.asarray(x), jnp.asarray(weight)
    probes = {f"matmul {label}, XLA": _rate(amount, seconds, lambda: products(*operands).item())}
    if jax.default_backend() == "cpu":
        out = np.zeros((m, n), np.float32)

        def run() -> None:
            for _ in range(repeats):
                np.matmul(x, weight.T, out=out)

        probes[f"matmul {label}, numpy"] = _rate(amount, seconds, run)
    return probes


def _rate(amount: float, seconds: float, run: Callable[[], object]) -> float:
    """`amount` a second in the fastest of the calls that fit the time; at least three calls."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return amount / min(times)


def _parts(num_bytes: int) -> list[np.ndarray]:
    """A buffer for each core."""
    count = num_cores()
    return [np.ones(num_bytes // 4 // count, np.float32) for _ in range(count)]


def _rate_on_cores(amount: float, seconds: float, work: Callable[[int], object]) -> float:
    count = num_cores()
    with ThreadPoolExecutor(count) as pool:
        return _rate(amount, seconds, lambda: list(pool.map(work, range(count))))
