"""XLA's compiler options for the engine's programs, by JAX platform."""

from __future__ import annotations

import functools

import jax

Options = dict[str, str | bool]


def compiler_options(platform: str) -> Options | None:
    """For programs of the model.

    On CPUs XLA uses half the width of AVX-512 unless told; CPUs without it ignore the option.
    """
    return _known(platform, "xla_cpu_prefer_vector_width", "512")


def transposition_options(platform: str) -> Options | None:
    """For programs that do little but copy and transpose.

    On CPUs XLA's fusion emitters transpose by way of small tiles on the stack; the loops that it
    writes without them take a quarter less time. Other programs are much faster with them.
    """
    return _known(platform, "xla_cpu_use_fusion_emitters", False)


@functools.cache
def _known(platform: str, name: str, value: str | bool) -> Options | None:
    """The option, for CPUs whose XLA has it: it refuses those that it does not know."""
    if platform != "cpu":
        return None
    options: Options = {name: value}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return None
    return options
