"""Whose device a device is."""

from __future__ import annotations

from typing import Any

import jax


def is_own_cpu(device: Any) -> bool:
    """Whether a `jax.Device` is a CPU that this very process computes on.

    Only there can programs call functions of this process, is the free memory of this host the
    device's, and are XLA's options those of the XLA that is installed here. The platform "cpu" says
    less: a proxy (Pathways) and `jax.distributed` show the CPUs of other hosts under that name.
    """
    if device.platform != "cpu":
        return False
    try:
        return device in jax.local_devices(backend="cpu")
    except RuntimeError:  # this process has no CPU backend of its own, as with JAX_PLATFORMS=proxy
        return False
