"""Parts of a training run: rewards, rows, batches, optimizers, models, the critic, memory."""

import dataclasses
import itertools
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.common import compute_score

from sgljax_engine import InvalidConfigError, WeightLoadError
from tests.training.tiny import shape_of, write_config
from tunix_sgljax.training import load_config
from tunix_sgljax.training.cluster import (
    end_tokens,
    make_meshes,
    make_optimizer,
    make_optimizers,
)
from tunix_sgljax.training.memory import estimate_memory
from tunix_sgljax.training.models import (
    abstract_critic,
    find_model,
    load_policy,
    load_tokenizer,
    make_critic,
)
from tunix_sgljax.training.report import EvalRecord, RecordFile, StepRecord, write_json
from tunix_sgljax.training.rewards import BUILT_IN, whole_numbers
from tunix_sgljax.training.schema import MeshConfig, ModelSection, RolloutModelSection, TaskSection
from tunix_sgljax.training.task import batches, load_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

HF_FOLDER = Path(__file__).parents[1] / "golden/qwen3_gqa_tied"


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "completion", "answer", "reward"),
    [
        ("exact_match", " 42\n", "42", 1.0),
        ("exact_match", "It is 42", "42", 0.0),
        ("last_number", "6 times 7 makes 42.", "#### 42", 1.0),
        ("last_number", "1,234.5", "1234.50", 1.0),
        ("last_number", "-3", "3", 0.0),
        ("last_number", "none", "none", 0.0),
    ],
)
def test_built_in_rewards(name, completion, answer, reward):
    assert BUILT_IN[name](prompts=["q"], completions=[completion], answer=[answer]) == [reward]


def test_whole_numbers_keeps_the_name_and_refuses_fractions():
    checked = whole_numbers(lambda prompts, completions: [len(text) / 2 for text in completions])
    assert checked(prompts=[], completions=["ab", "abcd"]) == [1.0, 2.0]
    with pytest.raises(InvalidConfigError, match=r"whole numbers with PPO, got 0\.5"):
        checked(prompts=[], completions=["a"])
    assert whole_numbers(BUILT_IN["exact_match"]).__name__ == "exact_match"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_a_file(tmp_path, suffix):
    rows = [{"q": f"{i} + {i}", "answer": 2 * i, "why": ["nested"]} for i in range(3)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    section = TaskSection(dataset=str(path), prompt_template="Q: {q} A:", columns=["answer"])
    task = load_task(section, None)
    assert task.rows == [{"prompts": f"Q: {i} + {i} A:", "answer": 2 * i} for i in range(3)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "a", "must be a .jsonl or .parquet file or module:function"),
        ("rows.jsonl", '{"a": 1}\n{', "line 2 is no JSON"),
        ("rows.jsonl", "\n", "holds no rows"),
        ("rows.jsonl", "[1]\n", "must hold mappings"),
        ("rows.jsonl", None, "cannot be read: No such file"),
    ],
)
def test_files_without_rows_are_refused(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidConfigError, match=message):
        load_task(TaskSection(dataset=str(tmp_path / name)), None)


def test_chat_prompts_come_from_the_tokenizers_template(tmp_path):
    path = write_config(
        tmp_path,
        actor_model_config={"model_path": str(HF_FOLDER)},
        tokenizer_config={"pad_token": None},
        task={"dataset": "x.jsonl", "chat": True, "system_prompt": "Be brief."},
    )
    (tmp_path / "x.jsonl").write_text('{"prompts": "Hi", "answer": "x"}\n')
    config = load_config(path)
    tokenizer = load_tokenizer(config)
    prompt = load_task(config.task, tokenizer).rows[0]["prompts"]
    assert isinstance(tokenizer, TokenizerAdapter)
    assert "Hi" in prompt
    assert "Be brief." in prompt
    assert prompt != "Hi"


def test_records_survive_a_full_disk(tmp_path, config):
    """A limit of the file size stands for the disk; the older file stays as it was."""
    path = tmp_path / "out" / "records.json"
    record = StepRecord(1, 0.5, 1.0, 8, 2.0, 1)
    write_json(path, config, [record])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, config, [record, record])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    write_json(path, config, [record, record])
    assert len(json.loads(path.read_text())["steps"]) == 2


