"""The programs of a whole rollout for a TPU host of 8 chips that is not here, with their bytes.

    python benchmarks/hardware/tpu_rollout.py    # needs libtpu; 8 chips of v5e, as Kaggle has them

The run is a config of `train`: its model, mesh and engine options. Compiled by libtpu, and not run:
decode, prefill and copies of pages for the largest batch, and the weight sync from the trainer's
shards to the engines'. The engines of a group have the same programs, so those of the first are
compiled. Beside the rollout a chip holds what the trainer keeps between its steps, by the estimate
of `tunix-sgljax train --dry-run`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
from flax import nnx

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.compile.program_fit import ProgramMemory
from sgljax_engine.weights.plan import plan_sync
from sgljax_engine.weights.specs import source_spec
from tools.aot import compile_programs
from tools.aot.target import Target, add_target_options, find_target
from tunix_sgljax.mappings import WeightMapper, find_mapping
from tunix_sgljax.training.cluster import make_optimizers
from tunix_sgljax.training.loading import load_config
from tunix_sgljax.training.memory import estimate_memory
from tunix_sgljax.training.models import find_model
from tunix_sgljax.training.schema import TrainConfig

TOPOLOGY = "v5e:2x4"
DTYPE = "bfloat16"
CONFIG = "configs/llama3p2_3b_tpu_host.yaml"
GIVEN = (
    "actor_model_config.model_path=null",
    "tokenizer_config.tokenizer_path=unset",
    "task.dataset=unset",
)
"""What the config leaves to the command line; no shape needs it."""


def trainer_params(config: TrainConfig, mesh: jax.sharding.Mesh) -> nnx.State:
    """The policy's parameters as shapes with the trainer's shardings."""
    state = nnx.state(find_model(config.actor_model_config).abstract(), nnx.Param)
    shardings = nnx.get_named_sharding(state, mesh)
    dtype = config.actor_model_config.dtype

    def shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)

    return jax.tree.map(shape, state, shardings)


def compile_sync(target: Target, config: TrainConfig) -> ProgramMemory:
    """Compiles the one program that makes all engines' weights from the trainer's shards."""
    abstract = find_model(config.actor_model_config).abstract()
    mapper = WeightMapper(find_mapping(None, abstract), target.model)
    mesh = jax.sharding.Mesh(target.mesh.devices, config.actor_model_config.mesh.axis_names)
    source = mapper.named_source(trainer_params(config, mesh))
    group = place(target.model, target.mesh, DTYPE, target.config.parallel, target.config.runtime)
    targets = group.whole.weight_targets(
        get_model(target.model.architecture).param_specs(target.model)
    )
    plan = plan_sync(source_spec(source), mapper.rules_for(source), targets)
    assert plan.program.devices == tuple(mesh.devices.flat)
    run: Any = plan.program.at_target
    return ProgramMemory.of(run.lower(plan.arrays(source)).compile())


def render(rows: list[dict[str, Any]], total: dict[str, float]) -> list[str]:
    """The tables."""
    lines = ["| program | arguments | temporaries | peak |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | "
        + " | ".join(
            f"{row[key] / 1e9:.2f} GB" for key in ("argument_bytes", "temp_bytes", "peak_bytes")
        )
        + " |"
        for row in rows
    ]
    lines += ["", "| of a chip | |", "|---|---:|"]
    lines += [f"| {name} | {size:.2f} GB |" for name, size in total.items()]
    return lines


def _tell(name: str, size: int) -> None:
    sys.stderr.write(f"compiling {name} of {size}\n")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    options = argparse.ArgumentParser()
    add_target_options(options)
    options.set_defaults(model=None, engine=[])
    target = find_target(
        options.parse_args(["--topology", TOPOLOGY, "--config", str(ROOT / CONFIG)])
    )
    config = load_config(ROOT / CONFIG, list(GIVEN))
    chip = target.chip
    sync = compile_sync(target, config)
    sys.stderr.write(f"sync: {sync}\n")
    report = compile_programs(
        target.model,
        chip=chip,
        mesh=target.mesh,
        config=target.config,
        on_program=_tell,
    )
    if report.problem is not None:
        raise RuntimeError(report.problem)
    spec = find_model(config.actor_model_config)
    trainer = estimate_memory(config, spec, target.mesh, make_optimizers(config))
    rows = []
    for program in report.programs:
        memory = program.memory
        assert memory is not None
        rows.append(
            {
                "name": f"{program.name} of {program.size}",
                "argument_bytes": memory.argument_bytes,
                "temp_bytes": memory.temp_bytes,
                "peak_bytes": max(report.held_bytes, memory.argument_bytes) + memory.extra_bytes,
            }
        )
    memory = report.preview.memory
    assert memory is not None
    tp_size = report.preview.tp_size
    weights = memory.weights_bytes / tp_size
    rows.append(
        {
            "name": "weight sync",
            "argument_bytes": sync.argument_bytes,
            "temp_bytes": sync.temp_bytes,
            "peak_bytes": int(weights) + sync.peak_bytes,
        }
    )
    kept = trainer.policy + trainer.optimizer + trainer.reference
    total = {
        "trainer between steps: policy, optimizer, reference": kept / 1e9,
        "engine: weights": weights / 1e9,
        "engine: KV pages": memory.kv_bytes / tp_size / 1e9,
        "largest program beside them": (report.needed_bytes - report.held_bytes) / 1e9,
        "all together in a rollout": (kept + report.needed_bytes) / 1e9,
        "all together in a sync, old and new weights": (
            kept + weights + memory.kv_bytes / tp_size + sync.extra_bytes
        )
        / 1e9,
        "there are": chip.usable_bytes / 1e9,
    }
    preview = report.preview
    facts = [
        f"Config: {CONFIG}, mesh {list(target.mesh.devices.shape)} of {chip.title}",
        f"Engines: {preview.num_engines} of {tp_size} chips, {memory.kv_tokens} KV tokens each",
        "The compiler of all programs: libtpu; nothing was run",
    ]
    content = {"programs": rows, "gigabytes": total}
    write_results(
        output_dir(args) / "tpu_rollout.md",
        "A rollout's programs on eight v5e",
        "benchmarks/hardware/tpu_rollout.py",
        render(rows, total),
        content,
        facts=facts,
        device="none",
    )


if __name__ == "__main__":
    main()
