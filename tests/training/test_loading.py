"""Strict loading of config files: names, types, overrides, paths, and what fields share."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from sgljax_engine import InvalidConfigError
from tests.training.tiny import write_config
from tunix_sgljax.training import TrainConfig, load_config, to_yaml
from tunix_sgljax.training.loading import field_types, section_of

ROOT = Path(__file__).parents[2]
OF_EXAMPLES = {"grpo_async", "grpo_reasoning", "grpo_remote_agent", "grpo_tools"}
"""Read by the example of that name alone, whose tests load them."""
SHIPPED = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in OF_EXAMPLES)
NEEDED = [
    "actor_model_config.model_path=null",
    "tokenizer_config.tokenizer_path=anywhere",
    "task.dataset=rows.jsonl",
]


MODEL, TRAINING = "actor_model_config", "rl_training_config"
MESH, LORA = f"{MODEL}.mesh", f"{MODEL}.lora_config"


def overrides_for(path):
    """What a user must give beside a shipped config."""
    return NEEDED if "???" in path.read_text() else []


def load(tmp_path, *overrides, **changes):
    return load_config(write_config(tmp_path, **changes), overrides)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_config_loads_and_prints_itself(path, tmp_path):
    config = load_config(path, overrides_for(path))
    assert isinstance(config, TrainConfig)
    copy = tmp_path / "copy.yaml"
    copy.write_text(to_yaml(config))
    assert load_config(copy) == config


@pytest.mark.parametrize("key", ["actor_model_config.model_path", "task.dataset"])
def test_what_must_be_given_is_asked_for(key):
    others = [text for text in NEEDED if not text.startswith(key)]
    with pytest.raises(InvalidConfigError, match=f"{re.escape(key)} must be given"):
        load_config(ROOT / "configs/qwen3_0p6b_gpu.yaml", others)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("stepz=3", "unknown key stepz"),
        ("batchsize=4", "unknown key batchsize; did you mean batch_size?"),
        ("taskk.columns=[x]", "unknown key taskk; did you mean task?"),
        ("reward_functions=[a]", "unknown key reward_functions; did you mean task.reward"),
        ("tokenizer_config.chat=true", "key tokenizer_config.chat; did you mean task.chat?"),
        ("task.pages=16", "unknown key task.pages; known here: dataset"),
        (f"{LORA}.lora_alpha=8", f"unknown key {LORA}.lora_alpha; did you mean {LORA}.alpha?"),
        ("num_batches=many", "num_batches must be an integer, got 'many'"),
        ("num_batches=2.5", "num_batches must be an integer, got 2.5"),
        ("num_batches=true", "num_batches must be an integer, got True"),
        ("num_batches=null", "num_batches must be an integer, got None"),
        ("task.columns=3", "task.columns must be a list of strings or null, got 3"),
        ("task.chat=perhaps", "task.chat must be true or false, got 'perhaps'"),
        (f"{MESH}.shape=[1,a]", f"{MESH}.shape must be a list of integers, got [1, 'a']"),
        (f"{MESH}.shape='(1,'", f"{MESH}.shape must be a list of integers, got '(1,'"),
        ("actor_model_config.model_name=[a]", "model_name must be a string or null, got"),
        ("grpo_config=3", "grpo_config must be keys and values, got 3"),
        ("task=3", "task must be keys and values, got 3"),
        ("output_dir=${sede}", "output_dir: Interpolation key 'sede' not found"),
        ("num_batches", "an override must be key=value, got 'num_batches'"),
        ("num_batches=[", "cannot read the overrides ['num_batches=[']"),
        ("num_batches=0", "num_batches must be at least 1, got 0"),
        ("rollout_engine=vanila", "rollout_engine must not be 'vanila'; did you mean 'vanilla'?"),
        ("training_mode=dpo", "training_mode must not be 'dpo'; did you mean 'ppo'?"),
        (f"{TRAINING}.mini_batch_size=3", "must divide batch_size (2), got 3"),
        (f"{TRAINING}.train_micro_batch_size=4", "must divide mini_batch_size (2), got 4"),
        (f"{TRAINING}.rollout_micro_batch_size=3", "must divide batch_size (2), got 3"),
        (f"{TRAINING}.compute_logps_micro_batch_size=3", "must divide batch_size (2), got 3"),
        (f"{MODEL}.family=null", "actor_model_config.family and shape belong together"),
        (f"{MODEL}.model_name=qwen3-0.6b", "must have one of model_path, model_name, and family"),
        (f"{LORA}.rank=4", "actor_model_config.lora_config.alpha must be given"),
        (f"{LORA}.rank=0 {LORA}.alpha=1", "lora_config.rank must be at least 1, got 0"),
        (f"{LORA}.rank=4 {LORA}.alpha=0", "alpha must be finite and above 0, got 0"),
        (f"{LORA}.rank=4 {LORA}.alpha=.inf", "alpha must be finite and above 0, got inf"),
        (f"{LORA}.rank=4 {LORA}.alpha=8 {LORA}.module_path=(", "module_path '(' is no regular"),
        (f"{LORA}.rank=4 {LORA}.alpha=8 {LORA}.weight_qtype=int3", "must not be 'int3'"),
        (f"{MODEL}.model_path=x", "actor_model_config.family must be null with model_path"),
        ("tokenizer_config.tokenizer_path=x", "tokenizer_path must be null with function"),
        ("tokenizer_config.function=null", "must be given where actor_model_config.model_path is"),
        ("task.reward_functions=[]", "task.reward_functions must name at least one"),
        ("task.prompt_template=Hello", "must name a column in braces, got 'Hello'"),
        ('task.prompt_template="{a"', "is no template"),
        ("task.system_prompt=Hello", "task.system_prompt needs task.chat=true"),
        (f"{MESH}.shape=[1]", f"{MESH}.shape must have two sizes >= 1, got [1]"),
        (f"{MESH}.shape=[0,1]", f"{MESH}.shape must have two sizes >= 1, got [0, 1]"),
        (f"{MESH}.axis_names=[data,tp]", f"{MESH}.axis_names must be fsdp and tp"),
        (f"{MESH}.shape=[3,1]", "3 devices along fsdp, which must divide the 8 rows"),
        ("rollout_engine=vanilla over_sampling.factor=1.5", "rollout_engine is 'sgljax', got 'va"),
        ("training_mode=ppo over_sampling.factor=2", "unless training_mode is 'grpo', got 'ppo'"),
        ("training_mode=ppo eval_rollout_config.temperature=0", "must be empty with PPO"),
    ],
)
def test_wrong_keys_types_and_values_are_refused(tmp_path, overrides, message):
    with pytest.raises(InvalidConfigError, match=re.escape(message)):
        load(tmp_path, *overrides.split())


def test_overrides_win_and_the_rest_stays(tmp_path):
    config = load(tmp_path, "num_batches=7", "grpo_config.beta=0.5", "seed=3")
    assert (config.num_batches, config.batch_size, config.seed) == (7, 2, 3)
    assert config.grpo_config == {"num_generations": 4, "beta": 0.5}


def test_sections_of_tunix_files_are_read(tmp_path, caplog):
    """As its base config has them: meshes as text, {} for no LoRA, and how to find the model."""
    text = (ROOT / "tests/cli/tunix_recipe/base.yaml").read_text()
    recipe = yaml.safe_load(text)
    names = ("actor_model_config", "rollout_model_config", "tokenizer_config", "rollout_config")
    sections = {name: recipe[name] for name in (*names, "rl_training_config", "grpo_config")}
    sections["tokenizer_config"]["tokenizer_path"] = "anywhere"
    sections["actor_model_config"]["mesh"]["shape"] = "(2,1)"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**sections, "batch_size": 2, "task": {"dataset": "x.jsonl"}}))
    config = load_config(path)
    model = config.actor_model_config
    assert (model.model_path, model.model_name, model.lora_config) == (None, "qwen3-tiny", None)
    assert (model.mesh.shape, model.mesh.axis_names) == ([2, 1], ["fsdp", "tp"])
    assert config.rollout_model_config.mesh is None
    assert config.max_tokens == (64, 8)
    assert (config.num_updates, config.num_steps) == (2, 2)
    assert "actor_model_config.model_id='local/qwen3-tiny' is not read" in caplog.text
    assert load_config(write_copy(tmp_path, config)) == config


def write_copy(folder, config):
    path = folder / "copy.yaml"
    path.write_text(to_yaml(config))
    return path


def test_interpolation_follows_an_override(tmp_path):
    config = load(tmp_path, "seed=5", task__dataset_args={"num": 4, "start": "${seed}"})
    assert config.task.dataset_args == {"num": 4, "start": 5}


def test_paths_are_relative_to_where_they_stand(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write_config(folder, task__dataset="../rows.jsonl", task__dataset_args={})
    assert load_config(path).task.dataset == str(tmp_path / "rows.jsonl")
    changed = load_config(path, ["task.dataset=rows.jsonl", f"{MODEL}.checkpoint=a/b.safetensors"])
    assert changed.task.dataset == str(elsewhere / "rows.jsonl")
    assert changed.actor_model_config.checkpoint == str(elsewhere / "a/b.safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read the config"), ("a: [", "is no YAML"), ("- a", "must hold keys and val")],
)
def test_a_file_that_is_no_config(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidConfigError, match=message):
        load_config(path)


def test_every_key_is_documented():
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    sections = [TrainConfig]
    for section in sections:
        assert f"\n::: {section.__module__}.{section.__qualname__}\n" in text
        for name, annotation in field_types(section).items():
            below = section_of(annotation)
            if below is None:
                assert f"    {name}: " in inspect.cleandoc(section.__doc__ or ""), name
            elif below not in sections:
                sections.append(below)
    assert len(sections) == 8
