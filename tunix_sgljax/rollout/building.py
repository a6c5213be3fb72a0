"""From a rollout's options and its training RolloutConfig to an engine."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import (
    Engine,
    InvalidConfigError,
    ModelConfig,
    ProgressListener,
    WeightSyncError,
    flatten_named,
    load_model_config,
    preview_engine,
)
from tunix_sgljax import mappings
from tunix_sgljax.lora import LoraActor, LoraChoice, LoraMode, find_lora, is_lora_name
from tunix_sgljax.maxtext.fields import is_maxtext_config
from tunix_sgljax.model_config import as_trained, config_of, engine_dtype, to_model_config
from tunix_sgljax.policy_weights import PolicyWeights
from tunix_sgljax.rollout_config import engine_options
from tunix_sgljax.rollout_config.fields import lora_scaling as scaling_of
from tunix_sgljax.rollout_config.fields import max_lora_rank

if TYPE_CHECKING:
    from sgljax_engine.fleet import FleetConfig

logger = logging.getLogger(__name__)

_MIN_CONTEXT_LENGTH = 32768
"""Context of a Tunix model whose config names none; rotary embeddings have no limit."""


_FLEET_OPTIONS = frozenset(
    ["dtype", "lora_targets", "max_lora_rank", "max_loras", "max_model_len", "random_seed"]
)
"""Engine options that a trainer sets for its fleet; the workers have all others."""


def check_fleet_options(asked: engine_options.AskedOptions, explicit: Mapping[str, Any]) -> None:
    """Refuses engine options of a rollout whose workers have theirs; warns of a config's."""
    for name, value in explicit.items():
        if name not in _FLEET_OPTIONS:
            raise InvalidConfigError(
                f"{name}={value!r} is an option of the workers of a fleet: give it to "
                f"`tunix-sgljax serve`; a trainer sets {', '.join(sorted(_FLEET_OPTIONS))}"
            )
    left = [f"{asked.sources[n]}={v!r}" for n, v in asked.values.items() if n not in _FLEET_OPTIONS]
    if left:
        logger.warning(
            "a fleet's workers have options of their own, not those of RolloutConfig: %s",
            ", ".join(left),
        )


