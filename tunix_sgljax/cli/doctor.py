"""`tunix-sgljax doctor`: what is installed, what will be used, and what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgljax_engine import InvalidConfigError
from tunix_sgljax.cli.engine_options import add_engine_options, engine_config, model_folder
from tunix_sgljax.cli.output import emit

if TYPE_CHECKING:
    from tunix_sgljax.cli.doctor_checks import Finding
    from tunix_sgljax.cli.doctor_facts import Facts

SUMMARY = "Say what is installed, what will be used, and what is wrong."

EXAMPLES = """examples:
  tunix-sgljax doctor
  tunix-sgljax doctor --model path/to/Qwen3-0.6B --engine dtype=bfloat16
  tunix-sgljax doctor --tokenizer path/to/DeepSeek-R1-Distill-Llama-8B

The exit code is 1 if there is a problem. No weight is loaded, and nothing is compiled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="look at this Hugging Face folder too")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="say whether transformers reads this folder's tokenizer as its tokenizer.json says "
        "(asked of --model too)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the report; returns 1 if there is a problem."""
    from tunix_sgljax.cli.doctor_checks import find_all
    from tunix_sgljax.cli.doctor_facts import (
        compare_tokenizer,
        gather,
        look_at_tokenizer,
    )

    folder = None if args.model is None else model_folder(args.model)
    facts = gather(folder, engine_config(args))
    tokenizers = []
    if args.tokenizer is not None:
        tokenizers.append(look_at_tokenizer(_tokenizer_folder(args.tokenizer)))
    if folder is not None and facts.model is not None and facts.model.tokenizer_size:  # it loads
        tokenizers.append(compare_tokenizer(folder))
    facts = dataclasses.replace(facts, tokenizers=tuple(tokenizers))
    findings = find_all(facts)
    emit("\n".join([*describe(facts), "", *list_findings(findings)]))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _tokenizer_folder(path: str) -> Path:
    if not Path(path).is_dir():
        raise InvalidConfigError(f"--tokenizer must be a folder, got {path!r}")
    return Path(path)


def describe(facts: Facts) -> list[str]:
    lines = ["Versions", f"  python {facts.python}, {facts.system}"]
    lines += [f"  {name} {version}" for name, version in facts.versions.items()]
    memory = "unknown"
    if facts.memory_bytes is not None and facts.available_bytes is not None:
        memory = f"{_gb(facts.available_bytes)} of {_gb(facts.memory_bytes)} available"
    lines += ["", "Machine", f"  {facts.num_cores} core(s), host memory: {memory}"]
    for device in facts.devices:
        lines.append(f"  {device.platform} device: {device.kind}{_memory_of(device)}")
    lines += [f"  {name}={value}" for name, value in facts.variables.items()]
    if facts.cache is not None:
        cache = facts.cache
        lines.append(
            f"  compilation cache: {cache.path} ({cache.num_files} files, "
            f"{cache.num_bytes / 1e6:.1f} MB{'' if cache.is_writable else ', not writable'})"
        )
    return lines + _describe_maxtext(facts) + _describe_pathways(facts) + _describe_preview(facts)


def _describe_maxtext(facts: Facts) -> list[str]:
    if "maxtext" not in facts.versions:
        return []
    has_vllm = {"vllm", "tpu-inference"} <= facts.versions.keys()
    return [
        "",
        f"MaxText {facts.versions['maxtext']}: tunix-sgljax maxtext rl runs its trainer with this "
        "engine",
        f"  vLLM for TPUs: {'installed, and left alone' if has_vllm else 'not installed'}",
    ]


def _describe_pathways(facts: Facts) -> list[str]:
    if not facts.is_pathways:
        return []
    target = facts.variables.get("JAX_BACKEND_TARGET", "not set")
    runtimes = sorted({device.runtime for device in facts.devices}) or ["none"]
    return [
        "",
        "Pathways: this one process controls the devices of all hosts",
        f"  proxy (JAX_BACKEND_TARGET): {target}; runtime: {', '.join(runtimes)}",
        "  pathwaysutils.initialize() comes before anything touches JAX, as in this command",
        "  not there: JIT-compiled CPU kernels, and JAX's compilation cache",
        "  not tried: Pathways itself, and TPUs behind it; only a stand-in on CPUs",
    ]


def _describe_preview(facts: Facts) -> list[str]:
    preview, model = facts.preview, facts.model
    if preview is None:
        return []
    of = "a model of Qwen3-0.6B's shape" if model is None else model.path
    lines = [
        "",
        f"An engine for {of} would use",
        f"  {preview.platform} ({preview.device_kind}), {preview.dtype}",
        f"  attention: {preview.attention}; projections: {preview.linear}",
        f"  weights: {preview.num_parameters / 1e6:.1f} million, {_gb(preview.weights_bytes)}",
    ]
    if preview.why_not_native is not None:
        lines.append(f"  not native, since {preview.why_not_native}")
    memory = preview.memory
    if memory is not None:
        lines += [
            f"  KV cache: {_gb(memory.kv_bytes)} for {memory.kv_tokens} tokens, as {memory.rule} "
            "says",
            f"  max_model_len: {preview.max_model_len} tokens",
        ]
        if memory.state_slots:
            of_states = f"{_gb(memory.state_bytes)}, {memory.state_slots} of them"
            lines.append(f"  recurrent states, with copies of rows for decode: {of_states}")
    elif preview.problem is not None:
        lines.append(f"  but it does not fit: {preview.problem}")
    return lines


def list_findings(findings: list[Finding]) -> list[str]:
    if not findings:
        return ["No problems found."]
    lines = []
    for finding in findings:
        lines += [f"{finding.level}: {finding.message}", f"  fix: {finding.fix}"]
    return lines


def _memory_of(device: Any) -> str:
    if device.bytes_limit is None:
        return ""
    return f", {_gb(device.bytes_in_use or 0)} of {_gb(device.bytes_limit)} in use"


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
