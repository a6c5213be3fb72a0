"""What may be wrong with an installation, a machine or a model's folder, and the likely fix.

Every check is a function of `Facts` that yields findings; `CHECKS` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tunix_sgljax.cli.doctor_facts import Facts, required_here
from tunix_sgljax.maxtext.requirements import MIN_PYTHON, install_line, missing_wheels

_GB = 1e9
_MIN_AVAILABLE_BYTES = 2e9
_LOW_MEMORY_SHARE = 0.1

_VARIABLES = {
    "JAX_ENABLE_X64": "64-bit numbers by default, as Tunix and this engine do not expect",
    "JAX_DISABLE_JIT": "nothing is compiled: a hundred times slower",
    "JAX_DEBUG_NANS": "every result is checked on the host: slow",
}
_FOLDER_FIXES = {
    "UnsupportedModelError": "take a supported model, or see docs/add_a_model.md",
    "WeightLoadError": "download the folder again: all *.safetensors files and their index",
}


class Finding(NamedTuple):
    """What a check found: a "problem" if something does not work, else a "note"; and a fix."""

    level: Literal["problem", "note"]
    message: str
    fix: str


Findings = Iterator[Finding]
_problem = functools.partial(Finding, "problem")
_note = functools.partial(Finding, "note")


def check_requirements(facts: Facts) -> Findings:
    for requirement in required_here(facts.requirements):
        version = facts.versions.get(requirement.name)
        wanted = str(requirement.specifier) or "any version"
        fix = f'pip install "{requirement.name}{requirement.specifier}"'
        if version is None:
            yield _problem(f"{requirement.name} ({wanted}) is not installed", fix)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield _problem(f"{requirement.name} {version} is not {wanted}", fix)


def check_jax_starts(facts: Facts) -> Findings:
    if facts.jax_problem is not None and not facts.is_pathways:
        wanted = facts.variables.get("JAX_PLATFORMS")
        fix = "see https://docs.jax.dev/en/latest/installation.html"
        if wanted is not None:
            fix = f"unset JAX_PLATFORMS (it is {wanted!r}), or install JAX for that platform"
        yield _problem(f"JAX does not start: {facts.jax_problem}", fix)


def check_pathways(facts: Facts) -> Findings:
    if not facts.is_pathways:
        return
    if "pathwaysutils" not in facts.versions:
        yield _problem(
            "JAX_PLATFORMS asks for Pathways, and pathwaysutils, which makes its proxy known to "
            "JAX, is not installed",
            "pip install pathwaysutils; a program of your own must call pathwaysutils.initialize() "
            "before anything touches JAX (commands of tunix-sgljax call it)",
        )
    elif facts.jax_problem is not None:
        target = facts.variables.get("JAX_BACKEND_TARGET")
        is_named = "is not set" if target is None else f"is {target!r}"
        yield _problem(
            f"Pathways' proxy gives no devices: {facts.jax_problem}",
            f"JAX_BACKEND_TARGET {is_named}; it must name the proxy, as in grpc://127.0.0.1:29000",
        )
    elif all(device.bytes_limit is None for device in facts.devices):
        yield _note(
            "the devices do not say how much memory is free, so the KV cache gets "
            "max_running_requests x max_model_len tokens whether they fit or not",
            "set num_kv_tokens, or max_running_requests and max_model_len, to what fits; "
            "mem_fraction_static has no effect",
        )


def check_maxtext(facts: Facts) -> Findings:
    if "maxtext" not in facts.versions:
        return
    if tuple(map(int, facts.python.split(".")[:2])) < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        yield _problem(
            f"maxtext is installed and needs Python {wanted} or newer, and this is {facts.python}",
            f"install both into an environment of Python {wanted} (docs/maxtext.md)",
        )
    missing = missing_wheels(facts.versions)
    if missing:
        names = ", ".join(wheel.name for wheel in missing)
        yield _problem(
            f"maxtext is installed, and its RL trainer needs what is not: {names}",
            install_line(missing),
        )


def check_accelerator_is_used(facts: Facts) -> Findings:
    platforms = {device.platform for device in facts.devices}
    used = {{"cuda": "gpu", "rocm": "gpu"}.get(name, name) for name in platforms}
    for kind in sorted(facts.accelerators - used) if facts.jax_problem is None else ():
        name, extra = {"gpu": ("an NVIDIA GPU", "cuda13"), "tpu": ("a TPU", "tpu")}[kind]
        wanted = facts.variables.get("JAX_PLATFORMS")
        fix = f'pip install --upgrade "jax[{extra}]"'
        if wanted is not None:
            fix = f"unset JAX_PLATFORMS (it is {wanted!r})"
        elif kind == "gpu" and facts.variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            fix = "unset CUDA_VISIBLE_DEVICES, which hides all GPUs"
        yield _problem(f"the machine has {name}, but JAX uses {sorted(platforms)}", fix)


def check_variables(facts: Facts) -> Findings:
    """No environment variable changes results or speed by surprise."""
    given = facts.variables
    flags = given.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags:
        yield _note(
            "XLA_FLAGS splits the host's cores into several devices, for tests of meshes",
            "take --xla_force_host_platform_device_count out of XLA_FLAGS to use all cores as one",
        )
    if "xla_dump_to" in flags:
        yield _note("XLA_FLAGS dumps every program", "take --xla_dump_to out: it is slow")
    for name, meaning in _VARIABLES.items():
        if given.get(name, "").lower() in ("1", "true", "yes", "on"):
            yield _note(f"{name} is set: {meaning}", f"unset {name}")
    if given.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        yield _note(
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform allocates each array by itself: slow",
            "unset XLA_PYTHON_CLIENT_ALLOCATOR",
        )


def check_cache(facts: Facts) -> Findings:
    if facts.cache is not None and not facts.cache.is_writable:
        yield _problem(
            f"the compilation cache {facts.cache.path} cannot be written: every start compiles "
            "all programs anew",
            "make it writable, or name another folder: compilation_cache_dir=FOLDER, or "
            "JAX_COMPILATION_CACHE_DIR",
        )


def check_host(facts: Facts) -> Findings:
    available = facts.available_bytes
    if available is not None and available < _MIN_AVAILABLE_BYTES:
        yield _note(
            f"only {available / _GB:.1f} GB of the host's memory are available",
            "end other programs: loading a model needs room for its weights on the host",
        )
    for i, device in enumerate(facts.devices):
        limit, used = device.bytes_limit, device.bytes_in_use
        if limit and used is not None and limit - used < _LOW_MEMORY_SHARE * limit:
            free = f"{(limit - used) / _GB:.1f} of {limit / _GB:.1f} GB free"
            fix = "end the other program that uses it (nvidia-smi lists them)"
            yield _note(f"device {i} ({device.kind}) has {free}", fix)


def check_model(facts: Facts) -> Findings:
    model, preview = facts.model, facts.preview
    if model is not None and model.problem is not None:
        other = "compare config.json with the original"
        fix = _FOLDER_FIXES.get(model.problem_kind or "", other)
        yield _problem(f"{model.path}: {model.problem}", fix)
    if facts.preview_problem is not None:
        yield _problem(facts.preview_problem, "change that --engine option")
    elif preview is not None and preview.problem is not None and not facts.is_example:
        yield _problem(
            f"the model does not fit: {preview.problem}",
            "free memory, take a smaller dtype (--engine dtype=bfloat16), fewer requests "
            "(--engine max_running_requests=16), a shorter max_model_len, or shard over several "
            "devices with a mesh axis 'tp'",
        )


def check_dtype(facts: Facts) -> Findings:
    preview = facts.preview
    if preview is not None and preview.platform == "cpu" and preview.dtype != "float32":
        fix = "--engine dtype=float32, if memory allows"
        yield _note(f"{preview.dtype} is slow on CPUs without hardware for it", fix)


def check_tokenizer(facts: Facts) -> Findings:
    model = facts.model
    if model is None or model.problem is not None:
        return
    if not model.has_tokenizer:
        yield _problem(
            f"{model.path} has no tokenizer: only token ids can be completed",
            "copy tokenizer.json and tokenizer_config.json from the original model",
        )
        return
    if model.tokenizer_problem is not None:
        yield _problem(
            f"the tokenizer cannot be loaded: {model.tokenizer_problem}",
            "copy the tokenizer's files from the original model again",
        )
        return
    if model.tokenizer_size > model.vocab_size:
        yield _problem(
            f"the tokenizer has {model.tokenizer_size} tokens, the model {model.vocab_size}",
            "use the tokenizer that the model was trained with",
        )
    if model.pad_id is None or model.pad_id in model.eos_ids:
        what = "none" if model.pad_id is None else f"{model.pad_id}, an end token"
        yield _note(
            f"the pad token is {what}: Tunix masks all pad tokens, so end tokens are not learned",
            "give the tokenizer a pad token of its own before training",
        )
    if not model.eos_ids:
        yield _note(
            "no end token is known: every completion runs to max_new_tokens",
            'set "eos_token_id" in generation_config.json',
        )
    if not model.has_chat_template:
        yield _note(
            "there is no chat template: --chat and messages are refused",
            "copy chat_template.jinja from the instruct model, if this is one",
        )


def check_tokenizer_files(facts: Facts) -> Findings:
    for folder in facts.tokenizers:
        if folder.problem is not None:
            yield _problem(
                f"the tokenizer cannot be loaded: {folder.problem}",
                "copy the tokenizer's files from the original model again",
            )
        if folder.difference is not None:
            yield _note(
                f"transformers reads this tokenizer wrongly, and the engine as it should: "
                f"{folder.difference}",
                "give a rollout sgljax_engine.load_hf_tokenizer(folder), not AutoTokenizer's; "
                "newer releases of transformers read more tokenizers right",
            )


CHECKS: tuple[Callable[[Facts], Findings], ...] = (
    check_requirements,
    check_jax_starts,
    check_pathways,
    check_maxtext,
    check_accelerator_is_used,
    check_variables,
    check_cache,
    check_host,
    check_model,
    check_dtype,
    check_tokenizer,
    check_tokenizer_files,
)


def find_all(facts: Facts) -> list[Finding]:
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: finding.level != "problem")
