"""CPUs of this very process, and XLA's compiler options for them.

Another process may have an XLA that does not know the options.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

Options = dict[str, str | bool]


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


def compiler_options(is_own_cpu: bool) -> Options | None:
    """Compiler options for programs of the model.

    On CPUs XLA uses half the width of AVX-512 by default; CPUs without AVX-512 ignore the option.
    """
    return known_option(is_own_cpu, "xla_cpu_prefer_vector_width", "512")


@functools.cache
def known_option(is_own_cpu: bool, name: str, value: str | bool) -> Options | None:
    """The option, for CPUs whose XLA has it: XLA refuses options that it does not know."""
    if not is_own_cpu:
        return None
    options: Options = {name: value}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return None
    return options
