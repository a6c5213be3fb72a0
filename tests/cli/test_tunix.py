"""`tunix-sgljax tunix`: Tunix's own pipelines with our engine; nothing of Tunix stays patched."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import yaml
from absl import flags
from tunix.cli import grpo_main

from sgljax_engine import InvalidConfigError
from tests.cli import tunix_offline as offline
from tests.devices import run_python
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.cli import main as cli
from tunix_sgljax.cli import tunix as command
from tunix_sgljax.cli import tunix_sections as sections
from tunix_sgljax.cli.tunix_pipeline import with_sgljax_engine
from tunix_sgljax.rollout import options

QUICK_COMPILE = "what reaches Tunix's pipelines and what they print, not what they learn"

# Of Tunix, its libraries and what they do with JAX.
TUNIX_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore:rngs must be provided:UserWarning",
    "ignore:scatter inputs:FutureWarning",
)
LORA = (
    "actor_model_config.lora_config.rank=4",
    "actor_model_config.lora_config.alpha=8.0",
    "actor_model_config.lora_config.module_path='.*q_proj|.*k_proj|.*gate_proj|.*down_proj'",
)
BASE = str(offline.RECIPE / "base.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return offline.write_model(tmp_path_factory.mktemp("tunix"))


def make_pipeline(*overrides):
    """Tunix's pipeline, configured and not yet run."""
    argv = ["grpo_main", BASE, "tokenizer_config.tokenizer_path=/a/folder", *overrides]
    return with_sgljax_engine(grpo_main.GrpoPipeline)(argv)


# ---------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.filterwarnings(*TUNIX_WARNINGS)
@pytest.mark.parametrize(
    "lora", [(), pytest.param(LORA, marks=pytest.mark.soak)], ids=["full", "lora"]
)
def test_a_recipe_runs_with_our_engine(lora, folder, monkeypatch, capsys):
    calls, updates = [], []
    generate, update = SglJaxRollout.generate, SglJaxRollout.update_params

    def watched_generate(self, prompts, rollout_config, **kwargs):
        output = generate(self, prompts, rollout_config, **kwargs)
        calls.append((list(map(str, prompts)), output.text, rollout_config, self))
        return output

    def watched_update(self, params, filter_types=None):
        update(self, params, filter_types)
        updates.append((self.weight_version, self.lora_report is not None))

    monkeypatch.setattr(SglJaxRollout, "generate", watched_generate)
    monkeypatch.setattr(SglJaxRollout, "update_params", watched_update)
    offline.serve_model(monkeypatch, folder)
    monkeypatch.chdir(offline.RECIPE)
    overrides = (
        "rollout_engine=sgljax",
        "sgljax_config.page_size=8",
        "sgljax_config.weight_update_mode=in_place",
        *lora,
    )
    assert cli.main(["tunix", *offline.arguments(folder, *overrides)]) == 0
    assert "SglJaxRollout samples" in capsys.readouterr().err

    assert updates == [(1, bool(lora)), (2, bool(lora))]
    assert [len(prompts) for prompts, *_ in calls] == [4, 4]  # a batch of 2, 2 samples each
    for prompts, texts, config, rollout in calls:
        assert prompts[0] == prompts[1] != prompts[2]
        assert all(text.startswith("Q: Ann has") for text in prompts)
        assert not any("<eos>" in text for text in texts)
        assert (config.temperature, config.top_k) == (0.9, 50)
        assert config.max_tokens_to_generate == 8
        assert rollout.weight_update_mode == "in_place"
        engine = rollout._builder.engine_config
        assert (engine.cache.page_size, engine.scheduler.max_running_requests) == (8, 4)
    for *_, rollout in calls[:1]:
        rollout.close()


