"""A group of engines, one for each submesh.

Runs in processes of its own with eight host devices, since JAX fixes their number at start.
"""

from __future__ import annotations

import pytest

from tests.devices import run_python


@pytest.mark.parametrize(
    "case",
    [
        "sizes",
        "auto",
        "moves",
        "ids",
        "faults",
        pytest.param("routing", marks=pytest.mark.slow),
        pytest.param("gpu_kernel", marks=pytest.mark.slow),
        pytest.param("tpu_kernel", marks=pytest.mark.soak),
        pytest.param("trainers_weights", marks=pytest.mark.slow),
        pytest.param("scores", marks=pytest.mark.slow),
        pytest.param("checkpoints", marks=pytest.mark.slow),
        pytest.param("meshes", marks=pytest.mark.slow),
        pytest.param("flops", marks=pytest.mark.soak),
    ],
)
def test_on_eight_devices(case, tmp_path):
    run("tests.engine.group_cases", case, *([str(tmp_path)] if case == "checkpoints" else []))


@pytest.mark.parametrize("step", [31, pytest.param(3, marks=pytest.mark.soak)])
def test_refusals_interrupts_and_faults(step):
    """Nothing hangs or is left behind; callers are interrupted at every so many places."""
    run("tests.engine.group_faults", step)


@pytest.mark.parametrize(
    ("num_examples", "num_steps"), [(80, 8), pytest.param(60, 40, marks=pytest.mark.soak)]
)
def test_interrupt_machine(num_examples, num_steps):
    """As for one engine, with adapters, stop strings and interrupted callers too."""
    run("tests.engine.group_machine", num_examples, num_steps)


def run(module: str, *arguments: object) -> None:
    """Runs a module in a process with eight devices."""
    run_python("-W", "ignore", "-m", module, *arguments, num_devices=8)
