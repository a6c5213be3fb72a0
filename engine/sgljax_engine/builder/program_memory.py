"""Device memory of programs beside their arguments, as their compiler reports it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from sgljax_engine.builder.compilation_cache import compilation_cache_path
from sgljax_engine.runner.compile.program_fit import ProgramDoesNotFit, ProgramMemory
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.warmup import largest, warm_calls

logger = logging.getLogger(__name__)

_NAMES = "decode", "prefill"
"""Programs whose largest are asked for; the others take less."""


def program_bytes(
    runner: ModelRunner, facts: Mapping[str, Any], cache_folder: str | None
) -> int | None:
    """Bytes of one device that the program which needs most takes beside its arguments.

    Compiles the largest decode and prefill programs. The number is kept beside the compiled
    programs, so that the next engine of the same configuration need not. It depends on `facts`, of
    JSON's types. None if a program does not fit, whatever the KV cache is.
    """
    path = _path(facts, cache_folder)
    if path is not None and path.exists():
        return json.loads(path.read_text())["program_bytes"]
    calls = largest(warm_calls(runner, has_shared=True))
    state = runner.kv_memory.state(runner.weights)
    try:
        needed = max(
            ProgramMemory.of(runner.programs.compile_alone(call, state)).extra_bytes
            for call in calls
            if call.name in _NAMES
        )
    except ProgramDoesNotFit:
        return None
    logger.info("the largest programs take %d bytes of a device beside weights and KV", needed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"program_bytes": needed, "facts": facts}, default=str))
        partial.replace(path)
    return needed


def _path(facts: Mapping[str, Any], cache_folder: str | None) -> Path | None:
    folder = compilation_cache_path(cache_folder)
    if folder is None:
        return None
    known = {**facts, "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
    return folder / f"sgljax-program-bytes-{digest[:32]}.json"
