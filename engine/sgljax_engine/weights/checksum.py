"""Checksums of weights, computed where the weights are, and one of all of them.

Each element's bits are mixed with its place in the logical shape, and all are summed modulo 2^32,
twice with different constants. Such a sum does not depend on the sharding or on the order in which
a device adds. The mixing is the finalizer of MurmurHash3 (Appleby, public domain).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

logger = logging.getLogger(__name__)

_SEEDS = (0x9E3779B9, 0x7F4A7C15)
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksum(x: jax.Array) -> jax.Array:
    """uint32 [2] of an array of 1-, 2- or 4-byte elements; depends on all bits and their order."""
    bits = lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).reshape(-1).astype(jnp.uint32)
    place = lax.iota(jnp.uint32, bits.size)
    return jnp.stack([_sum(bits, place, jnp.uint32(seed)) for seed in _SEEDS])


def _sum(bits: jax.Array, place: jax.Array, seed: jax.Array) -> jax.Array:
    mixed = bits ^ _mix(place * seed + seed)
    return jnp.sum(_mix(mixed), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def to_hex(checksums: Mapping[str, jax.Array]) -> dict[str, str]:
    """16 hexadecimal digits for each checksum; waits for the device."""
    found = jax.device_get(dict(checksums))
    return {name: "".join(f"{int(part):08x}" for part in pair) for name, pair in found.items()}


class WeightsDigest:
    """One checksum of all weights of a version, computed on first use. Any thread.

    What computes it is dropped after the call; it is None if the weights are missing.
    """

    def __init__(self, checksums: Callable[[], Mapping[str, str]] | None) -> None:
        """Computes nothing yet."""
        self._checksums = checksums
        self._digest: str | None = None
        self._lock = threading.Lock()

    @property
    def is_made(self) -> bool:
        """Whether it no longer holds weights."""
        return self._checksums is None

    def digest(self) -> str | None:
        """The checksum; None if the weights were missing, or are gone. Waits for the device."""
        with self._lock:
            if self._checksums is not None:
                try:
                    text = json.dumps(dict(self._checksums()), sort_keys=True)
                    self._digest = hashlib.sha256(text.encode()).hexdigest()
                except RuntimeError as error:  # an update with donate=True freed them
                    logger.warning("a checkpoint cannot tell its weights: %s", error)
                self._checksums = None
        return self._digest
