"""A group of engines, one for each submesh.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "cases",
    [
        "sizes auto ids",
        pytest.param("moves routing faults scores checkpoints gpu_kernel", marks=pytest.mark.slow),
        pytest.param("meshes masks", marks=pytest.mark.slow),
        pytest.param("other_meshes tpu_kernel flops", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(cases):
    """Cases of a process have engines of the same programs."""
    run("tests.engine.group_cases", *cases.split())


@pytest.mark.soak
def test_refusals_interrupts_and_faults():
    """Nothing hangs or is left behind; callers are interrupted at every third place."""
    run("tests.engine.group_faults", 3)


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [(60, 40), (30, 40, 1)], ids=["plain", "yields"])
def test_interrupt_machine(arguments):
    """As for one engine, with adapters, stop strings and interrupted callers too."""
    run("tests.engine.group_machine", *arguments)


def run(module: str, *arguments: object) -> None:
    """Runs a module in a process with eight devices."""
    run_python("-W", "ignore", "-m", module, *arguments, num_devices=8)
