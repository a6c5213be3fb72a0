"""The asynchronous demo: its task, its parts, and short runs of both kinds of update."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import addition_task
import grpo_async
import make_multiples_checkpoint
import multiples_task
from multiples_task import MAX_COUNT, MAX_NEW_TOKENS, MAX_PROMPT_LENGTH, Multiple
from tests.tiers import tiered

QUICK_COMPILE = "that the example runs and what it reports"

CHECKPOINT = grpo_async.ROOT / "examples/data/multiples_sft.safetensors"


def test_solution():
    problem = Multiple(3, 7, 4)
    assert problem.prompt == "Q: 3+7*04= A:"
    assert problem.solution == "04:010,03:017,02:024,01:031,031"
    assert Multiple.parse(problem.prompt) == problem
    with pytest.raises(ValueError, match="not a prompt"):
        Multiple.parse("Q: 3+7= A:")


def test_longest_problem_fits_the_limits():
    problem = Multiple(9, 9, MAX_COUNT)
    assert len(problem.prompt) + 1 <= MAX_PROMPT_LENGTH  # Tunix adds the begin token.
    # Tunix's agentic learner drops completions that use the limit up.
    assert len(problem.solution) + 1 < MAX_NEW_TOKENS


def test_lengths_have_a_long_tail():
    rng = np.random.default_rng(0)
    lengths = [len(multiples_task.sample_problem(rng).solution) for _ in range(2000)]
    assert np.mean(lengths) > 1.25 * np.median(lengths)
    assert np.max(lengths) > 3.5 * np.mean(lengths)


def test_shipped_checkpoint():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = addition_task.load_checkpoint(CHECKPOINT, mesh, multiples_task.model_config())
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert CHECKPOINT.stat().st_size < 2e6
    metadata = addition_task.checkpoint_metadata(CHECKPOINT)
    assert metadata["maker"] == Path(make_multiples_checkpoint.__file__).name
    assert 0 < float(metadata["exact_match"]) < 1


def waits(seed, grader):
    """Seconds that the graders of some episodes take."""
    return [
        grpo_async.GradedEnvironment(
            {"prompts": "Q"}, group_id=group, pair_index=pair, grader=grader, seed=seed
        )._wait_s
        for group in range(20)
        for pair in range(8)
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_graders_take_the_same_time_whatever_the_updates():
    grader = grpo_async.GraderSettings(median_s=0.25)
    seconds = waits(1, grader)
    assert waits(1, grader) == seconds != waits(2, grader)
    assert len(set(seconds)) > 100
    assert 0.2 < np.median(seconds) < 0.3
    assert 1 < max(seconds) <= grader.max_s
    assert set(waits(1, grpo_async.GraderSettings())) == {0.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses deprecated parts of JAX.
@pytest.mark.parametrize("update", tiered(["in_flight", "drain"], [], ()))
def test_two_steps(tmp_path, capsys, update):
    config = tmp_path / "config.yaml"
    config.write_text("grpo: {prompts_per_step: 2, num_generations: 4, beta: 0.0}\n")
    path = tmp_path / "records.json"
    arguments = ["--config", config, "--output", path, "--update", update, "--steps", "2"]
    assert grpo_async.main([str(argument) for argument in [*arguments, "--seed", "3"]]) == 0

    content = json.loads(path.read_text())
    assert content["settings"]["update"] == update
    assert content["settings"]["seed"] == 3
    assert [step["step"] for step in content["steps"]] == [1, 2]
    for step in content["steps"]:
        assert 0 <= step["reward"] <= 1
        assert 0 < step["wait_s"] < step["step_s"]
        assert 0 < step["num_tokens"] <= 8 * MAX_NEW_TOKENS
    if update == "drain":
        assert content["summary"]["weight_lag/mixed_fraction"] == 0
    assert "step 2/2" in capsys.readouterr().out
