"""An embedded, single-process inference engine in JAX. Usable without Tunix.

Importing this package imports no JAX, starts no thread and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sgljax_engine.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from sgljax_engine.errors import (
    CheckpointError,
    CompileForbiddenError,
    EngineError,
    EngineShutdownError,
    EngineStateError,
    EngineStepError,
    InvalidConfigError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OffloadError,
    StructuredOutputError,
    UnsupportedModelError,
    WeightLoadError,
    WeightsLostError,
    WeightStoreError,
    WeightSyncError,
)
from sgljax_engine.foreign_options import (
    FOREIGN_FIELDS,
    FOREIGN_OPTIONS,
    ForeignField,
    ForeignOption,
    foreign_fields,
)
from sgljax_engine.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
)
from sgljax_engine.model_config import (
    AttentionConfig,
    KVShape,
    LatentConfig,
    LinearAttentionConfig,
    Llama3Scaling,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
    ScaleConfig,
    YarnScaling,
)
from sgljax_engine.observability.metrics import EngineCounters, EngineState, MemoryReport
from sgljax_engine.observability.progress import EngineProgress, ProgressListener
from sgljax_engine.observability.trace import RecordedEvent, RecordedSample, Recording
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.home import HomeProcess
from sgljax_engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, derive_seed
from sgljax_engine.types import FinishReason

if TYPE_CHECKING:
    from sgljax_engine.checkpoint.manager import CheckpointManager
    from sgljax_engine.checkpoint.request import RequestCheckpoint
    from sgljax_engine.checkpoint.structures import EngineCheckpoint, SchedulerCheckpoint
    from sgljax_engine.checks import check_model_folder
    from sgljax_engine.engine import Engine
    from sgljax_engine.models.hf_export import to_hf_tensors
    from sgljax_engine.models.registry import load_model_config, model_config_from_hf
    from sgljax_engine.models.weight_rules import hf_rules, logical_rules
    from sgljax_engine.preview import EnginePreview, preview_engine
    from sgljax_engine.processing.tokenizer_check import find_tokenizer_difference
    from sgljax_engine.processing.tokenizer_folder import load_hf_tokenizer
    from sgljax_engine.weights.controllers import localize
    from sgljax_engine.weights.hf_files import (
        HfTensor,
        read_hf_tensors,
        write_hf_tensors,
    )
    from sgljax_engine.weights.hf_layout import WeightFiles, find_weight_files
    from sgljax_engine.weights.rules import LoraRule, Rule, WeightRule, flatten_named
    from sgljax_engine.weights.safetensors_file import read_safetensors
    from sgljax_engine.weights.staged import StagedWeights

_LAZY = {
    "CheckpointManager": "sgljax_engine.checkpoint.manager",
    "Engine": "sgljax_engine.engine",
    "EngineCheckpoint": "sgljax_engine.checkpoint.structures",
    "EnginePreview": "sgljax_engine.preview",
    "HfTensor": "sgljax_engine.weights.hf_files",
    "RequestCheckpoint": "sgljax_engine.checkpoint.request",
    "SchedulerCheckpoint": "sgljax_engine.checkpoint.structures",
    "StagedWeights": "sgljax_engine.weights.staged",
    "LoraRule": "sgljax_engine.weights.rules",
    "Rule": "sgljax_engine.weights.rules",
    "WeightFiles": "sgljax_engine.weights.hf_layout",
    "WeightRule": "sgljax_engine.weights.rules",
    "check_model_folder": "sgljax_engine.checks",
    "find_tokenizer_difference": "sgljax_engine.processing.tokenizer_check",
    "find_weight_files": "sgljax_engine.weights.hf_layout",
    "flatten_named": "sgljax_engine.weights.rules",
    "hf_rules": "sgljax_engine.models.weight_rules",
    "load_hf_tokenizer": "sgljax_engine.processing.tokenizer_folder",
    "load_model_config": "sgljax_engine.models.registry",
    "localize": "sgljax_engine.weights.controllers",
    "logical_rules": "sgljax_engine.models.weight_rules",
    "model_config_from_hf": "sgljax_engine.models.registry",
    "preview_engine": "sgljax_engine.preview",
    "read_hf_tensors": "sgljax_engine.weights.hf_files",
    "read_safetensors": "sgljax_engine.weights.safetensors_file",
    "to_hf_tensors": "sgljax_engine.models.hf_export",
    "write_hf_tensors": "sgljax_engine.weights.hf_files",
}

__all__ = [
    "FOREIGN_FIELDS",
    "FOREIGN_OPTIONS",
    "MAX_TOP_LOGPROBS",
    "AbortReq",
    "AttentionConfig",
    "CacheConfig",
    "CheckpointError",
    "CheckpointManager",
    "CompileForbiddenError",
    "ContinueGenerationReqInput",
    "Engine",
    "EngineCheckpoint",
    "EngineConfig",
    "EngineCounters",
    "EngineError",
    "EnginePreview",
    "EngineProgress",
    "EngineShutdownError",
    "EngineState",
    "EngineStateError",
    "EngineStepError",
    "FinishReason",
    "FlushCacheReqInput",
    "FlushCacheReqOutput",
    "ForeignField",
    "ForeignOption",
    "HfTensor",
    "HomeProcess",
    "InvalidConfigError",
    "InvalidRequestError",
    "KVShape",
    "LatentConfig",
    "LinearAttentionConfig",
    "Llama3Scaling",
    "LoraConfig",
    "LoraRule",
    "MemoryReport",
    "MoEConfig",
    "ModelConfig",
    "NonFiniteLogitsError",
    "OffloadError",
    "ParallelConfig",
    "PauseGenerationReqInput",
    "ProgressListener",
    "RecordedEvent",
    "RecordedSample",
    "Recording",
    "RequestCheckpoint",
    "RequestOutput",
    "RopeConfig",
    "RouterConfig",
    "Rule",
    "RuntimeConfig",
    "SamplingParams",
    "ScaleConfig",
    "SchedulerCheckpoint",
    "SchedulerConfig",
    "SpeculationConfig",
    "StagedWeights",
    "StructuredOutputError",
    "UnsupportedModelError",
    "WeightFiles",
    "WeightLoadError",
    "WeightRule",
    "WeightStoreError",
    "WeightSyncError",
    "WeightsLostError",
    "YarnScaling",
    "check_model_folder",
    "derive_seed",
    "find_tokenizer_difference",
    "find_weight_files",
    "flatten_named",
    "foreign_fields",
    "hf_rules",
    "load_hf_tokenizer",
    "load_model_config",
    "localize",
    "logical_rules",
    "model_config_from_hf",
    "preview_engine",
    "read_hf_tensors",
    "read_safetensors",
    "to_hf_tensors",
    "write_hf_tensors",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
