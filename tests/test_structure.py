"""The walls of the house: dependency direction, exported names, imports without side effects."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests import geometry

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PACKAGES = {
    "sgljax_engine": ROOT / "engine" / "sgljax_engine",
    "sgljax_cpu": ROOT / "engine" / "sgljax_cpu",
    "tunix_sgljax": ROOT / "tunix_sgljax",
}

SHEDS = ("benchmarks", "examples", "tests", "tools")
"""What a checkout has beside its packages."""

# The engine's parts, from the bottom up: each imports only itself and rows above its own.
LAYERS = (
    ("errors", "kernels"),
    ("checks", "foreign_options"),
    ("structured_outputs",),
    ("io_struct", "layers", "sampling_params"),
    ("config", "model_config", "observability", "sampling", "speculation", "weights"),
    ("types",),
    ("cache", "checkpoint", "outputs"),
    ("attention", "processing", "scheduler"),
    ("models",),
    ("placement",),
    ("runner",),
    ("core",),
    ("builder",),
    ("preview",),
    ("aio",),
    ("engine",),
    ("",),
    ("fleet",),
    ("replies",),
    ("server",),
)
"""The one without a name is the package root."""

# Parts that run without JAX.
HOST_ONLY = (
    "errors",
    "checks",
    "foreign_options",
    "io_struct",
    "sampling_params",
    "config",
    "model_config",
    "observability",
    "sampling.guide",
    "sampling.token_counts",
    "types",
    "checkpoint",
    "outputs",
    "cache.allocator",
    "cache.pool",
    "cache.radix",
    "cache.states",
    "processing",
    "scheduler",
    "speculation",
    "weights.hf_json",
    "core.hand_out",
    "core.calls",
    "core.stats",
    "fleet.changes",
    "fleet.deltas",
    "fleet.files",
    "fleet.manifest",
    "fleet.reader",
    "fleet.versions",
    "fleet.writer",
)

MAX_TOP_LEVEL = {"sgljax_engine": 14, "sgljax_cpu": 32, "tunix_sgljax": 10}
"""Modules beside the folders, `__init__` included."""


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


def edges(package: str) -> dict[str, set[str]]:
    """What each module imports, for the whole package or wherever in the file."""
    found = modules(package)
    graph: dict[str, set[str]] = {}
    for name, path in found.items():
        inner = {
            imported.removeprefix(package).removeprefix(".")
            for imported in imports(path)
            if is_within(imported, package)
        }
        # `from module import name` names the module, or a module that is called so.
        graph[name] = {each if each in found else each.rpartition(".")[0] for each in inner}
    return graph


def test_engine_imports_go_one_way():
    rank = {part: row for row, parts in enumerate(LAYERS) for part in parts}
    graph = edges("sgljax_engine")
    assert {name.split(".")[0] for name in graph} == rank.keys()
    for name, imported in graph.items():
        part = name.split(".")[0]
        others = {each.split(".")[0] for each in imported} - {part}
        if name == "engine":  # names the server's types; `Engine.serve` imports it late
            others.discard("server")
        for other in others:
            assert rank[other] < rank[part], f"{name or 'the root'} must not import {other}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_circles(package):
    graph = {name: set(imported) - {name} for name, imported in edges(package).items()}
    graph.pop("")  # the root names what it exports, late
    while True:
        leaves = {name for name, imported in graph.items() if not imported & graph.keys()}
        if not leaves:
            break
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert not graph, f"in or behind a circle: {sorted(graph)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_top_level_is_small(package):
    files = sorted(path.name for path in PACKAGES[package].glob("*.py"))
    assert len(files) <= MAX_TOP_LEVEL[package], files


def test_the_server_is_small():
    folder = PACKAGES["sgljax_engine"] / "server"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    assert len(files) <= 18, files


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


def test_the_trunk_imports_no_shed():
    for package in PACKAGES:
        for name, path in modules(package).items():
            for imported in imports(path):
                assert imported.split(".")[0] not in SHEDS, f"{package}.{name} imports {imported}"


def test_the_cpu_kernels_have_one_door():
    """They import nothing of the engine, which uses what the package exports."""
    public = {f"sgljax_cpu.{name}" for name in importlib.import_module("sgljax_cpu").__all__}
    for name, path in modules("sgljax_cpu").items():
        assert not [each for each in imports(path) if is_within(each, "sgljax_engine")], name
    for package in ("sgljax_engine", "tunix_sgljax"):
        for name, path in modules(package).items():
            found = {each for each in imports(path) if is_within(each, "sgljax_cpu")}
            assert found <= public | {"sgljax_cpu"}, f"{package}.{name}"


def test_adapter_uses_the_engines_public_names_only():
    public = set(importlib.import_module("sgljax_engine").__all__)
    for part in ("server", "fleet"):
        module = importlib.import_module(f"sgljax_engine.{part}")
        public |= {f"{part}.{name}" for name in module.__all__}
    for name, path in modules("tunix_sgljax").items():
        for imported in imports(path):
            if is_within(imported, "sgljax_engine"):
                inner = imported.removeprefix("sgljax_engine.")
                assert inner in public, f"tunix_sgljax.{name} imports {imported}"


def test_tests_reach_into_an_engine_through_one_module():
    """Else each move of its parts would break tests that do not care where they are."""
    own = {TESTS / "inside.py", Path(__file__)}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(set(TESTS.rglob("*.py")) - own)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\w\)?\._group\b|\bengine\._(calls|make_requests)\b", line)
    ]
    assert found == [], "tests/inside.py knows the way"


def test_no_environment_reads_below_the_command_line():
    for package in PACKAGES:
        for name, path in modules(package).items():
            if package == "tunix_sgljax" and is_within(name, "cli"):
                continue
            text = path.read_text(encoding="utf-8")
            # Whole words: Tunix's agents act in environments.
            assert not re.search(r"\b(environ|getenv)\b", text), f"{package}.{name}"


EXPORTED = {
    "sgljax_engine": """