class EngineBuilder:
    """Plans an engine for an actor, and builds it once. Calls come one at a time.

    With a `fleet` the engine is that of its servers.

    `actor` is None once the engine has its own weights; `weight_specs` (what Tunix passes) and
    `dtype` are there once it is built. `explicit_options` override those of a config.
    """

    model_config: ModelConfig
    engine_config: engine_options.EngineConfig
    weights: PolicyWeights
    weight_specs: Mapping[str, jax.ShapeDtypeStruct]
    dtype: str

    def __init__(
        self,
        actor: nnx.Module,
        *,
        mesh: jax.sharding.Mesh | None,
        model_config: Any,
        lora_mode: LoraChoice,
        lora_scaling: float | None,
        explicit_options: Mapping[str, Any],
        fleet: FleetConfig | None = None,
    ) -> None:
        self.actor: nnx.Module | None = actor
        self.explicit_options = dict(explicit_options)
        self._mesh = mesh
        self._given_model_config = model_config
        self._lora_mode: LoraChoice = lora_mode
        self._lora_scaling = lora_scaling
        self._mapping: Any = None
        self._merge_instead: Callable[[], None] | None = None  # with "auto"
        self._fleet = fleet

    def plan(self, config: RolloutConfig, configs: Mapping[str, RolloutConfig]) -> None:
        """Plans the engine, and refuses now what building it would.

        The longest of all modes' configs sizes it.
        """
        asked = engine_options.ask_options(config)
        wanted = {**asked.values, **self.explicit_options}.get("max_model_len", 0)
        self.model_config = self._find_model_config(config, wanted)
        asked = self._for_model(asked)
        if self._fleet is not None:
            check_fleet_options(asked, self.explicit_options)
        lengths = map(engine_options.implied_model_len, (config, *configs.values()))
        engine_config = engine_options.make_engine_config(
            asked, self.explicit_options, min(max(lengths), self.model_config.context_length)
        )
        self._mapping = config.rollout_mapping_config or None  # recipes give {} for none
        mapping = mappings.find_mapping(self._mapping, self.actor)
        asked_scaling = scaling_of(config)
        scaling = asked_scaling if self._lora_scaling is None else self._lora_scaling
        lora = find_lora(self.actor, scaling)
        mapper = mappings.WeightMapper(mapping, self.model_config, lora, self._maxtext_config())
        plan = functools.partial(
            self._plan_lora, engine_config, mapper, lora, max_lora_rank(config)
        )
        self._merge_instead = None
        if self._lora_mode != "auto":
            plan(self._lora_mode)
        elif lora is None or not self._rounds(engine_config, lora):
            plan("merged")
        else:
            self._merge_instead = functools.partial(plan, "merged")
            try:
                if slots := engine_config.lora.max_loras:
                    raise InvalidConfigError(f"max_loras={slots} asks for slots of other adapters")
                plan("adapter")
            except InvalidConfigError as error:
                self._merge(error)

    def _plan_lora(
        self,
        engine_config: engine_options.EngineConfig,
        mapper: mappings.WeightMapper,
        lora: LoraActor | None,
        max_rank: int | None,
        mode: LoraMode,
    ) -> None:
        if lora is not None and mode == "adapter":
            lora.check_factors_alone()
        self.weights = PolicyWeights(mapper, lora, mode)
        slots = self.weights.adapter_config(engine_config.lora, self.explicit_options, max_rank)
        self.engine_config = dataclasses.replace(engine_config, lora=slots)
        if self._fleet is None:  # sizes that do not share out the mesh, for example
            preview_engine(self.model_config, mesh=self._mesh, config=self.engine_config)

    def _rounds(self, engine_config: engine_options.EngineConfig, lora: LoraActor) -> bool:
        """Whether the engine's weights are coarser than float32."""
        runtime = engine_config.runtime
        dtype = runtime.dtype or self._dtype_of(lora.stored_dtype)
        return runtime.quantization is not None or jnp.finfo(dtype).bits < 32

    def _merge(self, reason: Exception) -> None:
        assert self._merge_instead is not None
        logger.warning(
            "lora='auto' merges the pairs into the engine's weights, whose rounding takes part of "
            "small updates away (see MismatchReport.lora), since they cannot be kept apart: %s",
            reason,
        )
        plan, self._merge_instead = self._merge_instead, None
        plan()

    def _dtype_of(self, stored: str) -> str:
        return engine_dtype(self._maxtext_config() or config_of(self.actor), stored)

    def build(self, tokenizer: Any, progress: ProgressListener | None) -> Engine:
        try:
            return self._build(tokenizer, progress)
        except WeightSyncError as error:
            if self._merge_instead is None:
                raise
            self._merge(error)
            return self._build(tokenizer, progress)

    def _build(self, tokenizer: Any, progress: ProgressListener | None) -> Engine:
        params = nnx.state(self.actor, nnx.Param)
        self.weight_specs = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for name, x in flatten_named(params).items()
            if not self.weights.has_lora or is_lora_name(name)
        }
        first = self.weights.first(params)
        runtime = self.engine_config.runtime
        if runtime.dtype is None:
            stored = np.dtype(next(iter(first.weights.values())).dtype).name
            runtime = dataclasses.replace(runtime, dtype=self._dtype_of(stored))
        self.dtype = str(runtime.dtype)
        config = dataclasses.replace(self.engine_config, runtime=runtime)
        if self._fleet is not None:
            from sgljax_engine.fleet import RemoteEngine  # needs the extra `fleet`

            remote = RemoteEngine(
                self._fleet,
                model_config=self.model_config,
                weights=first.weights,
                weight_rules=first.weight_rules,
                adapters=first.adapters,
                tokenizer=tokenizer,
                config=config,
                progress=progress,
            )
            return cast(Engine, remote)  # it has the methods that a rollout calls
        return Engine(
            model_config=self.model_config,
            weights=first.weights,
            weight_rules=first.weight_rules,
            adapters=first.adapters,
            tokenizer=tokenizer,
            mesh=self._mesh,
            config=config,
            progress=progress,
        )

    def check_same(self, config: RolloutConfig) -> None:
        """Refuses engine fields of a later config that differ from the planned engine's."""
        asked = self._for_model(engine_options.ask_options(config))
        engine_options.check_same_engine(asked, self.engine_config, self.explicit_options)

    def _for_model(self, asked: engine_options.AskedOptions) -> engine_options.AskedOptions:
        has_experts = self.model_config.moe is not None
        return asked if has_experts else engine_options.without_experts(asked)

    def check_same_mapping(self, config: RolloutConfig) -> None:
        mapping = config.rollout_mapping_config or None
        if mapping is not None and mapping is not self._mapping:
            raise InvalidConfigError(
                "RolloutConfig.rollout_mapping_config cannot change after construction"
            )

    def _find_model_config(self, config: RolloutConfig, wanted: int) -> ModelConfig:
        given = self._given_model_config
        if given is None:
            # Tunix's sglang_jax engine takes a model name here; a local folder gives the shape.
            folder = config.rollout_sglang_jax_model_version
            if folder and (Path(folder) / "config.json").is_file():
                given = load_model_config(folder)
            else:
                given = config_of(self.actor)
        model = to_model_config(given, context_length=max(_MIN_CONTEXT_LENGTH, wanted))
        maxtext_config = self._maxtext_config()
        if maxtext_config is not None and config.rollout_mapping_config:
            return model  # what the user's mapping maps to
        return as_trained(model, maxtext_config or config_of(self.actor))

    def _maxtext_config(self) -> Any:
        both = (self._given_model_config, config_of(self.actor))
        return next(filter(is_maxtext_config, both), None)
