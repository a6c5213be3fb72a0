"""Compiled programs of weight sync, cached by steps, targets and placement."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sgljax_cpu
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.weights.checksum import checksum
from sgljax_engine.weights.moves import device_order, device_orders, move, same_shards
from sgljax_engine.weights.specs import Sources, Step, TargetSpec, Weights
from sgljax_engine.weights.transform import to_logical, to_stored

Devices = tuple[Any, ...]
"""Devices in the order in which a program sees them."""

PreparedWeights = tuple[Weights, jax.Array | None]
"""Weights, and whether each is finite, in the order of the steps; None without that check."""

RunAll = Callable[[list[Sources]], PreparedWeights]


class Program(NamedTuple):
    """A plan's transformation, compiled on first use; takes arrays in the order of the steps.

    `at_target` is for sources on the engine's devices; its results are placed as `shardings`.
    `at_source` is for sources elsewhere: from their devices to a program whose results must be
    moved, which takes no fetching; None if they cut up no array as the engine does. `one` is
    `at_target` for one parameter, with its own flag, compiled once for each. `checksums` is one
    program for all: many small ones in flight over several devices can starve one another on CPUs.
    `devices` is None if their order is unknown. `is_native`: `at_target` transposes with
    JIT-compiled CPU kernels.
    """

    at_target: RunAll
    at_source: Callable[[Devices], RunAll | None]
    one: Callable[[Sources, Step, TargetSpec, bool], tuple[jax.Array, jax.Array]]
    checksums: Callable[[list[Sources]], dict[str, jax.Array]]
    shardings: dict[str, jax.sharding.Sharding]
    devices: Devices | None
    is_on_own_cpus: bool
    is_native: bool

    def gather(self, arrays: list[Sources]) -> tuple[list[Sources], Devices | None]:
        """The arrays where one program can take them all, and its devices; None for the engine's.

        Arrays that are scattered over devices are copied to the engine's: a program takes inputs
        only from one set of devices.
        """
        sources = device_orders(itertools.chain.from_iterable(arrays))
        if sources <= {self.devices}:
            return arrays, None
        if len(sources) == 1 and None not in sources:
            return arrays, sources.pop()
        return [tuple(map(self._gather_one, each)) for each in arrays], None

    def placement(self, source: Mapping[str, Any]) -> frozenset[Any] | None:
        """What `at_target` is compiled for beside shapes; None unless all arrays are there."""
        arrays = [x for x in source.values() if isinstance(x, jax.Array)]
        if len(arrays) < len(source) or not device_orders(arrays) <= {self.devices}:
            return None
        return frozenset([(x.sharding, x.committed) for x in arrays])

    def _gather_one(self, x: Any) -> Any:
        """The array on the engine's devices: itself if it is there, else a copy on each."""
        if not isinstance(x, jax.Array) or device_order(x.sharding) == self.devices:
            return x
        some = next(iter(self.shardings.values()))
        if isinstance(some, jax.sharding.NamedSharding):
            some = jax.sharding.NamedSharding(some.mesh, jax.sharding.PartitionSpec())
        return move(x, some)


@functools.lru_cache(maxsize=16)
def build_program(
    steps: tuple[Step, ...],
    named_targets: tuple[tuple[str, TargetSpec], ...],
    check_finite: bool,
) -> Program:
    """Returns the same object for equal plans, so that a new engine recompiles nothing."""
    targets = dict(named_targets)

    def run(sources: list[Sources], is_native: bool) -> PreparedWeights:
        made = {
            step.target: to_stored(x, step, targets[step.target], is_native)
            for x, step in zip(sources, steps, strict=True)
        }
        flags = jnp.stack([flag for _, flag in made.values()]) if check_finite else None
        return {name: stored for name, (stored, _) in made.items()}, flags

    def sums(sources: list[Sources]) -> dict[str, jax.Array]:
        return {
            step.target: checksum(to_logical(x, step, targets[step.target]))
            for x, step in zip(sources, steps, strict=True)
        }

    shardings = {step.target: targets[step.target].sharding for step in steps}
    (devices,) = {device_order(sharding) for sharding in shardings.values()}
    is_on_own_cpus = all(map(is_own_cpu, next(iter(shardings.values())).device_set))
    is_native = is_on_own_cpus and len(devices or ()) == 1 and sgljax_cpu.unavailable() is None
    at_target = functools.partial(run, is_native=is_native)
    elsewhere = functools.partial(run, is_native=False)

    @functools.lru_cache(maxsize=4)
    def at_source(devices: Devices) -> RunAll | None:
        if len(devices) == 1:
            return jax.jit(elsewhere)
        there = {name: same_shards(sharding, devices) for name, sharding in shardings.items()}
        return None if None in there.values() else jax.jit(elsewhere, out_shardings=(there, None))

    return Program(
        jax.jit(at_target, out_shardings=(shardings, None)),
        at_source,
        jax.jit(to_stored, static_argnums=(1, 2, 3)),
        jax.jit(sums),
        shardings,
        devices,
        is_on_own_cpus,
        is_native,
    )
