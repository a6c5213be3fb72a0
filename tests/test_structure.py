"""The walls of the house: dependency direction, exported names, imports without side effects."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "sgljax_engine": ROOT / "engine" / "sgljax_engine",
    "tunix_sgljax": ROOT / "tunix_sgljax",
}

# For each part of the engine, the parts it may import. Parts not listed may import anything.
ALLOWED = {
    "errors": set(),
    "sampling_params": {"errors"},
    "token_counts": set(),
    "types": {"errors", "sampling_params", "token_counts"},
    "outputs": {"sampling_params", "types"},
    "checks": {"errors"},
    "files": {"errors"},
    "config": {"checks", "errors", "foreign_options"},
    "foreign_options": {"errors"},
    "model_config": {"checks"},
    "seeds": {"sampling_params"},
    "io_struct": {"errors"},
    "metrics": {"io_struct"},
    "chat": {"errors"},
    "tokenizer": {"chat", "errors", "sampling_params"},
    "text": {"errors", "tokenizer"},
    "cache.allocator": {"errors"},
    "cache.kv_pages": set(),
    "cache.contiguous_kv": {"cache.kv_pages"},
    "cache.radix": {"cache.allocator", "errors"},
    "cache.pool": {"cache.allocator", "cache.radix", "errors", "types"},
    "scheduler": {"cache.pool", "cache.radix", "config", "errors", "scheduler", "types"},
    "kernels": {"kernels"},
    "attention": {
        "attention",
        "cache.contiguous_kv",
        "cache.kv_pages",
        "errors",
        "kernels",
        "layers",
    },
    "layers": {"errors", "layers", "kernels"},
    "models": {
        "attention",
        "cache.kv_pages",
        "cache.contiguous_kv",
        "errors",
        "files",
        "layers",
        "model_config",
        "models",
        "kernels",
    },
    "model_rules": {"model_config", "models", "weights.rules"},
    "offload": set(),
    "sampling": {"layers.tiles", "sampling"},
    "weights": {"errors", "files", "kernels", "weights", "xla_options"},
    "xla_options": set(),
    "runner": {
        "attention",
        "cache.kv_pages",
        "cache.contiguous_kv",
        "config",
        "errors",
        "layers",
        "model_config",
        "models",
        "kernels",
        "offload",
        "progress",
        "runner",
        "sampling",
        "sampling_params",
        "token_counts",
        "types",
        "weights",
        "xla_options",
    },
    "requests": {
        "checkpoint",
        "checks",
        "errors",
        "model_config",
        "sampling_params",
        "seeds",
        "tokenizer",
        "types",
    },
    "checkpoint": {"checkpoint", "errors", "sampling_params", "types"},
    "progress": set(),
    "recorder": {"errors"},
    "books": {"cache.pool", "io_struct", "metrics", "recorder", "scheduler", "types"},
    "detokenizer": {"errors", "outputs", "recorder", "text", "tokenizer", "types"},
    "answers": {"detokenizer", "errors", "types"},
    "streams": {"detokenizer", "outputs", "types"},
    "worker": {"detokenizer", "errors"},
    "calls": {"types"},
    "digest": set(),
    "snapshot": {"checkpoint", "detokenizer", "digest", "runner.saved_pages", "types"},
    "commands": {
        "detokenizer",
        "io_struct",
        "metrics",
        "progress",
        "snapshot",
        "types",
        "weights.rules",
    },
    "sleep": {"cache.pool", "errors", "io_struct", "offload", "runner"},
    "updates": {"commands", "io_struct", "recorder", "weights"},
    "adapters": {"errors", "types"},
    "adapter_loading": {"commands", "errors", "io_struct", "updates", "weights"},
    "staging": {"adapter_loading", "commands", "errors", "io_struct", "updates", "weights"},
}
HOST_ONLY = (
    "errors",
    "sampling_params",
    "token_counts",
    "types",
    "outputs",
    "checks",
    "files",
    "config",
    "foreign_options",
    "model_config",
    "seeds",
    "io_struct",
    "metrics",
    "chat",
    "tokenizer",
    "text",
    "requests",
    "progress",
    "recorder",
    "books",
    "detokenizer",
    "answers",
    "streams",
    "checkpoint",
    "cache.allocator",
    "cache.radix",
    "cache.pool",
    "adapters",
    "scheduler",
)


def modules(package: str) -> dict[str, Path]:
    """Dotted names within the package, "" for its root."""
    root = PACKAGES[package]
    names = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__")] = path
    return names


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


@pytest.mark.parametrize("part", ALLOWED)
def test_dependency_direction(part):
    checked = 0
    for name, path in modules("sgljax_engine").items():
        if not is_within(name, part):
            continue
        checked += 1
        for imported in imports(path):
            if not is_within(imported, "sgljax_engine"):
                continue
            inner = imported.removeprefix("sgljax_engine").removeprefix(".")
            ok = any(is_within(inner, allowed) for allowed in ALLOWED[part])
            assert ok, f"{name} must not import {imported}"
    assert checked, f"no module is called {part}"


@pytest.mark.parametrize("part", HOST_ONLY)
def test_host_only_parts_import_no_jax(part):
    for name, path in modules("sgljax_engine").items():
        if is_within(name, part):
            for imported in imports(path):
                assert not is_within(imported, "jax"), f"{name} imports {imported}"


def test_engine_never_imports_tunix():
    for name, path in modules("sgljax_engine").items():
        for imported in imports(path):
            assert imported.split(".")[0] not in ("tunix", "tunix_sgljax"), name


def test_adapter_uses_the_engines_public_names_only():
    public = set(importlib.import_module("sgljax_engine").__all__)
    for name, path in modules("tunix_sgljax").items():
        for imported in imports(path):
            if is_within(imported, "sgljax_engine"):
                inner = imported.removeprefix("sgljax_engine.")
                assert inner in public, f"tunix_sgljax.{name} imports {imported}"


def test_no_environment_reads_below_the_command_line():
    for package in PACKAGES:
        for name, path in modules(package).items():
            if package == "tunix_sgljax" and is_within(name, "cli"):
                continue
            text = path.read_text(encoding="utf-8")
            # Whole words: Tunix's agents act in environments.
            assert not re.search(r"\b(environ|getenv)\b", text), f"{package}.{name}"


def test_exported_names():
    engine = importlib.import_module("sgljax_engine")
    assert engine.__all__ == [
        "FOREIGN_OPTIONS",
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
        "ForeignOption",
        "HfTensor",
        "InvalidConfigError",
        "InvalidRequestError",
        "Llama3Scaling",
        "LoraConfig",
        "LoraRule",
        "MemoryReport",
        "ModelConfig",
        "OffloadError",
        "PauseGenerationReqInput",
        "ProgressListener",
        "RecordedEvent",
        "RecordedSample",
        "Recording",
        "RequestCheckpoint",
        "RequestOutput",
        "RopeConfig",
        "Rule",
        "RuntimeConfig",
        "SamplingParams",
        "SchedulerCheckpoint",
        "SchedulerConfig",
        "StagedWeights",
        "UnsupportedModelError",
        "WeightLoadError",
        "WeightRule",
        "WeightSyncError",
        "WeightsLostError",
        "derive_seed",
        "flatten_named",
        "hf_rules",
        "load_model_config",
        "logical_rules",
        "model_config_from_hf",
        "preview_engine",
        "read_hf_tensors",
        "to_hf_tensors",
        "write_hf_tensors",
    ]
    adapter = importlib.import_module("tunix_sgljax")
    assert adapter.__all__ == [
        "AgenticGrpoLearner",
        "GrpoLearner",
        "MismatchReport",
        "Progress",
        "RLCluster",
        "SglJaxRollout",
        "Timeline",
        "VersionedRolloutOutput",
        "create_sgljax_rollout",
        "log_rollout_metrics",
        "mismatch_report",
        "record_timeline",
    ]
    training = importlib.import_module("tunix_sgljax.training")
    assert training.__all__ == [
        "RunResult",
        "TrainConfig",
        "evaluate",
        "load_config",
        "prepare",
        "run",
        "to_yaml",
    ]
    for module in (engine, adapter, training):
        assert all(getattr(module, name) is not None for name in module.__all__)


def test_imports_have_no_side_effects():
    """In a fresh interpreter: no thread, no JAX (so no device), no environment variable read."""
    code = """
import os, sys, threading
reads = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key); return super().__getitem__(key)
    def get(self, key, default=None):
        reads.append(key); return super().get(key, default)
os.environ.__class__ = Watched
import sgljax_engine, tunix_sgljax, tunix_sgljax.training
assert threading.active_count() == 1, threading.enumerate()
assert "jax" not in sys.modules and "tunix" not in sys.modules
assert reads == [], reads
assert os.environ["HOME"] and reads == ["HOME"]  # the watch works
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"HOME": str(ROOT)}, timeout=600)
