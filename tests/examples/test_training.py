"""Short forms of the examples that train through the library: PPO, and evaluation between steps."""

import json

import pytest

import addition_task
import evaluate_between_steps
import ppo_addition

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

QUICK_COMPILE = "steps and records of short trainings, not what they learn"


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
def test_ppo_on_addition(tmp_path, capsys):
    arguments = ["--steps", "2", "--batch-size", "4", "--output-dir", str(tmp_path)]
    assert ppo_addition.main(arguments) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    assert content["settings"]["training_mode"] == "ppo"
    assert [step["weight_version"] for step in content["steps"]] == [0, 1]
    assert all(step["num_tokens"] > 4 for step in content["steps"])
    assert " in 2 steps" in capsys.readouterr().out


@pytest.mark.soak
def test_evaluation_between_steps(tmp_path, capsys):
    arguments = ["--steps", "2", "--batch-size", "2", "--every", "1", "--held-out", "2"]
    assert evaluate_between_steps.main([*arguments, "--output-dir", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    evaluations = content["evaluations"]
    assert [record["num_steps"] for record in evaluations] == [0, 1, 2]
    assert all(record["reward"] in (0.0, 0.5, 1.0) for record in evaluations)
    assert "held out, greedy" in capsys.readouterr().out


def test_held_out_rows_are_none_that_training_sees():
    training = {row["prompts"] for row in addition_task.problem_rows(800, 0)}
    held_out = [row["prompts"] for row in addition_task.held_out_rows(64, 1, 800, 0)]
    assert len(set(held_out)) == len(held_out) == 64
    assert not training & set(held_out)