@pytest.mark.slow
@pytest.mark.skipif("ppo" not in command.offered_pipelines(), reason="Tunix 0.1.7 has no ppo_main")
@pytest.mark.filterwarnings(*TUNIX_WARNINGS)
def test_ppo_runs_where_tunix_has_it(folder, tmp_path, monkeypatch, capsys):
    recipe = yaml.safe_load((offline.RECIPE / "base.yaml").read_text())
    training = recipe["rl_training_config"]
    training["critic_optimizer_config"] = training["actor_optimizer_config"]
    recipe |= {
        "critic_model_config": recipe["model_config"] | {"mesh": None},
        "tokenizer_config": recipe["tokenizer_config"] | {"tokenizer_path": str(folder)},
        "training_mode": "ppo",
        "rollout_engine": "sgljax",
    }
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(recipe))
    offline.serve_model(monkeypatch, folder)
    monkeypatch.chdir(offline.RECIPE)
    assert cli.main(["tunix", "ppo", str(tmp_path / "ppo.yaml")]) == 0
    assert "SglJaxRollout samples" in capsys.readouterr().err


@pytest.mark.soak
def test_a_recipe_runs_on_eight_devices(folder):
    arguments = offline.arguments(
        folder,
        "rollout_engine=sgljax",
        "actor_model_config.mesh.shape=(2,2)",
        "rollout_model_config.mesh.shape=(2,2)",
        "rollout_model_config.mesh.axis_names=('fsdp','tp')",
    )
    script = offline.RECIPE.parent / "tunix_offline.py"
    done = run_python(script, folder, "tunix", *arguments, num_devices=8, folder=offline.RECIPE)
    assert "SglJaxRollout samples" in done.stderr


# ---------------------------------------------------------------------- nothing stays


