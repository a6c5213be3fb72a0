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
import dataclasses
from typing import Any

import jax
from flax import nnx

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.compile.program_fit import ProgramMemory
from sgljax_engine.weights.plan import plan_sync
from sgljax_engine.weights.specs import source_spec
from tools.aot import AotReport, compile_programs, words
from tools.aot.target import Target, add_target_options, find_target
from tunix_sgljax.cli.output import say
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


def trainer_params(policy: nnx.Module, config: TrainConfig, mesh: jax.sharding.Mesh) -> nnx.State:
    """The policy's parameters as shapes with the trainer's shardings."""
    state = nnx.state(policy, nnx.Param)
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
    source = mapper.named_source(trainer_params(abstract, config, mesh))
    group = place(target.model, target.mesh, DTYPE, target.config.parallel, target.config.runtime)
    targets = group.whole.weight_targets(
        get_model(target.model.architecture).param_specs(target.model)
    )
    plan = plan_sync(source_spec(source), mapper.rules_for(source), targets)
    assert plan.program.devices == tuple(mesh.devices.flat)
    run: Any = plan.program.at_target
    return ProgramMemory.of(run.lower(plan.arrays(source)).compile())


def chip_bytes(
    config: TrainConfig, target: Target, report: AotReport, sync: ProgramMemory
) -> dict[str, float]:
    """What is in a chip's memory by what it is, in bytes."""
    spec = find_model(config.actor_model_config)
    trainer = estimate_memory(config, spec, target.mesh, make_optimizers(config))
    kept = trainer.policy + trainer.optimizer + trainer.reference
    weights = report.preview.weights_bytes / report.preview.tp_size
    pages = report.held_bytes - weights
    in_sync = kept + report.held_bytes + sync.extra_bytes
    return {
        "trainer between steps: policy, optimizer, reference": kept,
        "engine: weights": weights,
        "engine: KV pages": pages,
        "all in a rollout, with the program that needs most": kept + report.needed_bytes,
        "weight sync: temporaries": sync.temp_bytes,
        "all in a weight sync, with old and new weights": in_sync,
        "there are": target.chip.usable_bytes,
    }


def main(argv: list[str] | None = None) -> None:
    """Compiles everything, and writes the results."""
    args = make_parser(__doc__).parse_args(argv)
    options = argparse.ArgumentParser()
    add_target_options(options)
    options.set_defaults(model=None, engine=[])
    target = find_target(
        options.parse_args(["--topology", TOPOLOGY, "--config", str(ROOT / CONFIG)])
    )
    config = load_config(ROOT / CONFIG, list(GIVEN))
    say("compiling the weight sync")
    sync = compile_sync(target, config)
    report = compile_programs(
        target.model,
        chip=target.chip,
        mesh=target.mesh,
        config=target.config,
        on_program=lambda name, size: say(f"compiling {name} of {size}"),
    )
    if report.problem is not None:
        raise RuntimeError(report.problem)
    found = chip_bytes(config, target, report, sync)
    table = [f"| {name} | {words.size(num_bytes)} |" for name, num_bytes in found.items()]
    write_results(
        output_dir(args) / "tpu_rollout.md",
        "A rollout's programs on eight v5e",
        "benchmarks/hardware/tpu_rollout.py",
        [
            words.describe(report, CONFIG, TOPOLOGY),
            *["", "| in the memory of a chip | |", "|---|---:|", *table],
        ],
        {
            **words.to_json(report, CONFIG, TOPOLOGY),
            "sync": dataclasses.asdict(sync),
            "chip": found,
        },
        facts=[f"Config: {CONFIG}, mesh {list(target.mesh.devices.shape)} of {target.chip.title}"],
        device="none",
    )


if __name__ == "__main__":
    main()
