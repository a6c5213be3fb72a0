"""Configs for hardware that is not here: true shapes on simulated devices, without weights."""

import json

import pytest

from tests.devices import ROOT, run_python

QUICK_COMPILE = "that the configs load and fit, not what they learn"

SCRIPT = """
import sys, json
from pathlib import Path
from tunix_sgljax.training import load_config, prepare
from tunix_sgljax.training.loop import make_meshes
from sgljax_engine import InvalidConfigError

root, rows = Path(sys.argv[1]), sys.argv[2]
tokenizer = root / "tests/golden/qwen3_gqa_tied"
for name in ("qwen3_0p6b_gpu", "llama3p2_3b_tpu_host", "qwen3_8b_tpu_host", "qwen3_8b_pathways"):
    given = ["actor_model_config.model_path=null", "tokenizer_config.pad_token=null"]
    given += [f"tokenizer_config.tokenizer_path={tokenizer}"]
    given += [f"task.dataset={rows}"]
    config = load_config(root / f"configs/{name}.yaml", given)
    prepared = prepare(config)
    meshes = [list(mesh.devices.shape) for mesh in make_meshes(config)]
    print(json.dumps([name, prepared.memory.policy, prepared.memory.total, meshes]))
    if name == "qwen3_0p6b_gpu":
        try:
            given += ["actor_model_config.mesh.shape=[1,16]"]
            prepare(load_config(root / f"configs/{name}.yaml", given))
        except InvalidConfigError as error:
            print(json.dumps(str(error)))
"""

# Parameters by the models' cards; bytes of bfloat16 on one device of the mesh.
PARAMETERS = {
    "qwen3_0p6b_gpu": 0.596e9,
    "llama3p2_3b_tpu_host": 3.21e9,
    "qwen3_8b_tpu_host": 8.19e9,
    "qwen3_8b_pathways": 8.19e9,
}
MESHES = {
    "qwen3_0p6b_gpu": [[1, 1], [1, 1]],
    "llama3p2_3b_tpu_host": [[2, 4], [2, 4]],
    "qwen3_8b_tpu_host": [[2, 4], [2, 4]],
    "qwen3_8b_pathways": [[4, 2], [1, 8]],
}
DEVICE_BYTES = {
    "qwen3_0p6b_gpu": 40e9,
    "llama3p2_3b_tpu_host": 16e9,
    "qwen3_8b_tpu_host": 32e9,
    "qwen3_8b_pathways": 32e9,
}


def run(script, folder):
    """The lines that a script prints, given 16 devices and a file with a row of data."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"question": "1 + 1 =", "answer": "#### 2"}\n')
    return run_python("-c", script, ROOT, rows, num_devices=16).stdout.splitlines()


@pytest.mark.soak
def test_shapes_meshes_and_memory(tmp_path):
    lines = [json.loads(line) for line in run(SCRIPT, tmp_path)]
    found = [line for line in lines if isinstance(line, list)]
    assert [line[0] for line in found] == list(PARAMETERS)
    for name, policy_bytes, total_bytes, meshes in found:
        assert meshes == MESHES[name]
        num_devices = meshes[0][0] * meshes[0][1]
        expected = 2 * PARAMETERS[name] / num_devices
        assert expected <= policy_bytes < 1.03 * expected
        assert policy_bytes < total_bytes < 0.9 * DEVICE_BYTES[name]
    (refused,) = [line for line in lines if isinstance(line, str)]
    assert "cannot split layers.0.attn.k_proj.w of shape (1024, 8, 128)" in refused


ENGINE_SCRIPT = """
import json, sys
from pathlib import Path
import jax, numpy as np
import flax.nnx as nnx
from sgljax_engine import EngineConfig
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.models.registry import get_model
from sgljax_engine.preview import preview_engine
from sgljax_engine.placement import shardings, submeshes
from sgljax_engine.runner.compile.compiled import ProgramCall
from sgljax_engine.runner.batches.page_ids import PageIds
from sgljax_engine.runner.warmup import warm_calls
from sgljax_engine.weights.plan import WeightPlanner
from tunix_sgljax.mappings import WeightMapper, find_mapping
from tunix_sgljax.model_config import to_model_config
from tunix_sgljax.training import load_config
from tunix_sgljax.rollout.options import engine_options_of
from tunix_sgljax.training.loop import make_meshes
from tunix_sgljax.training.models import find_model

