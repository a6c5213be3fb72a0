"""A case of `test_hybrid`, in a process of its own that has two devices."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from sgljax_engine import Engine, SamplingParams
from tests import inside
from tests.engine.exactness_checks import check_golden_scores, golden_prompts
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {"grouped": "qwen3_next_grouped", "ungrouped": "qwen3_5_ratio_two"}
PARAMS = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)


def main(case: str) -> None:
    """Heads over two devices: transformers' tokens, and half of the states on each."""
    folder = GOLDEN / FOLDERS[case]
    golden = np.load(folder / "golden.npz")
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("fsdp", "tp"))
    with Engine(folder, dtype="float32", mesh=mesh, **SMALL) as engine:
        outputs = engine.generate_requests(golden_prompts(golden), PARAMS)
        for i, output in enumerate(outputs):
            assert output.output_ids == golden[f"greedy_{i}"].tolist(), i
            np.testing.assert_allclose(output.logprobs, golden[f"greedy_logps_{i}"], atol=2e-4)
        check_golden_scores(engine, golden)
        engine.sleep(level=1, preserve_state=True)
        engine.wake_up()
        memory = inside.runner(engine).kv_memory
        report = engine.get_internal_state().memory
        matrix = memory.kv.states[0].matrix
        heads = [shard.data.shape[1] for shard in matrix.addressable_shards]
        assert heads == [matrix.shape[1] // 2] * 2
        held = sum(
            shard.data.nbytes
            for state in memory.kv.states
            for x in state
            for shard in x.addressable_shards
        )
        assert report.state_bytes == held // report.state_slots * (report.state_slots + 8)


if __name__ == "__main__":
    main(sys.argv[1])
