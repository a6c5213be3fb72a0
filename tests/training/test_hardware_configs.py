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

# Parameters by the models' cards, which are bfloat16 on the meshes; and bytes of a device.
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
DEVICE_BYTES = dict(zip(PARAMETERS, (40e9, 16e9, 32e9, 32e9), strict=True))


@pytest.mark.soak
def test_shapes_meshes_and_memory(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1 =", "answer": "#### 2"}\n')
    printed = run_python("-c", SCRIPT, ROOT, rows, num_devices=16).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
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
