"""XLA's compiler options for the engine's programs.

Only those for CPUs of this process: another process may have an XLA that does not know them.
"""

from __future__ import annotations

import functools

import jax

Options = dict[str, str | bool]


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
