"""What the benchmarks share: where they ran, how results are written, and the model most use."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgljax_engine import ModelConfig, RopeConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("google-tunix", "jax", "jaxlib", "flax", "numpy", "tunix-sgljax")

SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=1024,
)
"""27 million parameters."""

SMALL_IN_WORDS = "Qwen3 of 8 layers, hidden 512, 8/4 heads of 64, MLP 1536"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and when the runs were made."""

    date: str
    cpu: str
    num_cores: int
    device: str
    python: str
    versions: dict[str, str]


def describe_environment(device: str, more_packages: Sequence[str] = ()) -> Environment:
    """Returns this machine, with the JAX device that a run reported.

    Args:
        device: JAX's name for it.
        more_packages: Whose versions matter beside `PACKAGES`.
    """
    return Environment(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        cpu=cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        device=device,
        python=platform.python_version(),
        versions={name: importlib.metadata.version(name) for name in (*PACKAGES, *more_packages)},
    )


def cpu_model() -> str:
    """Returns the name of the processor, or its architecture where Linux does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def report_head(title: str, command: str, environment: Environment, *facts: str) -> list[str]:
    """The lines that every report in Markdown begins with.

    Args:
        title: Of the report.
        command: The script, with the options that matter.
        environment: Where it ran.
        facts: More list items, on the model and the workload.
    """
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return [
        f"# {title}",
        "",
        f"Made on {environment.date} by `{command}`, which describes what is measured.",
        "",
        f"- Machine: {environment.cpu}, {environment.num_cores} cores; JAX device: "
        f"{environment.device}",
        f"- Python {environment.python}, {versions}",
        *(f"- {fact}" for fact in facts),
        "",
    ]


def write_report(
    output: Path, lines: list[str], environment: Environment, content: dict[str, Any]
) -> None:
    """Writes a report as Markdown, its data as JSON beside it, and prints it."""
    text = "\n".join(lines) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    data = {"environment": dataclasses.asdict(environment), **content}
    output.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"\n{text}\nwrote {output}")
