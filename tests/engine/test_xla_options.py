"""Options for XLA: those that it knows, on CPUs."""

import jax
import pytest

from sgljax_engine.layers import devices
from sgljax_engine.layers.devices import compiler_options


def test_installed_xla_takes_the_options_for_cpus():
    found = compiler_options(True)
    assert found
    assert jax.jit(lambda x: x + 1, compiler_options=found)(1).item() == 2


def test_other_devices_have_none():
    assert compiler_options(False) is None


def test_an_option_that_xla_has_dropped_is_left_out():
    assert devices.known_option(True, "xla_cpu_dropped_long_ago", True) is None


def test_other_refusals_are_errors():
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        devices.known_option(True, "xla_cpu_prefer_vector_width", "perhaps")
