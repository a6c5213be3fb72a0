"""`evaluate`: rewards of checkpoints and folders, as a training would have measured them."""

import itertools
import json

import numpy as np
import pytest

from tests.training.tiny import write_config
from tunix_sgljax.cli.main import main
from tunix_sgljax.training.evaluation import pass_at_k

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix and orbax


def evaluate(*words):
    return main(["evaluate", *map(str, words)])


def read(folder):
    return json.loads((folder / "evaluation.json").read_text())


def write_task(folder, **changes):
    """A tiny run that evaluates greedily, before each step, and keeps each checkpoint."""
    return write_config(
        folder,
        task__eval_dataset="tiny_task:rows",
        # Whole batches: Tunix weighs each batch alike.
        task__eval_dataset_args={"num": 4, "start": 30},
        eval_rollout_config={"temperature": 0.0},
        rl_training_config__eval_every_n_steps=1,
        rl_training_config__checkpoint_root_directory=str(folder / "checkpoints"),
        rl_training_config__checkpointing_options={"save_interval_steps": 1},
        **changes,
    )


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 2), (4, 3, 2), (4, 4, 4), (5, 2, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n, c, k):
    samples = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(samples, k))
    expected = np.mean([max(subset) for subset in subsets])
    assert pass_at_k([c], n, k) == pytest.approx(expected)
    assert pass_at_k([c, n, 0], n, k) == pytest.approx((expected + 1 + 0) / 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["--k", "2"], "--k must be from 1 to the 1 of --num-samples, got 2"),
        (["--step", "-1"], "--step must be at least 0, got -1"),
        (
            ["--split", "train", "--step", "3"],
            "--step 3 needs --checkpoint, since rl_training_config.checkpoint_root",
        ),
        (["--checkpoint", "nowhere"], "--checkpoint must be a folder, got nowhere"),
        (["--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["--pass-reward", "nan"], "--pass-reward must be finite, got nan"),
        (["--model", "nowhere"], "--model must be a folder"),
        ([], "task.eval_dataset must be given, or --split train"),
        (["--split", "train", "--num-prompts", "5"], "at most the 4 rows of task.dataset, got 5"),
        (
            ["--split", "train", "--num-samples", "2", "--temperature", "0"],
            "--num-samples 2 needs a temperature above 0",
        ),
    ],
)
def test_what_cannot_be_evaluated(tmp_path, capsys, words, message):
    assert evaluate("--config", write_config(tmp_path), *words) == 2
    assert message in capsys.readouterr().err


def test_a_folder_goes_without_a_checkpoint(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    words = ["--model", tmp_path, "--checkpoint", tmp_path]
    assert evaluate("--config", write_config(tmp_path), *words) == 2
    assert "--model goes without --checkpoint and --step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param({"rank": 2, "alpha": 4.0}, marks=pytest.mark.soak),
    ],
)
def test_a_checkpoint_has_the_reward_that_its_training_measured(tmp_path, capsys, lora):
    path = write_task(tmp_path, actor_model_config__lora_config=lora)
    assert main(["train", "--config", str(path), "--quiet"]) == 0
    measured = json.loads((tmp_path / "out/records.json").read_text())["evaluations"]
    assert [each["num_steps"] for each in measured] == [0, 1, 2]
    root = tmp_path / "checkpoints"
    for words, step, expected in (
        ((), 2, measured[-1]),
        (("--checkpoint", root / "actor", "--step", 1), 1, measured[1]),
        (("--step", 0), 0, measured[0]),
    ):
        assert evaluate("--config", path, "--quiet", *words) == 0
        found = read(tmp_path / "out")
        assert found["mean_reward"] == pytest.approx(expected["reward"]), step
        assert found["weights"]["step"] == step
        kind = "checkpoint" if step else "random"
        assert (found["weights"]["kind"], found["weights"]["has_lora"]) == (
            kind,
            bool(step and lora),
        )
        assert [sample["prompt"] for sample in found["samples"]] == [
            *("32", "39 40", "46 47 48", "53 54 55 56"),
        ]
    assert "weights: random weights" in capsys.readouterr().out
    assert evaluate("--config", path, "--step", 7) != 0
    assert "has no step 7; it has [1, 2]" in capsys.readouterr().err
    other = ["actor_model_config.shape.embed_dim=64", "actor_model_config.lora_config=null"]
    assert evaluate("--config", path, *other) == 2
    assert ("holds LoRA pairs" if lora else "has shape") in capsys.readouterr().err