root, rows = Path(sys.argv[1]), sys.argv[2]
tokenizer = root / "tests/golden/qwen3_gqa_tied"
given = ["actor_model_config.model_path=null", "tokenizer_config.pad_token=null"]
given += [f"tokenizer_config.tokenizer_path={tokenizer}"]
given += [f"task.dataset={rows}"]
config = load_config(root / "configs/qwen3_8b_pathways.yaml", given)
trainer, mesh = make_meshes(config)
assert not set(trainer.devices.flat) & set(mesh.devices.flat)
spec = find_model(config.actor_model_config)
max_len = sum(config.max_tokens)
model = to_model_config(spec.config, context_length=max_len)
options = engine_options_of(config.sgljax_config) | {"max_model_len": max_len}
options["dtype"] = config.actor_model_config.dtype
engine = EngineConfig.from_options(options)

# The simulated devices become TPUs of other hosts, whose free memory nobody knows.
Placement = shardings.Placement
Placement.platform = property(lambda self: "tpu")
Placement.is_own_cpu = property(lambda self: False)
preview = preview_engine(model, mesh=mesh, config=engine)
assert (preview.platform, preview.attention, preview.linear) == ("tpu", "tpu", "xla")
# Simulated devices have no Mosaic: the programs are lowered with portable code.
portable = {"attention_backend": "xla", "linear_backend": "xla"}
engine = EngineConfig.from_options(options | portable)
assert preview.free_bytes is preview.problem is None

group = submeshes.place(model, mesh, config.actor_model_config.dtype)
(placement,) = group.engines
definition = get_model(model.architecture)
targets = placement.weight_targets(definition.param_specs(model))
weights = {name: target.stored for name, target in targets.items()}

# The trainer's weights, sharded as Tunix does, onto the engine's devices.
params = nnx.state(spec.abstract(), nnx.Param)
shardings = nnx.to_flat_state(nnx.get_named_sharding(params, trainer))
state = {
    ".".join(map(str, path)): jax.ShapeDtypeStruct(
        param.shape, config.actor_model_config.dtype, sharding=sharding.get_value()
    )
    for (path, param), (_, sharding) in zip(nnx.to_flat_state(params), shardings)
}
mapper = WeightMapper(find_mapping(None, spec.abstract()), model)
plan, arrays = WeightPlanner(targets).plan(state, mapper.rules_for(state))
run = plan.program.at_source(tuple(trainer.devices.flat))
assert run is not None, "shards of the trainer's devices cannot be those of the engine's"
made, flags = run.trace(plan.arrays(arrays)).out_info
for name, weight in made.items():
    assert (weight.shape, weight.dtype) == (weights[name].shape, weights[name].dtype)
    there = weight.sharding.devices_indices_map(weight.shape)
    here = weights[name].sharding.devices_indices_map(weight.shape)
    assert list(there.values()) == list(here.values()), name

# All programs, lowered for weights and pages that are shapes alone.
runner, memory = build_shapes(model, engine, config.actor_model_config.dtype, mesh)
assert runner.weights == weights and memory == preview.memory
state, lowered = runner.kv_memory.state(weights), []
read = ProgramCall("read_pages", (PageIds(np.zeros(2, np.int32)),))
for call in (*warm_calls(runner, include_score=True, include_table=False), read):
    runner.programs.lower(call, state)
    lowered.append(call.name)
print(json.dumps({
    "weights": preview.weights_bytes / mesh.size,
    "kv": preview.memory.kv_bytes / mesh.size,
    "kv_tokens": preview.memory.kv_tokens,
    "rule": preview.memory.rule,
    "programs": sorted(set(lowered)),
    "num_programs": len(lowered),
    "num_arrays": len(jax.live_arrays()),
}))
"""


@pytest.mark.soak
def test_engine_of_the_pathways_config_in_shapes(tmp_path):
    """Mesh, memory of a device, weight sync from the trainer's slice, and every program."""
    found = json.loads(run(ENGINE_SCRIPT, tmp_path)[-1])
    expected = 2 * PARAMETERS["qwen3_8b_pathways"] / 8
    assert expected <= found["weights"] < 1.03 * expected
    # 128 requests of 1,024 tokens: 36 layers, k and v, 8 heads of 128 bfloat16 numbers.
    assert found["rule"] == "max_running_requests x max_model_len"
    assert found["kv_tokens"] == 128 * 1024
    assert found["kv"] == 128 * 1024 * 36 * 2 * 8 * 128 * 2 / 8
    assert found["weights"] + found["kv"] < 0.5 * DEVICE_BYTES["qwen3_8b_pathways"]
    assert found["programs"] == ["copy_pages", "decode", "prefill", "read_pages", "score"]
    assert found["num_arrays"] < 10, "nothing but constants was allocated"
