"""Meshes and weights of several processes, as far as one process can tell.

tests/adapter/test_processes.py has real ones.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from sgljax_engine import InvalidConfigError, localize
from sgljax_engine.weights.controllers import local_submesh

AXES = ("fsdp", "tp")


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a jax.Device as a mesh needs."""

    id: int
    process_index: int


def make_mesh(processes: list[list[int]], axes: tuple[str, ...] = AXES) -> Mesh:
    """Devices numbered in row-major order, which belong to these processes."""
    indices = np.array(processes)
    devices = np.empty(indices.shape, object)
    for number, at in enumerate(np.ndindex(indices.shape)):
        devices[at] = Device(number, int(indices[at]))
    return Mesh(devices, axes)


def ids(mesh: Mesh) -> list[list[int]]:
    return [[device.id for device in row] for row in mesh.devices]


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        pytest.param([[0], [0], [1], [1]], [[[0], [1]], [[2], [3]]], id="fsdp"),
        pytest.param([[0, 0], [1, 1]], [[[0, 1]], [[2, 3]]], id="tp_inside"),
        pytest.param(
            [[0, 0], [0, 0], [1, 1], [1, 1]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], id="both"
        ),
        pytest.param([[1], [0], [1], [0]], [[[1], [3]], [[0], [2]]], id="interleaved"),
        pytest.param([[0], [0], [0], [1]], [[[0], [1], [2]], [[3]]], id="unequal"),
    ],
)
def test_each_process_takes_its_part(processes, parts):
    mesh = make_mesh(processes)
    for process, part in enumerate(parts):
        local = local_submesh(mesh, process_index=process)
        assert ids(local) == part
        assert local.axis_names == mesh.axis_names
        assert {device.process_index for device in local.devices.flat} == {process}


def test_axis_types_stay():
    devices = make_mesh([[0], [1]]).devices
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Explicit, AxisType.Auto))
    assert local_submesh(mesh, process_index=1).axis_types == mesh.axis_types


def test_a_mesh_of_one_process_is_itself():
    mesh = make_mesh([[0, 0], [0, 0]])
    assert local_submesh(mesh, process_index=0) is mesh
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)
    assert local_submesh(mesh) is mesh


@pytest.mark.parametrize("processes", [[[0, 0, 1, 1]], [[0, 1], [0, 1]], [[0, 0], [0, 1]]])
def test_a_tensor_axis_across_processes_is_refused(processes):
    """All processes refuse alike, or the others would wait for this one."""
    mesh = make_mesh(processes)
    for process in (0, 1):
        with pytest.raises(InvalidConfigError) as caught:
            local_submesh(mesh, process_index=process)
        message = str(caught.value)
        assert f"mesh axis 'tp' (size {len(processes[0])}) must lie within one process" in message
        assert "belong to processes [0, 1]" in message
        assert "let another axis, such as 'fsdp', span the processes" in message


def test_the_tensor_axis_has_a_name():
    mesh = make_mesh([[0, 0], [1, 1]], ("model", "data"))
    assert ids(local_submesh(mesh, process_index=0)) == [[0, 1]]
    with pytest.raises(InvalidConfigError, match="mesh axis 'model'"):
        local_submesh(mesh, tensor_axis="model", process_index=0)


def test_a_mesh_without_a_device_of_the_process_is_refused():
    mesh = make_mesh([[0], [2]])
    with pytest.raises(InvalidConfigError, match=r"process 1 has none.* processes \[0, 2\]"):
        local_submesh(mesh, process_index=1)


def test_devices_that_are_no_block_are_refused():
    mesh = Mesh(make_mesh([[0, 0], [1, 0]]).devices, ("fsdp", "data"))
    with pytest.raises(InvalidConfigError, match="Order the devices by process"):
        local_submesh(mesh, process_index=0)


def test_a_tree_of_one_process_passes_through():
    tree = {"a": jnp.ones(3), "b": [np.ones(2), None, 1.0]}
    assert localize(tree) is tree
