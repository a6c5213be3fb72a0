"""Subclasses of Tunix's pipelines that accept `rollout_engine=sgljax`."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.utils import mesh as mesh_lib

from sgljax_engine import InvalidConfigError
from tunix_sgljax.cli import tunix_sections as sections
from tunix_sgljax.cli.output import say
from tunix_sgljax.rollout import SglJaxRollout, options

_FIELDS = frozenset(field.name for field in dataclasses.fields(RolloutConfig))
_OVERRIDE = "rollout_engine="


def with_sgljax_engine(pipeline: Any) -> Any:
    """A subclass of a `tunix.cli` pipeline that samples with this engine if the config says so.

    It accepts one more value for `rollout_engine` and one more section, `sgljax_config`, whether or
    not the base config has their keys. Everything else is the pipeline's own.
    """

    class SglJaxPipeline(pipeline):
        def __init__(self, argv: list[str]) -> None:
            self._named_engines: list[str] = []
            self._is_base_loaded = False
            super().__init__(argv)
            self._named_engines += [
                word.removeprefix(_OVERRIDE) for word in argv if word.startswith(_OVERRIDE)
            ]
            if not self._uses_sgljax:
                say(
                    f"rollout_engine is {self.config.get('rollout_engine')!r}, as the config says; "
                    f"rollout_engine={sections.ENGINE} samples with this package's engine"
                )
                return
            self._section = sections.recipe_section(self.config, self._named_engines)
            announce(self.config, self._section)

        def _load_config_from_yaml(self, config_path: str) -> Any:
            config = super()._load_config_from_yaml(config_path)
            if config.get("rollout_engine"):
                self._named_engines.append(str(config["rollout_engine"]))
            if not self._is_base_loaded:
                # Tunix refuses overrides of keys that the base config does not have.
                self._is_base_loaded = True
                config.setdefault("rollout_engine", "")
                if config.get(options.SECTION) is None:
                    config[options.SECTION] = {}
            return config

        def _update_from_env_and_command_line(
            self, raw_keys: Any, *arguments: Any, **keywords: Any
        ) -> Any:
            changed = super()._update_from_env_and_command_line(raw_keys, *arguments, **keywords)
            # Before Tunix asks for a token of the hub, or for anything else of the config.
            engine = sections.check_engine_name(raw_keys.get("rollout_engine"))
            self._uses_sgljax = engine == sections.ENGINE
            self._options: dict[str, Any] = {}
            if self._uses_sgljax:
                section = sections.read_section(raw_keys, options.SECTION)
                self._options = options.rollout_options(section)
            return changed

        def create_role_to_mesh(self) -> Any:
            if any(getattr(device, "coords", None) is not None for device in jax.devices()):
                return super().create_role_to_mesh()
            return meshes_in_order(self)

        def _rollout_engine_extra(
            self,
            engine: str,
            kv_cache_size: int,
            max_running_requests: int,
            role_to_mesh: Any = None,
        ) -> dict[str, Any]:
            if engine != sections.ENGINE:
                return super()._rollout_engine_extra(
                    engine, kv_cache_size, max_running_requests, role_to_mesh=role_to_mesh
                )
            given = sections.read_section(self.config, "rollout_config")
            fields: dict[str, Any] = {}
            if self._section is not None:
                fields = sections.translate_section(self.config, self._section, _FIELDS)[0]
            fields = {name: value for name, value in fields.items() if name not in given}
            version = sections.model_version(self.config, self._named_engines)
            if version is not None and not sections.names_model(given | fields):
                fields["rollout_vllm_model_version"] = version
            if sections.leaves_batch_open(given | fields, self._options):
                # Like Tunix for its SGLang engine: all samples of a step at once.
                fields["rollout_sglang_jax_max_running_requests"] = max_running_requests
            return fields

        def create_cluster_config(self, *, role_to_mesh: Any, rollout_config: Any = None) -> Any:
            config = super().create_cluster_config(
                role_to_mesh=role_to_mesh, rollout_config=rollout_config
            )
            if not self._uses_sgljax:
                return config
            # Tunix's annotation omits the partial that its code accepts.
            engine: Any = functools.partial(SglJaxRollout, **self._options)
            changes: dict[str, Any] = {"rollout_engine": engine}
            if sections.read_section(self.config, "model_config").get("model_source") == "maxtext":
                from tunix_sgljax.maxtext.axes import logical_rules

                say("model_source is 'maxtext': the cluster gets MaxText's logical axes (base.yml)")
                changes["role_to_logical_axis_rule"] = {
                    role: logical_rules(mesh.axis_names)
                    for role, mesh in config.role_to_mesh.items()
                }
            return dataclasses.replace(config, **changes)

    return SglJaxPipeline


def announce(config: Any, section: str | None) -> None:
    """Tells the user which parts of a config apply, and what would make the run faster."""
    unread = sections.unread_rollout_keys(config, _FIELDS)
    note = ""
    if section is not None:
        note = f"; {section} is translated"
        unread += sections.translate_section(config, section, _FIELDS)[1]
    say(f"rollout_engine is {sections.ENGINE!r}: SglJaxRollout samples{note}")
    if unread:
        say(f"not read, for this Tunix's RolloutConfig has no such field: {unread}")
    advice = sections.micro_batch_advice(config)
    if advice is not None:
        say(advice)


def meshes_in_order(pipeline: Any) -> dict[Any, jax.sharding.Mesh]:
    """A mesh for each role, like Tunix's `create_role_to_mesh`, from devices in order.

    Tunix builds meshes from the coordinates of TPUs, and refuses devices without them: GPUs and
    CPUs.
    """
    owners = pipeline._resolve_mesh_owners()
    devices, used = jax.devices(), 0
    meshes: dict[Any, jax.sharding.Mesh] = {}
    for owner in dict.fromkeys(owners.values()):
        key = pipeline._ROLE_TO_MODEL_KEY[owner]
        shape, names = pipeline.parse_mesh_config(key)
        needed = math.prod(shape)
        if used + needed > len(devices):
            raise InvalidConfigError(
                f"{key}.mesh.shape {shape} takes {needed} devices, but {len(devices) - used} of "
                f"{len(devices)} are left"
            )
        meshes[owner] = mesh_lib.create_mesh(shape, names, devices=devices[used : used + needed])
        used += needed
    return {role: meshes[owner] for role, owner in owners.items()}