def test_records_of_a_resumed_run_stand_behind_the_earlier_ones(tmp_path, config, caplog):
    path = tmp_path / "records.json"
    first = RecordFile(path, config, 0)
    steps = [StepRecord(step, step / 10, 1.0, 8, 2.0, 0) for step in (1, 2, 3)]
    first.update(steps, [EvalRecord(0, 0.1), EvalRecord(2, 0.2), EvalRecord(3, 0.3)])
    again = StepRecord(3, 0.9, 1.0, 8, 2.0, 0)
    RecordFile(path, config, 2).update([again], [EvalRecord(2, 0.7)])  # step 3 was lost
    content = json.loads(path.read_text())
    assert content["steps"] == [each._asdict() for each in (*steps[:2], again)]
    assert [tuple(each.values()) for each in content["evaluations"]] == [(0, 0.1), (2, 0.7)]
    RecordFile(path, config, 0).update([again], [])  # a run of its own
    assert len(json.loads(path.read_text())["steps"]) == 1
    assert not caplog.records
    path.write_text("{}")
    RecordFile(path, config, 2).update([again], [])
    assert "holds no records that could be kept" in caplog.text


def test_batches_use_each_row_once_an_epoch():
    rows = [{"prompts": str(i)} for i in range(5)]

    def epochs(seed):
        made = itertools.islice(batches(rows, 2, seed), 5)
        flat = [str(prompt) for batch in made for prompt in batch["prompts"]]
        return flat[:5], flat[5:]

    assert epochs(None) == (list("01234"), list("01234"))
    first, second = epochs(7)
    assert sorted(first) == sorted(second) == list("01234")
    assert first != second
    assert epochs(7) == (first, second)


def test_schedules_rise_and_fall():
    for peak in ("learning_rate", "peak_value"):
        section = {
            "opt_type": "sgd",
            peak: 1.0,
            "schedule_type": "warmup_cosine_decay_schedule",
            "warmup_steps": 2,
        }
        optimizer, params = make_optimizer("o", section, 6), jnp.ones(())
        state, sizes = optimizer.init(params), []
        for _ in range(7):
            update: Any
            update, state = optimizer.update(params, state, params)
            sizes.append(-float(update))
        assert sizes[:3] == [0.0, 0.5, 1.0]
        assert sizes[2:] == sorted(sizes[2:], reverse=True)
        assert sizes[-1] == 0.0


@pytest.mark.parametrize("name", [HF_FOLDER.name, "qwen3_moe_normalised"])
def test_model_of_an_hf_folder_has_its_weights(config, name):
    folder = HF_FOLDER.with_name(name)
    section = ModelSection(model_path=str(folder), dtype="float32")
    spec = find_model(section)
    assert spec.family == "qwen3"
    model: Any = load_policy(section, spec, make_meshes(config)[0])
    stored = load_file(folder / "model.safetensors")
    mlp, layer = model.layers[1].mlp, "model.layers.1.mlp"
    pairs = [(model.embedder.input_embedding, "model.embed_tokens.weight")]
    if spec.config.num_experts:
        assert (spec.config.num_experts, spec.config.num_experts_per_tok) == (8, 2)
        experts = np.asarray(mlp.up_proj[...])
        pairs += [(experts[n].T, f"{layer}.experts.{n}.up_proj.weight") for n in (0, 7)]
    else:
        pairs += [(mlp.gate_proj.kernel[...].T, f"{layer}.gate_proj.weight")]
    for array, stored_name in pairs:
        np.testing.assert_array_equal(np.asarray(array[...]), stored[stored_name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_path": "nowhere"}, "model_path must be a folder, and there is no .nowhere."),
        ({"model_name": "qwen3-0.6b"}, "no qwen3-0.6b: its num_layers"),
        ({"model_name": "llama-3.2-3b"}, "no llama-3.2-3b: its family"),
        ({"model_path": str(HF_FOLDER.with_name("gemma_mqa"))}, "holds a GemmaForCausalLM"),
        ({"model_path": None, "model_name": "qwen9"}, "is no model that Tunix knows"),
        ({"model_path": None, "model_name": "gemma-2b"}, "'gemma-2b' is a gemma; training reads q"),
    ],
)
def test_models_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InvalidConfigError, match=message):
        find_model(ModelSection(**{"model_path": str(HF_FOLDER), **given}))


def test_shards_of_an_older_model_are_refused(tmp_path):
    """Tunix's loader would read all safetensors files of the folder."""
    folder = shutil.copytree(HF_FOLDER, tmp_path / "model")
    shutil.copyfile(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    message = r"holds model-00001-of-00002\.safetensors beside the model's model\.safetensors"
    with pytest.raises(WeightLoadError, match=message):
        find_model(ModelSection(model_path=str(folder)))


def test_checkpoint_of_another_model_is_refused(config, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"embedder.input_embedding": np.zeros((2, 2), np.float16)}, path)
    section = ModelSection(
        family="qwen3", shape=config.actor_model_config.shape, checkpoint=str(path)
    )
    message = r"embedding has shape \(2, 2\) there and \(64, 32\)"
    with pytest.raises(InvalidConfigError, match=message):
        load_policy(section, find_model(section), make_meshes(config)[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.soak), "qwen3"])
