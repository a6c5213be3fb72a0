"""Meshes of eight simulated devices with MaxText's axes, through the command."""

from __future__ import annotations

import json

import pytest

from tests.devices import run_python

MESHES = {
    "fsdp": (("ici_fsdp_parallelism=8",), {"fsdp": 8}, 8),
    "fsdp and tensor": (
        ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "rollout_tensor_parallelism=2"),
        {"fsdp": 4, "tensor": 2},
        4,
    ),
    "data and tensor": (
        (
            "ici_data_parallelism=4",
            "ici_fsdp_parallelism=1",
            "ici_tensor_parallelism=2",
            "rollout_tensor_parallelism=2",
        ),
        {"data": 4, "tensor": 2},
        4,
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_run_on_a_mesh(name):
    overrides, mesh, num_engines = MESHES[name]
    done = run_python("-m", "tests.maxtext.on_devices", 2, *overrides, num_devices=8, limit_s=900)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mesh"] == mesh
    assert found["num_engines"] == num_engines
    assert found["version"] == 2
    assert found["num_differing"] == [0, 0]
    assert found["num_samples"] == [16, 16]
