"""CPU devices that are not this process's own, and a watch over what only own devices allow.

jaxlib has no server for its IFRT proxy client, so nothing here goes over a wire. The devices belong
to a second IFRT client (`jaxlib._pathways._create_cpu_client`, from jaxlib 0.8 on), as a proxy's
do: JAX's own CPU backend does not know them, and they claim to be of another process. It computes
in this process all the same. So `watched` makes fail what would fail or be slow through a proxy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from sgljax_engine.layers import devices
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.runner.kv import memory_plan

FETCH_BYTES = 4096
"""Arrays up to this size may be fetched: tokens and log-probs of a dispatch. All of the tests'
weights but norms, and all KV arrays, are larger."""

_PROCESS = 7


@functools.cache
def remote_devices(count: int = 4) -> tuple[Any, ...]:
    """Devices of a client that is not JAX's own; skips the test where jaxlib cannot make one."""
    pathways = pytest.importorskip("jaxlib._pathways")
    if not hasattr(pathways, "_create_cpu_client"):
        pytest.skip("this jaxlib makes no CPU client for tests")
    client = pathways._create_cpu_client(set(range(count)), dict.fromkeys(range(count), _PROCESS))
    devices = tuple(client.devices())
    assert not any(map(is_own_cpu, devices))
    return devices


def remote_mesh(*shape: int, first: int = 0) -> jax.sharding.Mesh:
    """The devices from the first one on, with the axes "fsdp" and "tp"."""
    devices = remote_devices()[first : first + shape[0] * shape[1]]
    return jax.sharding.Mesh(np.array(devices).reshape(shape), ("fsdp", "tp"))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Whoever takes a remote device for an own one gets an AssertionError.

    Refused are: fetching large arrays, native kernels, XLA options of this process's XLA, this
    host's memory as the devices'. Memory statistics are not implemented.
    """
    with pytest.MonkeyPatch.context() as patch:
        device = type(jax.devices()[0])
        patch.setattr(device, "memory_stats", _not_implemented)
        value = ArrayImpl._value
        patch.setattr(ArrayImpl, "_value", property(_checked(value.fget)))
        patch.setattr(ArrayImpl, "copy_to_host_async", _checked(ArrayImpl.copy_to_host_async))
        # NumPy reads a CPU's array through the buffer protocol, past `_value`.
        patch.setattr(np, "asarray", _checked(np.asarray))
        patch.setattr(np, "array", _checked(np.array))
        patch.setattr(jax.ffi, "ffi_call", _refuse("a native kernel was called"))
        patch.setattr(jax.ffi, "register_ffi_target", _refuse("a native kernel was registered"))
        patch.setattr(memory_plan, "Path", _refuse("this host's memory was read"))
        known = devices.known_option
        patch.setattr(
            devices,
            "known_option",
            lambda is_own, *args: _fail("options of this XLA") if is_own else known(False, *args),
        )
        yield


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(array: Any, *args: Any, **kwargs: Any) -> Any:
        is_large = isinstance(array, jax.Array) and array.nbytes > FETCH_BYTES
        if is_large and not all(map(is_own_cpu, array.devices())):
            _fail(f"{array.shape} of {array.dtype.name} was fetched to the controller")
        return function(array, *args, **kwargs)

    return call


def _not_implemented(device: Any) -> NoReturn:
    raise jax.errors.JaxRuntimeError(f"UNIMPLEMENTED: MemoryStats of {device}")


def _refuse(what: str) -> Callable[..., NoReturn]:
    return lambda *args, **kwargs: _fail(what)


def _fail(what: str) -> NoReturn:
    raise AssertionError(f"not with devices of another process: {what}")
