"""Configs for hardware that is not here: true shapes on simulated devices, without weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.threads import LIMIT_S

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, json
from pathlib import Path
from tunix_sgljax.training import load_config, prepare
from tunix_sgljax.training.loop import make_meshes
from sgljax_engine import InvalidConfigError

root, rows = Path(sys.argv[1]), sys.argv[2]
tokenizer = root / "tests/golden/qwen3_gqa_tied"
for name in ("qwen3_0p6b_gpu", "llama3p2_3b_tpu_host", "qwen3_8b_tpu_host", "qwen3_8b_pathways"):
    given = ["model.path=null", f"tokenizer.path={tokenizer}", "tokenizer.pad_token=null"]
    given += [f"task.dataset={rows}"]
    config = load_config(root / f"configs/{name}.yaml", given)
    prepared = prepare(config)
    meshes = [list(mesh.devices.shape) for mesh in make_meshes(config)]
    print(json.dumps([name, prepared.memory.policy, prepared.memory.total, meshes]))
    if name == "qwen3_0p6b_gpu":
        try:
            prepare(load_config(root / f"configs/{name}.yaml", [*given, "mesh.shape=[1,16]"]))
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


@pytest.mark.slow
def test_shapes_meshes_and_memory(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1 =", "answer": "#### 2"}\n')
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(rows)],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
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