def test_critic_gives_a_value_to_each_token(config, family):
    section = ModelSection(family=family, shape=shape_of(family))
    mesh = make_meshes(config)[0]
    spec = find_model(section)
    policy = load_policy(section, spec, mesh)
    critic = make_critic(spec, policy, mesh, seed=3)
    prompts, completions = jnp.array([[0, 5, 6]]), jnp.array([[7, 8, 0, 0]])
    values = compute_score(critic, prompts, completions, 0, 1)
    assert values.shape == (1, 7)
    assert np.isfinite(values).all()
    assert np.asarray(values)[0, 1] != np.asarray(values)[0, 2]


def test_critic_of_llama3_is_refused():
    spec = find_model(ModelSection(family="llama3", shape=shape_of("llama3")))
    with pytest.raises(InvalidConfigError, match="ppo needs a model of qwen2 or qwen3, got llama3"):
        abstract_critic(spec)


def test_rows_come_from_a_module_beside_the_config(tmp_path, monkeypatch):
    """Also where nothing else has put `task.code_dir` on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rows_beside.py").write_text("def rows():\n    return [{'prompts': 'a'}]\n")
    section = TaskSection(
        code_dir=str(tmp_path), dataset="rows_beside:rows", reward_functions=["exact_match"]
    )
    assert load_task(section, None).rows == [{"prompts": "a"}]


def test_a_task_that_is_not_there_is_said_before_tunix_is_imported(tmp_path):
    """It takes a second, not the twenty that Tunix's imports and a model's shapes take."""
    path = write_config(tmp_path, task__dataset="tiny_task:rowz")
    code = (
        "import sys; from tunix_sgljax.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'jax', 'tunix'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, "train", "--config", str(path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"
    assert "task.dataset" in done.stderr
    assert "'rows'" in done.stderr or "rows?" in done.stderr


def test_end_tokens_are_the_models_too(config, tmp_path):
    """The folder of an instruct model has more of them than its tokenizer."""
    folder = shutil.copytree(HF_FOLDER, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    of_folder = dataclasses.replace(config, actor_model_config=ModelSection(model_path=str(folder)))
    assert end_tokens(of_folder, 2) == [2, 1, 7]
    assert end_tokens(config, 2) is None
    of_folder.rollout_config["eos_tokens"] = [5]
    assert end_tokens(of_folder, 2) == [5]


def test_memory_is_that_of_the_arrays(config):
    mesh, _ = make_meshes(config)
    spec = find_model(config.actor_model_config)
    memory = estimate_memory(config, spec, mesh, make_optimizers(config))
    policy = load_policy(config.actor_model_config, spec, mesh)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(policy, nnx.Param)))
    assert memory.policy == memory.gradients == memory.reference == memory.engine_weights == size
    assert 2 * size <= memory.optimizer <= 2 * size + 16  # Adam's moments and its count
    assert memory.critic == 0
    # Keys and values of 2 layers, 2 heads of 8 channels, float32; 8 rows of 16 tokens.
    assert memory.kv_cache == 2 * 2 * 2 * 8 * 4 * 8 * 16
    parts = (memory.optimizer, memory.logits, memory.kv_cache)
    assert memory.total == 4 * size + sum(parts)


@pytest.mark.parametrize(("num_shards", "num_copies"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_memory_counts_copies_of_kv_heads(config, num_shards, num_copies):
    mesh, _ = make_meshes(config)
    spec, optimizers = find_model(config.actor_model_config), make_optimizers(config)
    whole = estimate_memory(config, spec, mesh, optimizers)
    section = RolloutModelSection(mesh=MeshConfig(shape=[1, num_shards]))
    config = dataclasses.replace(config, rollout_model_config=section)
    part = estimate_memory(config, spec, mesh, optimizers)
    assert part.kv_cache == whole.kv_cache * num_copies // num_shards
    # Projections to keys and values of 2 layers, 2 heads of 8 channels, float32.
    copied = 2 * 2 * 2 * 8 * spec.config.embed_dim * 4
    size = whole.engine_weights + (num_copies - 1) * copied
    assert part.engine_weights == size // num_shards
