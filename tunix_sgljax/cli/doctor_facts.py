"""Facts for `doctor`. Only gathering them touches the machine; checks use the result."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement

from tunix_sgljax.cli import pathways
from tunix_sgljax.maxtext.requirements import WHEELS

if TYPE_CHECKING:
    from sgljax_engine import EngineConfig, EnginePreview, ModelConfig

DISTRIBUTION = "tunix-sgljax"

PACKAGES = (
    *("tunix-sgljax", "google-tunix", "jax", "jaxlib", "flax", "numpy", "optax"),
    *("orbax-checkpoint", "qwix", "safetensors", "tokenizers", "transformers"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "pathwaysutils", "torch"),
    *("maxtext", "vllm", "tpu-inference"),
)
"""Packages shown if installed."""

VARIABLES = (
    *("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS", "LIBTPU_INIT_ARGS"),
    *("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    *("XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICES"),
    *("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"),
    *("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "OMP_NUM_THREADS"),
)
"""Environment variables that change what JAX does."""

_GOOGLE = "0x1ae0"
_TPU_DEVICES = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
"""PCI ids of TPUs v2 to 7x, from JAX; Google's network cards have the same vendor id."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A JAX device; memory in bytes, None if unknown. `runtime` is JAX's name of its runtime."""

    platform: str
    kind: str
    runtime: str = ""
    bytes_limit: int | None = None
    bytes_in_use: int | None = None


class Cache(NamedTuple):
    """The compilation cache's folder."""

    path: str
    num_files: int
    num_bytes: int
    is_writable: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Facts about a model's folder.

    `problem` is why the engine would refuse it. `eos_ids` are the tokenizer's and the config's;
    `vocab_size` is the model's, 0 if its config.json is refused.
    """

    path: str
    problem: str | None = None
    problem_kind: str | None = None
    has_tokenizer: bool = False
    tokenizer_problem: str | None = None
    has_chat_template: bool = False
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    tokenizer_size: int = 0


class TokenizerFolder(NamedTuple):
    """A tokenizer's folder.

    `problem` is why it cannot be loaded, `difference` where transformers alone reads it otherwise
    than its tokenizer.json says.
    """

    path: str
    problem: str | None = None
    difference: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Input of all checks.

    `accelerators` are kinds that the machine has, whether JAX uses them or not. `preview` is what
    an engine would use; None if it would not start. If `is_example` it is for Qwen3-0.6B's shape
    instead of a user's model.
    """

    python: str
    system: str
    versions: Mapping[str, str]
    requirements: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    jax_problem: str | None = None
    accelerators: frozenset[str] = frozenset()
    num_cores: int = 1
    memory_bytes: int | None = None
    available_bytes: int | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cache: Cache | None = None
    preview: EnginePreview | None = None
    preview_problem: str | None = None
    is_example: bool = True
    model: Model | None = None
    tokenizers: tuple[TokenizerFolder, ...] = ()

    @property
    def is_pathways(self) -> bool:
        """Whether JAX reaches devices through Pathways' proxy, or is asked to."""
        runtimes = [device.runtime for device in self.devices]
        return pathways.is_asked_for(self.variables) or any(
            name.startswith("proxy") or "pathways" in name for name in runtimes
        )


def gather(folder: Path | None, config: EngineConfig) -> Facts:
    requirements = tuple(importlib.metadata.requires(DISTRIBUTION) or ())
    total, available = host_memory()
    facts = Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions=installed_versions(requirements),
        requirements=requirements,
        accelerators=find_accelerators(),
        num_cores=num_cores(),
        memory_bytes=total,
        available_bytes=available,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        is_example=folder is None,
    )
    try:
        pathways.initialize()
        import jax

        devices = tuple(map(_describe, jax.devices()))
    except Exception as error:  # whatever JAX, a plugin or a driver raises
        return dataclasses.replace(facts, jax_problem=f"{type(error).__name__}: {error}")
    model = None if folder is None else look_at_model(folder)
    facts = dataclasses.replace(facts, devices=devices, model=model)
    # A folder whose config.json alone is there can be planned for.
    if model is not None and not model.vocab_size:
        return facts
    from sgljax_engine import load_model_config, preview_engine

    shape = example_model() if folder is None else load_model_config(folder)
    try:
        preview = preview_engine(shape, folder=folder, config=config)
    except ValueError as error:
        return dataclasses.replace(facts, preview_problem=str(error))
    path = preview.compilation_cache
    cache = None if path is None else look_at_cache(path)
    return dataclasses.replace(facts, preview=preview, cache=cache)


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def example_model() -> ModelConfig:
    """Qwen3-0.6B's shape, of which the preview is without a user's model."""
    from sgljax_engine import ModelConfig, RopeConfig

    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(theta=1e6),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        context_length=1024,
    )


