"""The demo: its parts, and a short run with Tunix's own sampler."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter

import addition_task
import grpo_addition
import make_addition_checkpoint
import supervised
from addition_task import MAX_NEW_TOKENS, MAX_PROMPT_LENGTH, Problem, Tokenizer
from tunix_sgljax.training import load_config, to_yaml

CONFIG = grpo_addition.ROOT / "configs/grpo_addition.yaml"
LORA_CONFIG = grpo_addition.ROOT / "configs/grpo_addition_lora.yaml"
CHECKPOINT = grpo_addition.ROOT / "examples/data/addition_sft.safetensors"


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def test_tokenizer_round_trip_and_special_ids():
    tokenizer = TokenizerAdapter(Tokenizer())
    text = "Q: 37+58= A:7+8=15,3+5+1=9,95 |"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert min(ids) > max(tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id())
    assert max(ids) == Tokenizer.vocab_size - 1
    padded = [tokenizer.pad_id(), tokenizer.bos_id(), *ids, tokenizer.eos_id()]
    assert tokenizer.decode(padded) == text


@pytest.mark.parametrize("text", ["}", "\n", "\u00e9"])
def test_tokenizer_refuses_unknown_characters(text):
    with pytest.raises(ValueError, match="not in the vocabulary"):
        Tokenizer().encode(text)


@pytest.mark.parametrize(
    ("left", "right", "solution"),
    [
        (37, 58, "7+8=15,3+5+1=9,95"),
        (0, 0, "0+0=0,0"),
        (5, 995, "5+5=10,0+9+1=10,0+9+1=10,1000"),
        (999, 999, "9+9=18,9+9+1=19,9+9+1=19,1998"),
    ],
)
def test_solution(left, right, solution):
    problem = Problem(left, right)
    assert problem.solution == solution
    assert Problem.parse(problem.prompt) == problem


def test_longest_problem_fits_the_limits():
    problem = Problem(999, 999)
    assert len(problem.prompt) + 1 <= MAX_PROMPT_LENGTH  # Tunix adds the begin token.
    assert len(problem.solution) + 1 <= MAX_NEW_TOKENS
    special = 2
    assert len(problem.prompt + problem.solution) + special <= make_addition_checkpoint.LENGTH


def test_spoiled_answer_differs_in_one_digit():
    rng = np.random.default_rng(0)
    for answer in ["0", "95", "1998"] * 20:
        spoiled = supervised.spoil(answer, rng)
        assert sum(a != b for a, b in zip(answer, spoiled, strict=True)) == 1


def test_batches_have_what_the_learner_wants():
    batches = list(addition_task.problem_batches(3, 4, seed=0))
    assert [sorted(batch) for batch in batches] == [["answer", "prompts"]] * 3
    for batch in batches:
        assert batch["prompts"].shape == batch["answer"].shape == (4,)
        for prompt, answer in zip(batch["prompts"], batch["answer"], strict=True):
            assert Problem.parse(prompt).answer == answer
    again = list(addition_task.problem_batches(3, 4, seed=0))
    other = list(addition_task.problem_batches(3, 4, seed=1))
    assert str(again) == str(batches) != str(other)


def test_exact_match_judges_only_the_sum():
    completions = ["7+8=15,3+5+1=9,95", "95", "7+8=15,95", "7+8=15,3+5+1=9,94", "95,", "", "095"]
    rewards = addition_task.exact_match(
        ["Q: 37+58= A:"] * 7, completions, answer=["95"] * 7, trajectory_ids=["0_0"] * 7
    )
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_config_is_the_baseline():
    config = load_config(CONFIG)
    grpo, rollout = config.grpo_config, config.rollout_config
    assert (config.num_batches, config.batch_size, config.seed) == (50, 16, 0)
    assert grpo == {"num_generations": 8, "beta": 0.02, "epsilon": 0.2}
    assert config.rl_training_config["actor_optimizer_config"] == {
        "opt_type": "adam",
        "learning_rate": 1e-4,
        "max_grad_norm": 1.0,
    }
    assert (rollout["temperature"], rollout["top_p"]) == (1.0, 1.0)
    assert config.max_tokens == (MAX_PROMPT_LENGTH, MAX_NEW_TOKENS)
    assert config.sgljax_config == {"page_size": 16, "max_running_requests": 128}  # no engine


def test_lora_differs_from_the_baseline_in_what_is_trained():
    full, lora = load_config(CONFIG), load_config(LORA_CONFIG)
    section = lora.actor_model_config.lora_config
    assert section is not None
    assert (section.rank, lora.sgljax_config.pop("lora")) == (8, "merged")
    assert full.actor_model_config.lora_config is None
    changed = dataclasses.replace(
        lora,
        actor_model_config=full.actor_model_config,
        rl_training_config=full.rl_training_config,
        output_dir=full.output_dir,
    )
    assert changed == full


def test_example_and_command_train_on_the_same_problems():
    config = load_config(CONFIG)
    rows = addition_task.problem_rows(**config.task.dataset_args)
    assert len(rows) == config.num_batches * config.batch_size
    for i, batch in enumerate(addition_task.problem_batches(3, 16, config.seed)):
        assert [row["prompts"] for row in rows[16 * i : 16 * (i + 1)]] == list(batch["prompts"])
        assert [row["answer"] for row in rows[16 * i : 16 * (i + 1)]] == list(batch["answer"])


def test_shipped_checkpoint(mesh):
    model = addition_task.load_checkpoint(CHECKPOINT, mesh)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == 2_386_432
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert np.abs(np.asarray(model.layers[0].mlp.down_proj.kernel[...])).max() > 0
    assert CHECKPOINT.stat().st_size < 6e6
    metadata = addition_task.checkpoint_metadata(CHECKPOINT)
    assert metadata["maker"] == Path(make_addition_checkpoint.__file__).name
    assert 0 < float(metadata["exact_match"]) < 1


def test_checkpoint_round_trip_is_exact_after_rounding(tmp_path, mesh):
    model = addition_task.load_checkpoint(CHECKPOINT, mesh)
    path = tmp_path / "folder" / "copy.safetensors"
    addition_task.save_checkpoint(path, model, {"maker": "test"})
    copy = addition_task.load_checkpoint(path, mesh)
    assert addition_task.checkpoint_metadata(path) == {"maker": "test"}
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(copy))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses deprecated parts of JAX.
@pytest.mark.parametrize(
    ("config_steps", "expected_code"),
    [
        pytest.param(3, 0, id="too few steps to judge"),
        pytest.param(2, 1, id="all steps without a gain"),
    ],
)
def test_two_steps_with_vanilla(tmp_path, capsys, config_steps, expected_code):
    config = tmp_path / "config.yaml"
    changes = [f"num_batches={config_steps}", "batch_size=2"]
    changes.append("grpo_config.num_generations=4")
    config.write_text(to_yaml(load_config(CONFIG, changes)))
    output_dir = tmp_path / "out"
    arguments = ["--config", config, "--output-dir", output_dir, "--rollout", "vanilla"]
    arguments += ["--steps", "2", "--seed", "3", "--check"]
    assert grpo_addition.main([str(argument) for argument in arguments]) == expected_code

    content = json.loads((output_dir / "records.json").read_text())
    assert content["settings"]["rollout_engine"] == "vanilla"
    assert content["settings"]["seed"] == 3
    assert [step["step"] for step in content["steps"]] == [1, 2]
    for step in content["steps"]:
        assert 0 <= step["reward"] <= 1
        assert 0 < step["rollout_s"] < step["step_s"]
        assert 0 < step["num_tokens"] <= 8 * MAX_NEW_TOKENS
        assert step["weight_version"] is None
    assert (output_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr()
    assert " in 2 steps" in output.out
    assert ("WARNING" in output.err) == (expected_code == 1)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lora_trains_pairs_alone(tmp_path, monkeypatch):
    models = []
    make = grpo_addition.make_cluster

    def watched(config, rollout_engine):
        cluster = make(config, rollout_engine)
        models.append((cluster.actor_trainer.model, cluster.rollout))
        return cluster

    monkeypatch.setattr(grpo_addition, "make_cluster", watched)
    changes = ["batch_size=2", "sgljax_config.max_running_requests=16"]
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(LORA_CONFIG, changes)))
    arguments = ["--config", str(tmp_path / "config.yaml"), "--lora", "4", "--steps", "2"]
    arguments += ["--output-dir", str(tmp_path)]
    assert grpo_addition.main(arguments) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    assert content["settings"]["actor_model_config"]["lora_config"]["rank"] == 4
    assert [step["weight_version"] for step in content["steps"]] == [0, 1]
    ((model, timed),) = models
    report = timed.inner.lora_report
    assert (report.num_pairs, report.max_rank) == (4 * 7, 4)
    before = addition_task.load_checkpoint(CHECKPOINT, timed.inner.mesh)
    trained, frozen = model.layers[0].attn.q_proj, before.layers[0].attn.q_proj
    np.testing.assert_array_equal(trained.w[...], frozen.w[...])
    assert np.abs(np.asarray(trained.w_lora_b[...])).max() > 0