def test_nothing_stays_patched(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    before = (
        list(sys.path),
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        flags.FLAGS.is_parsed(),
        dict(vars(grpo_main)),
        dict(vars(grpo_main.GrpoPipeline)),
    )
    arguments = ["grpo", BASE, "rollout_engine=sgljax", "sgljax_config.page_size=0"]
    arguments.append("tokenizer_config.tokenizer_path=/a/folder")
    assert cli.main(["tunix", *arguments, "--verbosity=1"]) == cli.EXIT_BAD_INPUT
    assert "error: sgljax_config: page_size must be" in capsys.readouterr().err
    after = (
        list(sys.path),
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        flags.FLAGS.is_parsed(),
        dict(vars(grpo_main)),
        dict(vars(grpo_main.GrpoPipeline)),
    )
    assert after == before


def test_pipelines_follow_one_another_in_a_process():
    for name in command.offered_pipelines():
        if name != "grpo_vllm":  # needs vLLM
            assert command._import_entry(name)[0] == f"{name}_main"
    assert "pathways_bns" in flags.FLAGS


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reinforce", BASE], r"has no pipeline 'reinforce'; it has grpo, "),
        (["grpo"], "must be a path to a base config file"),
        (["grpo", "nowhere.yaml"], "Config nowhere.yaml not found"),
        (["grpo", BASE, "--no_such_flag=1"], "Tunix's flags: Unknown command line flag"),
        (["grpo", BASE, "sgljax_confg.page_size=8"], "Key sgljax_confg was passed"),
    ],
)
def test_bad_input_is_said_in_one_line(arguments, message, capsys):
    assert cli.main(["tunix", *arguments]) == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout_engine=sgljx", "rollout_engine 'sgljx' is unknown; did you mean 'sgljax'?"),
        ("sgljax_config.page_sise=8", "unknown engine option 'page_sise'; did you mean 'page_size"),
    ],
)
def test_a_typo_is_said_before_tunix_asks_for_a_token(override, message, monkeypatch, capsys):
    """With a tokenizer of the hub, for which Tunix needs one."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    words = [BASE, "tokenizer_config.tokenizer_path=Qwen/Qwen3-0.6B", "rollout_engine=sgljax"]
    assert cli.main(["tunix", "grpo", *words, override]) == cli.EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_help_behind_the_pipeline_is_the_commands(capsys):
    assert cli.main(["tunix", "grpo", "--help"]) == 0
    assert "rollout_engine=sgljax" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"page_sise": 8}, "'page_sise'.*page_size"),
        ({"weigth_update_mode": "wait"}, "takes no 'weigth_update_mode'; did you mean 'weight_up"),
        ({"mesh": "(2,4)"}, "takes no 'mesh'; the pipeline decides it"),
        ({"page_size": 0}, "sgljax_config: page_size must be"),  # no engine
        ({"weight_update_mode": "soon"}, "sgljax_config: weight_update_mode must be one of"),
        ({"sampling_params": {"min_p": 2}}, "sgljax_config: min_p must be"),
        ({"sampling_params": {"temperature": 1}}, "sgljax_config: .*RolloutConfig decides it"),
        ({"lora": "soon"}, "sgljax_config: lora must be"),
        ({"lora_scaling": "1"}, "sgljax_config: lora_scaling must be"),
        ({"match_batch_size": 4}, "sgljax_config: match_batch_size=4 needs logprobs_mode"),
    ],
)
def test_bad_options_name_their_key(section, message):
    with pytest.raises(InvalidConfigError, match=message):
        options.rollout_options(section)


def test_a_section_that_is_no_mapping():
    with pytest.raises(InvalidConfigError, match="sgljax_config must be a mapping, got 'fast'"):
        sections.read_section({"sgljax_config": "fast"}, "sgljax_config")


def test_a_mesh_that_needs_more_devices(capsys):
    pipeline = make_pipeline("rollout_engine=sgljax", "actor_model_config.mesh.shape=(64,4)")
    with pytest.raises(InvalidConfigError, match=r"actor_model_config.mesh.shape \(64, 4\) takes"):
        pipeline.create_role_to_mesh()


# ---------------------------------------------------------------------- what a config says


def test_the_yaml_decides_unless_our_engine_is_named(capsys):
    pipeline = make_pipeline()
    assert pipeline.config["rollout_engine"] == "vanilla"
    error = capsys.readouterr().err
    assert error.startswith("rollout_engine is 'vanilla', as the config says")
    assert error.count("\n") == 1


def test_options_reach_the_rollout():
    pipeline = make_pipeline(
        "rollout_engine=sgljax",
        "sgljax_config.max_running_requests=3",
        "sgljax_config.batch_buckets=[1,3]",
        "sgljax_config.sampling_params.stop=['</answer>']",
    )
    cluster = pipeline.create_cluster_config(role_to_mesh=pipeline.create_role_to_mesh())
    assert cluster.rollout_engine.func is SglJaxRollout
    assert cluster.rollout_engine.keywords == {  # no engine
        "max_running_requests": 3,
        "batch_buckets": [1, 3],
        "sampling_params": {"stop": ["</answer>"]},
    }
    # The user said how many; Tunix's own number does not come on top.
    assert cluster.rollout_config.rollout_sglang_jax_max_running_requests is None


def test_the_section_of_the_engine_that_the_recipe_names_is_translated(capsys):
    pipeline = make_pipeline(
        "sglang_jax_config.page_size=128",
        "vllm_config.max_num_seqs=12",
        "vllm_config.hbm_utilization=0.4",  # Tunix's default, written out
        "vllm_config.no_such_key=1",
        "rollout_config.temprature=0.7",
        "rollout_engine=vllm",
        "rollout_engine=sgljax",
    )
    config = pipeline.create_rollout_config()
    assert config.rollout_vllm_max_num_seqs == 12
    assert config.rollout_vllm_hbm_utilization == 0.4
    assert config.rollout_vllm_kwargs == {}  # Tunix's defaults for vLLM stay away
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ
    error = capsys.readouterr().err
    assert "vllm_config is translated" in error
    assert "['rollout_config.temprature', 'vllm_config.no_such_key']" in error


@pytest.mark.parametrize(
    ("engines", "filled", "expected"),
    [
        (["vllm", "sgljax"], ("vllm_config", "sglang_jax_config"), "vllm_config"),
        (["sglang_jax", "sgljax"], ("vllm_config", "sglang_jax_config"), "sglang_jax_config"),
        (["vanilla", "sgljax"], ("vllm_config",), "vllm_config"),
        (["sgljax"], ("vllm_config", "sglang_jax_config"), "sglang_jax_config"),
        (["vllm", "sgljax"], ("sglang_jax_config",), None),
        (["vanilla", "sgljax"], (), None),
    ],
)
def test_which_section_counts(engines, filled, expected):
    config = {name: {"kwargs": {"a": 1}} for name in filled}
    assert sections.recipe_section(config, engines) == expected


@pytest.mark.parametrize(
    ("engine", "overrides", "version"),
    [
        ("vllm", [], "local/qwen3-tiny"),
        ("sglang_jax", ["actor_model_config.model_download_path=/models/tiny"], "/models/tiny"),
        ("vllm", ["vllm_config.model_version=/given"], "/given"),
        ("vanilla", [], ""),
    ],
)
def test_the_model_whose_end_tokens_a_recipes_engine_reads(engine, overrides, version):
    """Else fewer tokens would end a completion than before the one override."""
    words = [f"rollout_engine={engine}", "rollout_engine=sgljax", *overrides]
    assert make_pipeline(*words).create_rollout_config().rollout_vllm_model_version == version


def test_end_tokens_are_beside_a_local_tokenizer(folder):
    words = (f"tokenizer_config.tokenizer_path={folder}", "rollout_engine=vllm")
    config = make_pipeline(*words, "rollout_engine=sgljax").create_rollout_config()
    assert config.rollout_vllm_model_version == str(folder)


def test_values_of_rollout_config_win_over_a_section():
    pipeline = make_pipeline(
        "rollout_engine=sgljax",
        "sglang_jax_config.page_size=64",
        "sglang_jax_config.mem_fraction_static=0.5",
        "rollout_config.rollout_sglang_jax_page_size=32",
    )
    config = pipeline.create_rollout_config()
    assert config.rollout_sglang_jax_page_size == 32
    assert config.rollout_sglang_jax_mem_fraction_static == 0.5
    # All samples of a step, as for Tunix's SGLang engine: 2 prompts, 2 samples each.
    assert config.rollout_sglang_jax_max_running_requests == 4


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({"temperature": 1.0}, {"page_size"}, True),
        ({}, {"max_running_requests"}, False),
        ({}, {"batch_buckets"}, False),
        ({"rollout_vllm_max_num_seqs": 4}, set(), False),
        ({"rollout_vllm_kwargs": {"max_num_seqs": 4}}, set(), False),
        (
            {"rollout_vllm_kwargs": {"swap_space": 4}, "rollout_sglang_jax_kwargs": None},
            set(),
            True,
        ),
    ],
)
def test_who_says_how_many_sequences_run(fields, options, expected):
    assert sections.leaves_batch_open(fields, options) is expected


@pytest.mark.parametrize(
    ("changes", "batch", "mode", "expected"),
    [
        ({"train_micro_batch_size": 1}, 8, "grpo", None),  # the rollout says so
        ({"mini_batch_size": 4}, 8, "ppo", "is 4 (which is not set and follows mini_batch_size)"),
        ({"rollout_micro_batch_size": 2}, 8, "grpo", "is 2 (as set)"),
        ({"rollout_micro_batch_size": 8, "train_micro_batch_size": 1}, 8, "grpo", None),
        ({}, 8, "grpo", None),
        ({"mini_batch_size": 4}, 8, "agentic_grpo", None),
    ],
)
def test_advice_on_micro_batches(changes, batch, mode, expected):
    config = {"rl_training_config": changes, "batch_size": batch, "training_mode": mode}
    advice = sections.micro_batch_advice(config)
    if expected is None:
        assert advice is None
    else:
        assert advice is not None
        assert expected in advice
        assert f"with {batch} there it batches all of them" in advice
