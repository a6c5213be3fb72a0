"""Strict loading of config files: names, types, overrides, paths, and what fields share."""

import importlib.util
import re
from pathlib import Path

import pytest

from sgljax_engine import InvalidConfigError
from tests.training.tiny import write_config
from tunix_sgljax.training import TrainConfig, load_config, to_yaml
from tunix_sgljax.training.loading import field_rows

ROOT = Path(__file__).parents[2]
OF_EXAMPLES = {"grpo_async", "grpo_remote_agent", "grpo_tools"}
"""Read by the example of that name alone, whose tests load them."""
SHIPPED = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in OF_EXAMPLES)
NEEDED = ["model.path=null", "tokenizer.path=anywhere", "task.dataset=rows.jsonl"]


def overrides_for(path):
    """What a user must give beside a shipped config."""
    return NEEDED if "???" in path.read_text() else []


def load(tmp_path, *overrides, **changes):
    return load_config(write_config(tmp_path, **changes), overrides)


def test_every_kind_of_shipped_config_is_found():
    assert {path.stem for path in SHIPPED} == {
        "grpo_addition",
        "grpo_addition_lora",
        "ppo_addition",
        "qwen3_0p6b_gpu",
        "llama3p2_3b_tpu_host",
        "qwen3_8b_tpu_host",
        "qwen3_8b_pathways",
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_config_loads_and_prints_itself(path, tmp_path):
    config = load_config(path, overrides_for(path))
    assert isinstance(config, TrainConfig)
    copy = tmp_path / "copy.yaml"
    copy.write_text(to_yaml(config))
    assert load_config(copy) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_config_refuses_a_wrong_name(path):
    with pytest.raises(InvalidConfigError, match=r"did you mean training\.batch_size\?"):
        load_config(path, [*overrides_for(path), "training.batchsize=4"])


@pytest.mark.parametrize("key", ["model.path", "task.dataset"])
def test_what_must_be_given_is_asked_for(key):
    others = [text for text in NEEDED if not text.startswith(key)]
    with pytest.raises(InvalidConfigError, match=f"{re.escape(key)} must be given"):
        load_config(ROOT / "configs/qwen3_0p6b_gpu.yaml", others)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "unknown key stepz"),
        ("modell.path=x", "unknown key modell; did you mean model?"),
        ("algorithm.grpo.betta=0.1", "did you mean algorithm.grpo.beta?"),
        ("model.shape.layers=3", "unknown key model.shape.layers; did you mean"),
        ("steps=3", "unknown key steps; did you mean training.steps?"),
        ("rollout.eval.temprature=1", "did you mean rollout.eval.temperature?"),
        ("engine.page_size=16", "unknown key engine.page_size; known here: options"),
        ("engine.options.page_sise=16", "unknown engine option 'page_sise'; did you mean"),
        ("engine.sampling_params.min_q=0.1", "engine.sampling_params: unknown"),
        (
            "model.lora_config.rank=8",
            "unknown key model.lora_config; LoRA is the section lora",
        ),
        ("lora.lora_alpha=8", "unknown key lora.lora_alpha; did you mean lora.alpha?"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(tmp_path, override, message):
    with pytest.raises(InvalidConfigError, match=re.escape(message)):
        load(tmp_path, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps=many", "training.steps must be an integer, got 'many'"),
        ("training.steps=2.5", "training.steps must be an integer, got 2.5"),
        ("training.steps=true", "training.steps must be an integer, got True"),
        ("training.steps=null", "training.steps must be an integer, got None"),
        ("training.steps=[1]", "training.steps must be an integer, got [1]"),
        ("rollout.top_k=[1]", "rollout.top_k must be an integer or null, got [1]"),
        ("rollout.eval.temperature=x", "rollout.eval.temperature must be a number, got 'x'"),
        ("task.chat=perhaps", "task.chat must be true or false, got 'perhaps'"),
        ("mesh.shape=[1,a]", "mesh.shape[1] must be a list of integers, got 'a'"),
        ("mesh.shape=3", "mesh.shape must be a list of integers, got 3"),
        ("model.name=[a]", "model.name must be a string or null, got"),
        ("training=3", "training must be keys and values, got 3"),
        ("training.optimizer=adam", "training.optimizer must be keys and values, got 'adam'"),
        ("engine.options=3", "engine.options must be keys and values, got 3"),
        ("title=${sede}", "title: Interpolation key 'sede' not found"),
        ("training.steps", "an override must be key=value, got 'training.steps'"),
        ("training.steps=[", "cannot read the overrides ['training.steps=[']"),
    ],
)
def test_wrong_type_names_key_value_and_type(tmp_path, override, message):
    with pytest.raises(InvalidConfigError, match=re.escape(message)):
        load(tmp_path, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("training.steps=0", "training.steps must be at least 1, got 0"),
        ("rollout_engine=vanila", "rollout_engine must not be 'vanila'; did you mean 'vanilla'?"),
        ("algorithm.name=dpo", "algorithm.name must not be 'dpo'; did you mean 'ppo'?"),
        ("algorithm.ppo.gamma=0.5", "algorithm.ppo.gamma=0.5 is read by nothing: algorithm.name"),
        ("algorithm.grpo.num_generations=1", "num_generations must be at least 2, got 1"),
        ("training.mini_batch_size=3", "must divide training.batch_size (2), got 3"),
        ("training.train_micro_batch_size=4", "must divide training.mini_batch_size (2), got 4"),
        ("training.rollout_micro_batch_size=3", "must divide training.batch_size (2), got 3"),
        ("training.compute_logps_micro_batch_size=3", "must divide training.batch_size (2), got 3"),
        ("training.eval_every_n_steps=1", "task.eval_dataset belong together, got 1 and None"),
        ("rollout.temperature=0", "rollout.temperature must be above 0"),
        ("rollout.top_p=1.5", "rollout: top_p"),
        ("rollout.kv_cache_size=64", "rollout.kv_cache_size=64 is read by nothing"),
        ("rollout_engine=vanilla rollout.kv_cache_size=15", "(16), got 15"),
        ("engine.options.max_model_len=15", "max_tokens_to_generate (16), got 15"),
        ("engine.options.page_size=0", "engine.options: page_size"),
        ("engine.logprobs_mode=raw", "engine.logprobs_mode must not be 'raw'"),
        ("model.family=null", "model.family and model.shape belong together"),
        ("model.name=qwen3-0.6b", "model must have one of path, name, and family with shape"),
        ("lora.rank=0 lora.alpha=1", "lora.rank must be at least 1, got 0"),
        ("lora.rank=4 lora.alpha=0", "lora.alpha must be finite and above 0, got 0"),
        ("lora.rank=4 lora.alpha=.inf", "lora.alpha must be finite and above 0, got inf"),
        ("lora.rank=4 lora.alpha=8 lora.module_path=(", "lora.module_path '(' is no regular"),
        ("lora.rank=4 lora.alpha=8 lora.weight_qtype=int3", "lora.weight_qtype must not be 'int3'"),
        ("model.path=x", "model.family must be null with model.path"),
        ("tokenizer.path=x", "tokenizer.path must be null with tokenizer.function"),
        ("tokenizer.function=null", "tokenizer.path must be given where model.path is null"),
        ("task.reward_functions=[]", "task.reward_functions must name at least one"),
        ("task.prompt_template=Hello", "must name a column in braces, got 'Hello'"),
        ('task.prompt_template="{a"', "is no template"),
        ("task.system_prompt=Hello", "task.system_prompt needs task.chat=true"),
        ("mesh.shape=[1]", "mesh.shape must have a size for each of mesh.axis_names"),
        ("mesh.shape=[0,1]", "mesh.shape must have sizes of at least 1, got [0, 1]"),
        ("mesh.axis_names=[data,tp]", "mesh.axis_names must be fsdp and tp"),
        ("mesh.shape=[3,1]", "3 devices along fsdp, which must divide the 8 rows"),
        ("training.optimizer.weight_decay=0.1", "needs opt_type adamw, got adam"),
        ("training.optimizer.warmup_steps=1", "schedule_type is constant, which takes no"),
        (
            "training.optimizer.schedule_type=linear training.optimizer.warmup_steps=2",
            "warmup_steps must be below decay_steps (2), got 2",
        ),
        ("training.optimizer.max_grad_norm=0", "max_grad_norm must be null or above 0, got 0"),
        ("training.optimizer.learning_rate=-1", "learning_rate must be at least 0, got -1"),
        ("training.critic_optimizer.b1=0.5", "critic_optimizer.b1=0.5 is read by nothing: GRPO"),
        (
            "training.checkpoint_root_directory=x algorithm.grpo.num_iterations=2",
            "must be null with num_iterations 2",
        ),
        (
            "algorithm.name=ppo algorithm.grpo.num_generations=8 rollout.eval.temperature=0",
            "rollout.eval must be null with PPO",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path, overrides, message):
    with pytest.raises(InvalidConfigError, match=re.escape(message)):
        load(tmp_path, *overrides.split())


def test_overrides_win_and_the_rest_stays(tmp_path):
    config = load(tmp_path, "training.steps=7", "rollout.eval={temperature: 0.5}", "seed=3")
    assert config.training.steps == 7
    assert config.training.batch_size == 2
    assert config.rollout.eval is not None
    assert (config.rollout.eval.temperature, config.rollout.eval.top_p) == (0.5, 1.0)
    assert config.seed == 3


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
    changed = load_config(path, ["task.dataset=rows.jsonl", "model.checkpoint=a/b.safetensors"])
    assert changed.task.dataset == str(elsewhere / "rows.jsonl")
    assert changed.model.checkpoint == str(elsewhere / "a/b.safetensors")


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


def test_documentation_is_up_to_date():
    spec = importlib.util.spec_from_file_location("maker", ROOT / "docs/make_training_table.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = maker.OUTPUT.read_text(encoding="utf-8")
    assert text == maker.render(text), "run python docs/make_training_table.py"
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(key for key, _, _ in field_rows())