def required_here(lines: Sequence[str]) -> Iterator[Requirement]:
    """Requirements from a distribution's metadata, without those of extras and other systems."""
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def installed_versions(requirements: Sequence[str]) -> dict[str, str]:
    """Installed versions of `PACKAGES`, required packages, and what MaxText's trainer needs."""
    wanted = {requirement.name for requirement in required_here(requirements)}
    wanted |= {wheel.name for wheel in WHEELS}
    versions = {}
    for name in (*PACKAGES, *sorted(wanted.difference(PACKAGES))):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _describe(device: Any) -> Device:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # not implemented on this platform
        stats = {}
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        runtime=str(getattr(device.client, "runtime_type", "")),
        bytes_limit=stats.get("bytes_limit"),
        bytes_in_use=stats.get("bytes_in_use"),
    )


def find_accelerators(root: Path = Path("/")) -> frozenset[str]:
    """Kinds of accelerators: "gpu" for NVIDIA's, "tpu"; found by their device files."""
    found = set()
    if (root / "dev/nvidiactl").exists() or (root / "proc/driver/nvidia/version").exists():
        found.add("gpu")
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            ids = [path.read_text().strip() for path in (vendor, vendor.with_name("device"))]
        except OSError:
            continue
        if ids[0] == _GOOGLE and ids[1] in _TPU_DEVICES:
            found.add("tpu")
    return frozenset(found)


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """Total and available bytes of the host's memory; None if unknown."""
    if not meminfo.exists():
        return None, None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return total * 1024, available * 1024


def look_at_cache(path: Path) -> Cache:
    """The folder, which need not exist yet."""
    sizes = [entry.stat().st_size for entry in path.rglob("*") if entry.is_file()]
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            is_writable = True
    except OSError:
        is_writable = False
    return Cache(str(path), len(sizes), sum(sizes), is_writable)


def look_at_model(folder: Path) -> Model:
    from sgljax_engine import (
        EngineError,
        InvalidConfigError,
        load_hf_tokenizer,
        load_model_config,
        read_hf_tensors,
    )

    known: dict[str, Any] = {"path": str(folder)}
    try:
        config = load_model_config(folder)
        known |= {"vocab_size": config.vocab_size, "eos_ids": config.eos_token_ids}
        read_hf_tensors(folder)
    except EngineError as error:
        return Model(**known, problem=str(error), problem_kind=type(error).__name__)
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return Model(**known)
    known["has_tokenizer"] = True
    try:
        tokenizer = load_hf_tokenizer(folder)
    except InvalidConfigError as error:
        return Model(**known, tokenizer_problem=str(error))
    eos = {*config.eos_token_ids} | {tokenizer.eos_token_id} - {None}
    known |= {"eos_ids": tuple(sorted(eos)), "tokenizer_size": len(tokenizer)}
    has_template = tokenizer.chat_template is not None
    return Model(**known, has_chat_template=has_template, pad_id=tokenizer.pad_token_id)


def look_at_tokenizer(folder: Path) -> TokenizerFolder:
    from sgljax_engine import InvalidConfigError, load_hf_tokenizer

    try:
        load_hf_tokenizer(folder)
    except InvalidConfigError as error:
        return TokenizerFolder(str(folder), problem=str(error))
    return compare_tokenizer(folder)


def compare_tokenizer(folder: Path) -> TokenizerFolder:
    """Compares a tokenizer that loads with what transformers alone makes of its folder."""
    from transformers import AutoTokenizer

    from sgljax_engine import find_tokenizer_difference

    path = str(folder)
    try:
        difference = find_tokenizer_difference(AutoTokenizer.from_pretrained(path))
    except Exception as error:  # whatever transformers raises for a file
        difference = f"AutoTokenizer raises {type(error).__name__}: {error}"
    return TokenizerFolder(path, difference=difference)
