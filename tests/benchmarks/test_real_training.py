"""The report on a real model's trainings, from what the example writes."""

import json

import pytest

from benchmarks.throughput import real_training


@pytest.fixture
def folders(tmp_path):
    found = []
    for engine, rollout_s in (("sgljax", 1.0), ("vanilla", 8.0)):
        step = {"reward": 0.5, "rollout_s": rollout_s, "sync_s": 0.25, "trainer_s": 20.0}
        steps = [
            {"step": i, "num_tokens": 3200, "end_s": 100.0 * i, **step, "trainer_s": 20.0 * (3 - i)}
            for i in (1, 2)
        ]
        held_out = [{"num_steps": i, "reward": 0.05 + i / 5, "seconds": 1.0} for i in (0, 2)]
        settings = {
            "rollout_engine": engine,
            "seed": 7,
            "device": "cpu",
            "rollout_config": {"total_generation_steps": 384},
            "batch_size": 4,
            "grpo_config": {"num_generations": 8},
        }
        found.append(tmp_path / engine)
        found[-1].mkdir()
        content = {"settings": settings, "steps": steps, "held_out": held_out}
        (found[-1] / "records.json").write_text(json.dumps(content))
    return found


def test_seconds_are_of_the_steps_after_the_first(folders, tmp_path):
    real_training.main([*map(str, folders), "--output-dir", str(tmp_path)])
    lines = (tmp_path / "real_training.md").read_text().splitlines()
    assert "| sgljax | 7 | 2 | 0.05 | 0.45 | 100 | 1.00 | 0.25 | 20.00 | 200 |" in lines
    assert "| vanilla | 7 | 2 | 0.05 | 0.45 | 100 | 8.00 | 0.25 | 20.00 | 200 |" in lines
    data = json.loads((tmp_path / "real_training.json").read_text())
    assert [run["rows"] for run in data["runs"]] == [32, 32]
