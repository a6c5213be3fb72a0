"""Devices that nobody has: those of a topology that a vendor's compiler knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from sgljax_engine.errors import InvalidConfigError
from tools.aot.chips import parse_topology

_GPUS = {
    "h100": """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
}
"""GPUs as they describe themselves to XLA's compiler, `GpuTargetConfigProto`s in text form."""


def topology_mesh(
    topology: str, shape: Sequence[int], axis_names: Sequence[str] = ("data", "tp")
) -> jax.sharding.Mesh:
    """A mesh of the first devices of a topology, for which programs can be compiled but not run.

    TPUs need libtpu, in an environment in which it starts without a TPU, which the caller has set.
    GPUs need JAX's CUDA plugin.

    Args:
        topology: As for `parse_topology`.
        shape: Devices along each axis of the mesh.
        axis_names: Names of the axes.

    Raises:
        InvalidConfigError: when the compiler does not know the topology, and when it has too few
            devices.
    """
    devices = topology_devices(topology)
    needed = math.prod(shape)
    if needed > len(devices):
        raise InvalidConfigError(
            f"a mesh of shape {list(shape)} needs {needed} devices; topology {topology!r} has "
            f"{len(devices)}"
        )
    return jax.sharding.Mesh(np.array(devices[:needed]).reshape(shape), tuple(axis_names))


def topology_devices(topology: str) -> list[Any]:
    """All devices of a topology, in the compiler's order, all of one process.

    So they are those of one host, or those of many hosts that one process controls by Pathways.
    Errors are those of `topology_mesh`.
    """
    chip, sizes = parse_topology(topology)
    try:
        if chip.platform == "tpu":
            bounds = [*sizes, 1][:3]
            found = topologies.get_topology_desc(
                topology, platform="tpu", chips_per_host_bounds=bounds
            )
        else:
            found = topologies.get_topology_desc(
                platform="cuda", target_config=_GPUS[chip.name], topology=f"1x1x{sizes[0]}"
            )
    except (RuntimeError, ValueError) as error:  # JAX's own is a RuntimeError
        reason = str(error).strip().splitlines()[0]
        raise InvalidConfigError(
            f"topology {topology!r} is refused by its compiler: {reason}"
        ) from error
    return list(found.devices)
