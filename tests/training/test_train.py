"""The command `train`, from a config file to its files: GRPO, PPO, both engines, resuming."""

import json
import shutil
import signal

import numpy as np
import pytest

from tests.event_files import read_scalars
from tests.perfetto_reader import read_trace
from tests.training import tiny_task
from tests.training.tiny import write_config
from tunix_sgljax.cli.main import main
from tunix_sgljax.training import load_config, to_yaml

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix and orbax

QUICK_COMPILE = "the files, steps and messages of a training, not what it learns"


def train(path, *arguments):
    return main(["train", "--config", str(path), *arguments])


def read_records(tmp_path):
    return json.loads((tmp_path / "out/records.json").read_text())


def read_samples(tmp_path):
    lines = (tmp_path / "out/samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def steps_of_samples(tmp_path):
    return [row["step"] for row in read_samples(tmp_path)]


def check_steps(content, steps, versions):
    assert [step["step"] for step in content["steps"]] == steps
    assert [step["weight_version"] for step in content["steps"]] == versions
    for step in content["steps"]:
        assert 0 < step["rollout_s"] < step["step_s"]
        assert 0 < step["num_tokens"] <= 2 * 4 * 8
        assert 0 <= step["reward"] <= 1


@pytest.mark.soak
def test_grpo_with_evaluation_between_steps(tmp_path, capsys):
    path = write_config(
        tmp_path,
        task__eval_dataset="tiny_task:rows",
        task__eval_dataset_args={"num": 2, "start": 30},
        rl_training_config__eval_every_n_steps=1,
        eval_rollout_config={"temperature": 0.0},
        rl_training_config__metrics_logging_options={
            "log_dir": str(tmp_path / "metrics"),
            "flush_every_n_steps": 1,
        },
    )
    timeline = tmp_path / "step.pftrace"
    assert train(path, "--timeline", str(timeline)) == 0
    content = read_records(tmp_path)
    check_steps(content, [1, 2], [0, 1])
    assert [record["num_steps"] for record in content["evaluations"]] == [0, 1, 2]
    assert content["settings"]["num_batches"] == 2
    output = capsys.readouterr()
    assert "held out, after 2 steps" in output.out
    assert f"wrote {tmp_path / 'out/records.json'}" in output.out
    assert f"wrote {timeline}" in output.out
    assert "Traceback" not in output.err
    scalars = read_scalars(tmp_path / "metrics")
    for name in ("rewards/train/score/mean", "rollout/train/tokens_per_s", "rollout/train/sync_s"):
        assert [step for step, _ in scalars[name]] == [0, 1], name
    trace = read_trace(timeline)
    for name in ("generate", "prefill", "decode", "train", "update_params", "swap weights"):
        assert trace.named(name), name
    assert len(trace.named("update_params")) == 1, "one step was asked for"


def test_quiet(tmp_path, capsys):
    path = write_config(tmp_path)
    assert train(path, "--quiet", "num_batches=1", "show_sample_every_n_steps=1") == 0
    output = capsys.readouterr()
    assert "step 1/1" not in output.out
    assert "sample of step" not in output.out
    assert not output.err
    rows = read_samples(tmp_path)
    assert [row["step"] for row in rows] == [1] * 8
    assert {row["prompt"] for row in rows} == {"2", "9 10"}
    for row in rows:
        (again,) = tiny_task.share_of_even(["5"], [row["completion"]], ["5"])
        assert row["reward"] == pytest.approx(again)  # not computed
    (step,) = read_records(tmp_path)["steps"]
    mean = np.mean([row["reward"] for row in rows])
    assert step["reward"] == pytest.approx(mean)  # not computed


@pytest.mark.soak
def test_over_sampling_is_in_lines_records_and_timeline(tmp_path, capsys):
    section = {"factor": 2, "known_rewards": "tiny_task:nothing_known"}
    path = write_config(tmp_path, over_sampling=section, task__dataset_args={"num": 8})
    timeline = tmp_path / "step.pftrace"
    assert train(path, "num_batches=3", "--timeline", str(timeline)) == 0
    records = read_records(tmp_path)["steps"]
    carried = [record["over_sampling"]["carried_groups"] for record in records]
    assert carried == [2, 2, 2]
    for record in records:
        tail = record["over_sampling"]
        assert 0 < tail["wait_s"] <= record["rollout_s"] < record["step_s"]
        assert 0 <= tail["age_mean"] <= tail["age_max"] <= 1
        assert tail["tail_s"] >= 0
        assert (tail["dropped_groups"], tail["ended_groups"]) == (0, 0)
    assert records[-1]["over_sampling"]["age_max"] == 1
    assert steps_of_samples(tmp_path) == [1] * 8 + [2] * 8 + [3] * 8  # not computed
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert "2 groups carried, tokens 0.00 old, at most 0, tail " in lines[0]
    groups = read_trace(timeline).named("group")
    assert groups
    assert any(group.args["weight updates"] for group in groups)


@pytest.mark.slow
def test_resumes_from_the_newest_checkpoint(tmp_path, capsys):
    checkpoints = tmp_path / "checkpoints"
    path = write_config(
        tmp_path,
        rl_training_config__checkpoint_root_directory=str(checkpoints),
        rl_training_config__mini_batch_size=1,
        rl_training_config__checkpointing_options={"save_interval_steps": 100},
        grpo_config={"num_generations": 4, "beta": 0.0, "num_iterations": 2},
    )
    assert train(path, "num_batches=1") == 0
    check_steps(read_records(tmp_path), [1], [1])  # two mini-batches
    assert (checkpoints / "actor/4").is_dir()
    assert "resuming" not in capsys.readouterr().out
    assert train(path, "show_sample_every_n_steps=2") == 0
    check_steps(read_records(tmp_path), [1, 2], [1, 1])
    rows = read_samples(tmp_path)
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8  # not computed
    prompts = [row["prompts"] for row in tiny_task.rows(4)]
    assert [row["prompt"] for row in rows[::4]] == prompts, "each once"
    texts = [row["completion"] for row in rows if len(row["completion"].split()) > 5]
    assert len(set(texts)) == len(texts) > 4, "the second run began its noise again"
    output = capsys.readouterr().out
    assert f"resuming from step 1 of 2 (checkpoint {checkpoints}/actor/4)\n" in output
    assert output.count("sample of step 2, reward ") == 1
    assert (checkpoints / "actor/8").is_dir()
    held_out = ("task.eval_dataset=tiny_task:rows", "task.eval_dataset_args={num: 2}")
    every = "rl_training_config.eval_every_n_steps=1"
    assert train(path, "num_batches=1", *held_out, every) == 0
    output = capsys.readouterr().out
    assert "nothing to train: the checkpoint holds 2 steps of 1" in output
    assert "held out, after 2 steps, the checkpoint's weights: 0." in output


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # when reading heads
def test_ppo_trains_policy_and_critic(tmp_path, caplog):
    path = write_config(
        tmp_path,
        training_mode="ppo",
        ppo_config={"beta": 0.04},
        task__reward_functions=["tiny_task:first_is_even"],
        batch_size=8,
        rl_training_config__checkpoint_root_directory=str(tmp_path / "checkpoints"),
        rl_training_config__checkpointing_options={"save_interval_steps": 1},
    )
    assert train(path) == 0
    check_steps(read_records(tmp_path), [1, 2], [0, 1])
    assert steps_of_samples(tmp_path) == [1] * 8 + [2] * 8  # not computed
    heads = {step: value_head(tmp_path / "checkpoints/critic", step) for step in (1, 2)}
    assert heads[1].shape == (32, 1)
    assert np.abs(heads[1] - heads[2]).max() > 0
    shutil.rmtree(tmp_path / "checkpoints/critic/2")  # as if it had died between the two
    assert train(path) == 0
    assert "the policy resumes from update 2, but the critic from 1" in caplog.text


def value_head(folder, step):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        params = checkpointer.restore(folder / str(step) / "model_params")
    head = params["lm_head"]["kernel"]
    return np.asarray(head["value"] if isinstance(head, dict) else head)


@pytest.fixture
def interruptible():
    """Ctrl-C reaches the tests also where a shell started them in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_interrupt_finishes_the_step(tmp_path, capsys):
    path = write_config(tmp_path, task__reward_functions=["tiny_task:interrupting"])
    assert train(path, "num_batches=50", "grpo_config.beta=0") == 130
    content = read_records(tmp_path)
    assert 1 <= len(content["steps"]) <= 2
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    assert "wrote" in output.out


def test_dry_run_stops_before_the_weights(tmp_path, capsys):
    path = write_config(tmp_path)
    assert train(path, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "Qwen3 on a mesh of [1, 1]; 4 training rows, 0 held out; first prompt: '2'" in output
    assert "total" in output
    assert not (tmp_path / "out").exists()


def test_print_config_prints_what_loads_again(tmp_path, capsys):
    path = write_config(tmp_path)
    assert train(path, "--print-config", "seed=9") == 0
    text = capsys.readouterr().out
    assert text == to_yaml(load_config(path, ["seed=9"]))
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml").seed == 9


REWARDS, KNOWN = "task.reward_functions", "over_sampling.known_rewards"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("num_batchez=2", "unknown key num_batchez; did you mean num_batches?"),
        ("actor_model_config.mesh.shape=[1,4096]", "meshes of [1, 4096] take 4096 devices"),
        ("task.dataset=rows.jsonl", "task.dataset_args needs a function as task.dataset"),
        ("task.dataset=tiny_task:rosw", "task.dataset of tiny_task must not be 'rosw'"),
        ("task.dataset=no_task:rows", "there is no module 'no_task'"),
        ("task.dataset_args={nun: 4}", "task.dataset_args {'num': 4, 'nun': 4}: rows() got an"),
        ("task.dataset_args={num: 0}", "holds no rows"),
        ("task.columns=[answr]", "task.columns must not be 'answr'; did you mean 'answer'?"),
        ("actor_model_config.shape.layers=3", "unknown key actor_model_config.shape.layers; did"),
        ("task.prompt_template='{prompt}'", "must not be 'prompt'; did you mean 'prompts'?"),
        ("rollout_config.max_new_tokens=8", "it is called max_tokens_to_generate here"),
        (
            "rollout_config.max_prompt_length=3",
            "task.dataset, row 3: prompts='23 24 25 26' has 4 tokens",
        ),
        ("actor_model_config.checkpoint=missing.safetensors", "missing.safetensors is no file"),
        ("over_sampling.factor=3", "factor must be in [1, 2] with unfinished='carry', got 3.0"),
        (f"{KNOWN}=tiny_task:none", "over_sampling.known_rewards of tiny_task"),
        (f"{KNOWN}=tiny_task:needs_another", "it needs ['solution'], which it is not given"),
        (f"{REWARDS}=[exactmatch]", "did you mean 'exact_match'?"),
        (f"{REWARDS}=[tiny_task:lacks_columns]", "['answer', 'mode', 'trajectory_ids']: add **col"),
        (f"{REWARDS}=[tiny_task:needs_another]", "needs_another is called with the keywords ['"),
    ],
)
def test_dry_run_says_what_is_wrong(tmp_path, capsys, word, message):
    check_refusal(tmp_path, capsys, message, word, "--dry-run")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout_engine=vanilla", "a timeline is of the engine 'sgljax'"),
        ("num_batches=1", "needs num_batches >= 2, got 1"),
    ],
)
def test_steps_that_no_timeline_can_have(tmp_path, capsys, override, message):
    check_refusal(tmp_path, capsys, message, override, "--timeline", str(tmp_path / "x.pftrace"))


def check_refusal(tmp_path, capsys, message, *words):
    code, error = train(write_config(tmp_path), *words), capsys.readouterr().err
    assert code == 2
    assert message in error
    assert "Traceback" not in error
