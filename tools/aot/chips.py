"""Published facts about accelerators, by which programs are judged that ran on none of them."""

from __future__ import annotations

import dataclasses
import math
import re

from sgljax_engine.errors import InvalidConfigError

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of accelerator; numbers are of one chip, which is one device of JAX.

    Attributes:
        name: The name in topologies, as in "v5e:2x4" and "h100:8".
        title: The name to print.
        platform: JAX's name for the kind of device.
        hbm_bytes: Bytes of its memory, as published.
        usable_bytes: Bytes that programs may take of it.
        hbm_bytes_per_s: Bytes that its memory moves in a second, as published.
        bf16_flops_per_s: Dense bfloat16 operations in a second, as published.
        max_chips: Chips of the largest slice, or GPUs of a host.
        accelerator_type: Name of a slice of it, as `TPU_ACCELERATOR_TYPE` has it; "" for GPUs.
        source: Where the published numbers are from.
    """

    name: str
    title: str
    platform: str
    hbm_bytes: int
    usable_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    max_chips: int
    accelerator_type: str
    source: str


_TPU_DOCS = "https://cloud.google.com/tpu/docs/"

# `usable_bytes` of TPUs: what libtpu 0.0.42 says is there when a program needs more, and no more
# than is published. Of a GPU that nothing else uses, JAX takes 75% unless it is told otherwise.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            title="TPU v5e",
            platform="tpu",
            hbm_bytes=16 * _GIB,
            usable_bytes=int(15.75 * _GIB),
            hbm_bytes_per_s=819e9,
            bf16_flops_per_s=197e12,
            max_chips=256,
            accelerator_type="v5litepod-8",
            source=_TPU_DOCS + "v5e",
        ),
        Chip(
            name="v6e",
            title="TPU v6e",
            platform="tpu",
            hbm_bytes=32 * _GIB,
            usable_bytes=int(31.25 * _GIB),
            hbm_bytes_per_s=1640e9,
            bf16_flops_per_s=918e12,
            max_chips=256,
            accelerator_type="v6e-8",
            source=_TPU_DOCS + "v6e",
        ),
        Chip(
            name="v5p",
            title="TPU v5p",
            platform="tpu",
            hbm_bytes=95 * _GIB,
            usable_bytes=95 * _GIB,
            hbm_bytes_per_s=2765e9,
            bf16_flops_per_s=459e12,
            max_chips=8960,
            accelerator_type="v5p-8",
            source=_TPU_DOCS + "v5p",
        ),
        Chip(
            name="h100",
            title="NVIDIA H100 SXM",
            platform="gpu",
            hbm_bytes=80 * 10**9,
            usable_bytes=60 * 10**9,
            hbm_bytes_per_s=3350e9,
            bf16_flops_per_s=989e12,
            max_chips=8,
            accelerator_type="",
            source="https://www.nvidia.com/en-us/data-center/h100/",
        ),
    )
}
"""Chips by name."""


def parse_topology(topology: str) -> tuple[Chip, tuple[int, ...]]:
    """The chip of a topology, and the number of its chips along each dimension.

    Args:
        topology: A TPU and a shape of two or three dimensions, "v5e:2x4", "v5p:2x2x2"; or a GPU
            and a number, "h100:8".

    Raises:
        InvalidConfigError: for another form, an unknown chip, and more chips than there can be.
    """
    match = re.fullmatch(r"([a-z0-9]+):([0-9]+(?:x[0-9]+){0,2})", topology)
    name, shape = (match[1], tuple(map(int, match[2].split("x")))) if match else ("", ())
    chip = CHIPS.get(name)
    dims = (2, 3) if chip is None or chip.platform == "tpu" else (1,)
    if match is None or (chip is not None and len(shape) not in dims):
        raise InvalidConfigError(
            "topology must be a TPU and its shape or a GPU and a number, as in 'v5e:2x4' and "
            f"'h100:8', got {topology!r}; known chips: {', '.join(CHIPS)}"
        )
    if chip is None:
        raise InvalidConfigError(f"topology must be of one of {', '.join(CHIPS)}, got {topology!r}")
    if not 1 <= math.prod(shape) <= chip.max_chips:
        raise InvalidConfigError(
            f"topology must have 1 to {chip.max_chips} chips, got {topology!r} of "
            f"{math.prod(shape)}"
        )
    return chip, shape
