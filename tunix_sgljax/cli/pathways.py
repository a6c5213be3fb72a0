"""Pathways: JAX's devices are many hosts' behind a proxy, and this process controls them all."""

from __future__ import annotations

import os
from collections.abc import Mapping

PLATFORM = "proxy"
"""The entry of JAX_PLATFORMS that asks for the proxy, as Tunix and pathwaysutils read it."""


def is_asked_for(variables: Mapping[str, str]) -> bool:
    """Whether environment variables ask for Pathways."""
    return PLATFORM in variables.get("JAX_PLATFORMS", "").split(",")


def initialize() -> None:
    """Makes the proxy known to JAX if the environment asks for Pathways; again does no harm.

    It must come before anything touches JAX's devices.
    """
    if not is_asked_for(os.environ):
        return
    try:
        import pathwaysutils  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"JAX_PLATFORMS asks for Pathways, and pathwaysutils cannot be imported ({error}): "
            "pip install pathwaysutils"
        ) from error
    pathwaysutils.initialize()