FOREIGN_FIELDS FOREIGN_OPTIONS MAX_TOP_LOGPROBS AbortReq AttentionConfig CacheConfig
CheckpointError CheckpointManager CompileForbiddenError ContinueGenerationReqInput Engine
EngineCheckpoint EngineConfig EngineCounters EngineError EnginePreview EngineProgress
EngineShutdownError EngineState EngineStateError EngineStepError FinishReason FlushCacheReqInput
FlushCacheReqOutput ForeignField ForeignOption HfTensor HomeProcess InvalidConfigError
InvalidRequestError KVShape LatentConfig LinearAttentionConfig Llama3Scaling LoraConfig LoraRule
MemoryReport
MoEConfig ModelConfig NonFiniteLogitsError OffloadError ParallelConfig PauseGenerationReqInput
ProgressListener RecordedEvent RecordedSample Recording RequestCheckpoint RequestOutput RopeConfig
RouterConfig Rule RuntimeConfig SamplingParams ScaleConfig SchedulerCheckpoint SchedulerConfig
SpeculationConfig StagedWeights StructuredOutputError UnsupportedModelError WeightFiles
WeightLoadError WeightRule WeightStoreError WeightSyncError WeightsLostError YarnScaling
check_model_folder derive_seed find_tokenizer_difference find_weight_files flatten_named
foreign_fields hf_rules
load_hf_tokenizer load_model_config
localize logical_rules model_config_from_hf preview_engine read_hf_tensors read_safetensors
to_hf_tensors write_hf_tensors
""",
    "sgljax_engine.fleet": """
FleetConfig FleetError ReadVersion RemoteEngine VersionReader VersionWriter WrittenVersion
""",
    "tunix_sgljax": """
AgenticGrpoLearner GrpoLearner MismatchReport OverSampling OverSamplingAgenticGrpoLearner
OverSamplingGrpoLearner PpoLearner Progress RLCluster SglJaxFleetRollout SglJaxRollout Timeline
VersionedRolloutOutput create_sgljax_rollout log_rollout_metrics mismatch_report record_timeline
""",
    "tunix_sgljax.training": """
RunResult TrainConfig evaluate load_config prepare run to_yaml
""",
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_names(name):
    module = importlib.import_module(name)
    assert module.__all__ == EXPORTED[name].split()
    assert all(getattr(module, each) is not None for each in module.__all__)


def test_exported_names_have_docstrings():
    """And the public members of classes: docs/reference is made of them."""
    missing = []
    adapter = ("tunix_sgljax", "tunix_sgljax.training")
    for package in ("sgljax_engine", "sgljax_engine.fleet", "sgljax_engine.server", *adapter):
        module = importlib.import_module(package)
        for name in module.__all__:
            each = getattr(module, name)
            if not (inspect.isclass(each) or inspect.isfunction(each)):
                continue
            members = {name: each}
            if inspect.isclass(each):
                members |= {f"{name}.{key}": value for key, value in public_members(each).items()}
            missing += [
                f"{package}.{key}"
                for key, value in members.items()
                # Python makes up docstrings of data types: "Name(field, ...)".
                if not value.__doc__ or value.__doc__.startswith(f"{name}(")
            ]
    assert missing == []


def public_members(owner: type) -> dict[str, Any]:
    """Methods and properties that a class itself has."""
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("_") and isinstance(value, kinds)
    }


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


MAKE_ENGINES = (
    "Engine",
    "SglJaxRollout",
    "create_sgljax_rollout",
    "make",
    "make_engine",
    "make_rollout",
    "matching",
    "new_engine",
    "new_rollout",
    "words",
)
"""What tests call to make one, by the last part of its name."""

MAX_OTHER_GEOMETRIES = 16
NO_ENGINE = "# no engine"


def test_other_geometries_are_few_and_have_reasons():
    """Compiling is what tests cost: see tests/geometry.py.

    A line that makes no engine, such as options that are refused, ends in `# no engine`, or has a
    comment above it that begins so.
    """
    others, unnamed = [], []
    for path in sorted(TESTS.rglob("*.py")):
        if path == TESTS / "geometry.py" or path.is_relative_to(TESTS / "aot"):
            continue  # the latter compile for other chips, whole engines as users have them
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in (*geometry.NAMES, "other(")):
            continue
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and called(node) == "other":
                others.append(where)
            elif names := geometry_options(node):
                above, line = lines[node.lineno - 2 : node.lineno]  # type: ignore[attr-defined]
                if NO_ENGINE not in line and not above.lstrip().startswith(NO_ENGINE):
                    unnamed.append(f"{where}: {', '.join(names)}")
    assert unnamed == [], "take SMALL, CHUNKED or WIDE of tests/geometry.py, or `other(reason)`"
    assert len(others) <= MAX_OTHER_GEOMETRIES, others


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def geometry_options(node: ast.AST) -> list[str]:
    """Geometry options that a dictionary gets, or a call that makes an engine or a dictionary."""
    if isinstance(node, ast.Call) and called(node) in (*MAKE_ENGINES, "dict"):
        return [each.arg for each in node.keywords if each.arg in geometry.NAMES]
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        return [str(key) for key in keys if key in geometry.NAMES]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return [str(key)] if key in geometry.NAMES else []
    return []
