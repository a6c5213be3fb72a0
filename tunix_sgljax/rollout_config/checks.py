"""Fields of RolloutConfig with wrong values, and those that have no meaning here."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any

import jax
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidConfigError
from tunix_sgljax.rollout_config.engine_options import ask_options, asked_logprobs_mode
from tunix_sgljax.rollout_config.fields import FIELDS, default_of, lora_scaling, max_lora_rank
from tunix_sgljax.rollout_config.vllm_sampling import ask_sampling

logger = logging.getLogger(__name__)


def check_fields(config: RolloutConfig) -> dict[str, str]:
    """Settings of a config that change nothing here, as "field=value", and why."""
    unused: dict[str, tuple[Any, str]] = {}
    for field in dataclasses.fields(config):
        value, known = getattr(config, field.name), FIELDS.get(field.name)
        if known is not None and known.treatment != "named":
            continue
        if value != default_of(field):
            unused[field.name] = value, "it is not known here" if known is None else known.text
    unused |= ask_options(config).unused
    unused |= ask_sampling(config).unused
    asked_logprobs_mode(config)
    lora_scaling(config)
    max_lora_rank(config)
    return {f"{name}={value!r}": reason for name, (value, reason) in unused.items()}


def check_axis_types(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh, or refuses one with axes that Tunix cannot train on.

    Tunix 0.1.7's models leave shardings to the compiler. On Explicit axes, which `jax.make_mesh`
    makes by default, the trainer's first step ends in a DuplicateSpecError or ShardingTypeError.
    """
    auto = jax.sharding.AxisType.Auto
    if any(kind != auto for kind in mesh.axis_types):
        shape, names = tuple(mesh.shape.values()), mesh.axis_names
        raise InvalidConfigError(
            f"the mesh's axes must be Auto for Tunix's models, got {mesh.axis_types}; make it with "
            f"jax.make_mesh({shape}, {names}, "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(names)})"
        )
    return mesh


class FieldChecker:
    """Warns once about each field that changes nothing, or refuses it. Any thread."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._named: set[str] = set()
        self._lock = threading.Lock()

    def check(self, config: RolloutConfig) -> None:
        """Logs one warning for all such fields that no earlier config had, or refuses them."""
        unused = check_fields(config)
        if self._is_strict and unused:
            field, reason = next(iter(unused.items()))
            raise InvalidConfigError(
                f"RolloutConfig.{field} has no meaning for SglJaxRollout: {reason}; leave it at "
                "its default, or strict_config at False"
            )
        with self._lock:
            new = {field: reason for field, reason in unused.items() if field not in self._named}
            self._named |= new.keys()
        if new:
            logger.warning(
                "RolloutConfig sets what changes nothing for SglJaxRollout: %s. "
                "strict_config=True refuses it",
                "; ".join(f"{field} ({reason})" for field, reason in new.items()),
            )
