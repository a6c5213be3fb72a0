"""`convert`: Tunix's checkpoints and Hugging Face folders, written as Hugging Face folders."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file
from tunix.models.gemma.model import AttentionType
from tunix.models.gemma3.model import QueryPreAttentionNormalisation
from tunix.models.gemma4 import model as gemma4
from tunix.sft.checkpoint_manager import CheckpointManager

from sgljax_engine import (
    Engine,
    load_model_config,
    read_hf_tensors,
    to_hf_tensors,
    write_hf_tensors,
)
from tests import tunix_families as families
from tests.adapter.helpers import named_params
from tests.engine.models import spread_weights
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL
from tests.tiers import tiered
from tunix_sgljax.cli.convert import parse_size
from tunix_sgljax.cli.main import main
from tunix_sgljax.mappings import to_rules

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

BASE = GOLDEN / "qwen3_gqa_tied"
GEMMA2: dict[str, Any] = {
    "final_logit_softcap": 16.0,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "sliding_window_size": 13,
    "attention_types": (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL) * 2,
}
GEMMA3: dict[str, Any] = {
    "sliding_window_size": 13,
    "local_base_frequency": 10_000,
    "global_base_frequency": 100_000,
    "query_pre_attn_norm": QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_HEAD_DIM,
}
GEMMA4: dict[str, Any] = {
    "sliding_window_size": 13,
    "global_base_frequency": 100_000,
    "final_logit_softcap": 16.0,
}
_LOCAL, _GLOBAL = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL
KEYS_AS_VALUES: dict[str, Any] = {
    **GEMMA4,
    "global_key_size": 24,
    "num_global_kv_heads": 1,
    "k_eq_v_global": True,
    "attention_pattern": (_LOCAL, _LOCAL, _GLOBAL),
}
_SHARED_KEYS: dict[str, Any] = {
    **GEMMA4,
    "global_key_size": 24,
    "per_layer_input_dim": 8,
    "frac_shared_layers": 0.4,
    "override_kv_shared_ffw_hidden": 96,
    "attention_pattern": (_LOCAL, _LOCAL, _GLOBAL, _LOCAL, _GLOBAL),
}
SHARED_KEYS = "gemma4", "params_safetensors", _SHARED_KEYS
FAMILIES = {
    "gemma2_window": ("gemma", "params_safetensors", GEMMA2),
    "gemma3_window": ("gemma3", "params_safetensors", GEMMA3),
    "gemma4_multimodal_keys_as_values": ("gemma4", "params_safetensors", KEYS_AS_VALUES),
    "llama_tied": ("llama3", "params", {"rope_theta": 500_000, "weight_tying": True}),
    "qwen2_bias_untied": ("qwen2", "params", {"rope_theta": 1_000_000}),
    "qwen3_gqa_tied": ("qwen3", "params", {"rope_theta": 1_000_000, "use_tied_embedding": True}),
    "qwen3_mha_sharded": ("qwen3", "params", {"rope_theta": 1_000_000}),
    "qwen3_moe_normalised": (
        "qwen3",
        "params",
        {"rope_theta": 1_000_000, "num_experts": 8, "num_experts_per_tok": 2},
    ),
}
"""Goldens: Tunix's package, the module of its loader, and what its config needs."""


def load_into_tunix(name: str) -> nnx.Module:
    """The model of a golden folder, read by Tunix's own loader."""
    return load_folder(GOLDEN / name, *FAMILIES[name])


def load_folder(folder: Path, package: str, loader: str, more: dict[str, Any]) -> nnx.Module:
    """The model of a folder, see `FAMILIES`."""
    config = load_model_config(folder)
    fields = {
        "num_layers": config.num_layers,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **more,
    }
    if package.startswith("gemma"):
        fields["num_embed"] = config.vocab_size
    else:
        fields |= {"vocab_size": config.vocab_size, "norm_eps": config.rms_norm_eps}
    if "attention_types" in fields:
        fields["attention_types"] = fields["attention_types"][: config.num_layers]
    model_module = importlib.import_module(f"tunix.models.{package}.model")
    params_module = importlib.import_module(f"tunix.models.{package}.{loader}")
    return params_module.create_model_from_safe_tensors(
        str(folder), model_module.ModelConfig(**fields)
    )


def save(model: nnx.Module, folder: Path, step: int) -> None:
    """Writes a checkpoint as Tunix's trainers do."""
    manager = CheckpointManager(str(folder))
    assert manager.save(step, model, force=True)
    manager.close()


def convert(*argv: Any) -> int:
    return main(["convert", *map(str, argv)])


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.load() for name, tensor in read_hf_tensors(folder).items()}


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


@pytest.mark.parametrize("name", tiered(FAMILIES, ["llama_tied", "qwen3_gqa_tied"]))
def test_what_tunix_loaded_and_saved_is_what_the_folder_had(name, tmp_path, capsys):
    save(load_into_tunix(name), tmp_path / "root" / "actor", 3)
    output = tmp_path / "out"
    assert convert(tmp_path / "root", "--base", GOLDEN / name, "--output", output) == 0
    assert_same(tensors_of(output), tensors_of(GOLDEN / name))
    assert ("edit the output's config.json" in capsys.readouterr().err) == (
        name in ("llama_tied", "qwen3_mha_sharded")  # Tunix trains them with another theta
    )


def test_a_multimodal_base_gets_its_language_model_back(tmp_path):
    """With the names that the folder has, and the vision tower as it was."""
    save(load_into_tunix("gemma3_window"), tmp_path / "root" / "actor", 3)
    base, output = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    text = json.loads((GOLDEN / "gemma3_window" / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (base / "config.json").write_text(json.dumps(config))
    tensors = {
        f"language_model.{name}": tensor * 2
        for name, tensor in tensors_of(GOLDEN / "gemma3_window").items()
    }
    tensors["vision_tower.vision_model.q_proj.weight"] = np.ones((2, 3), np.float32)
    save_file(tensors, base / "model.safetensors")
    assert convert(tmp_path / "root", "--base", base, "--output", output) == 0
    wanted = {
        name: tensor / 2 if "language" in name else tensor for name, tensor in tensors.items()
    }
    assert_same(tensors_of(output), wanted)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, base / "model.safetensors")
    assert convert(tmp_path / "root", "--base", base, "--output", tmp_path / "more") == 2


def write_gemma4(folder: Path, *, is_on_hub: bool) -> dict[str, np.ndarray]:
    """A random Gemma 4 with shared keys, as the hub has it or as transformers writes its text part.

    On the hub it is multimodal, and has keys for layers that read those of others.
    """
    text = json.loads((GOLDEN / "gemma4_shared_keys" / "config.json").read_text())
    text["global_head_dim"] = 24  # Tunix's loader takes heads as wide as the model for its inputs
    folder.mkdir()
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config if is_on_hub else text))
    model = load_model_config(folder)
    tensors = spread_weights(model)
    if is_on_hub:
        for layer, like in ((3, 1), (4, 2)):
            for name in ("k_proj", "v_proj", "k_norm"):
                other = tensors[f"model.layers.{like}.self_attn.{name}.weight"]
                tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = other + 1
        tensors = {x.replace("model.", "model.language_model.", 1): tensors[x] for x in tensors}
        tensors["model.vision_tower.patch_embedder.weight"] = np.ones((2, 3), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def gemma4_root(tmp_path_factory):
    """A Gemma 4 with shared keys: its folder, Tunix's model of it, and a checkpoint of that."""
    root = tmp_path_factory.mktemp("gemma4")
    write_gemma4(root / "base", is_on_hub=True)
    model = load_folder(root / "base", *SHARED_KEYS)
    save(model, root / "checkpoints" / "actor", 3)
    return root, model


@pytest.mark.soak
def test_gemma_4_with_keys_that_no_layer_reads(gemma4_root, tmp_path, capsys):
    """Tunix's loader and the engine's take the output, and find the same in it."""
    root, model = gemma4_root
    output = tmp_path / "out"
    assert convert(root / "checkpoints", "--base", root / "base", "--output", output) == 0
    assert_same(tensors_of(output), tensors_of(root / "base"))
    assert "warning" not in capsys.readouterr().err
    given, again = named_params(model), named_params(load_folder(output, *SHARED_KEYS))
    assert_same(*({k: np.asarray(v) for k, v in each.items()} for each in (again, given)))
    config = load_model_config(output)
    rules = to_rules(None, given, config.architecture, config.attention.kv_layers)
    with Engine(output, **SMALL) as engine:
        assert engine.find_differing_weights(given, rules) == []


def test_gemma_4_without_keys_that_no_layer_reads(gemma4_root, tmp_path, capsys):
    """As transformers writes it, and does not need them; but Tunix's own loader does."""
    base, output = tmp_path / "base", tmp_path / "out"
    tensors = write_gemma4(base, is_on_hub=False)
    assert convert(gemma4_root[0] / "checkpoints", "--base", base, "--output", output) == 0
    assert_same(tensors_of(output), tensors)
    assert f"{base} has no keys for layers 3 to 4" in capsys.readouterr().err


def test_gemma_1_whose_folders_tunix_does_not_load():
    model = families.make("gemma_mqa")
    weights = {name: np.asarray(value) for name, value in named_params(model).items()}
    config = load_model_config(GOLDEN / "gemma_mqa")
    config = dataclasses.replace(config, vocab_size=96)
    rules = to_rules(None, weights, config.architecture)
    tensors = {k: v.load() for k, v in to_hf_tensors(config, weights, rules).items()}
    prefix, attn = "model.layers.1.self_attn.", "layers.1.attn."
    q, kv = weights[attn + "q_einsum.w"], weights[attn + "kv_einsum.w"]
    wanted = {
        prefix + "q_proj.weight": np.concatenate([head.T for head in q]),
        prefix + "k_proj.weight": np.concatenate([head.T for head in kv[0]]),
        prefix + "v_proj.weight": np.concatenate([head.T for head in kv[1]]),
        prefix + "o_proj.weight": np.concatenate(list(weights[attn + "attn_vec_einsum.w"])).T,
        "model.layers.1.mlp.up_proj.weight": weights["layers.1.mlp.up_proj.kernel"].T,
        "model.embed_tokens.weight": weights["embedder.input_embedding"],
    }
    assert_same({name: tensors[name] for name in wanted}, wanted)
    assert set(read_hf_tensors(GOLDEN / "gemma_mqa")) == set(tensors)


def test_steps(tmp_path, capsys):
    model: Any = load_into_tunix("qwen3_gqa_tied")
    actor = tmp_path / "root" / "actor"
    for step in (1, 2):
        save(model, actor, step)
        model.final_norm.w[...] = 2 * model.final_norm.w[...]
    base = ["--base", BASE, "--quiet"]
    assert convert(actor, *base, "--step", 2, "--output", tmp_path / "a") == 0
    one = actor / "2"
    assert convert(one, *base, "--output", tmp_path / "b") == 0
    assert convert(one / "model_params", *base, "--output", tmp_path / "c") == 0
    assert convert(actor, *base, "--step", 1, "--output", tmp_path / "first") == 0
    a, b, c, first = (tensors_of(tmp_path / name) for name in ("a", "b", "c", "first"))
    assert_same(a, b)
    assert_same(a, c)
    assert_same(first, tensors_of(BASE))
    np.testing.assert_array_equal(a["model.norm.weight"], 2 * first["model.norm.weight"])
    assert capsys.readouterr().err == ""
    assert convert(actor, *base, "--step", 999, "--output", tmp_path / "d") == 2
    assert "has no step 999; it has [1, 2]" in capsys.readouterr().err
    assert convert(one, *base, "--step", 999, "--output", tmp_path / "d") == 2
    assert "is one checkpoint, but step 999 is asked for" in capsys.readouterr().err


def test_dtype_and_shards(tmp_path):
    output, again = tmp_path / "out", tmp_path / "again"
    argv = ["--dtype", "bfloat16", "--max-shard-size", "60KB"]
    assert convert(BASE, "--output", output, *argv) == 0
    shards = sorted(output.glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((output / "model.safetensors.index.json").read_text())
    original = tensors_of(BASE)
    assert set(index["weight_map"]) == set(original)
    assert index["metadata"]["total_size"] == sum(2 * x.size for x in original.values())
    for shard in shards:
        assert shard.stat().st_size < 62_000
        with safe_open(shard, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (output / name).read_bytes() == (BASE / name).read_bytes()
    assert convert(output, "--output", again, "--dtype", "float32") == 0
    assert [path.name for path in again.glob("model*")] == ["model.safetensors"]
    for name, tensor in tensors_of(again).items():
        assert tensor.dtype == np.float32
        np.testing.assert_allclose(tensor, original[name], rtol=2**-8)
    assert load_model_config(again) == load_model_config(BASE)


def test_names_that_do_not_fit_are_all_listed(tmp_path, capsys):
    save(load_into_tunix("qwen3_gqa_tied"), tmp_path / "root" / "actor", 1)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text((BASE / "config.json").read_text())
    tensors = read_hf_tensors(BASE)
    tensors["extra.weight"] = tensors.pop("model.norm.weight")
    write_hf_tensors(tensors, base, max_shard_bytes=10**9)
    argv = [tmp_path / "root", "--base", base, "--output", tmp_path / "out"]
    assert convert(*argv) == 2
    message = capsys.readouterr().err
    assert "'extra.weight' of" in message
    assert "'model.norm.weight' is not in" in message
    other = GOLDEN / "qwen3_mqa_untied"
    assert convert(tmp_path / "root", "--base", other, "--output", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "weights do not fit the model (" in message
    assert "for 'model." in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([BASE, "--output", BASE], "--output must not exist"),
        ([BASE, "--output", "x", "--base", BASE], "--base and --step go with a Tunix checkpoint"),
        ([BASE, "--output", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        ([BASE, "--output", "x", "--max-shard-size", "5XB"], "got '5XB'"),
        (["nowhere", "--output", "x"], "SOURCE must be a folder, and there is no 'nowhere'"),
        (["nowhere", "--output", "x", "--base", BASE], "SOURCE must be a folder, and there is no"),
        ([GOLDEN, "--output", "x", "--base", BASE], "holds no checkpoint: expected a folder"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert convert(*argv) == 2
    assert message in capsys.readouterr().err


def test_sizes():
    sizes = {"500MB": 500_000_000, "2GiB": 2 << 30, "1.5 kb": 1500, "7": 7}
    for text, size in sizes.items():
        assert parse_size(text) == size


def test_half_of_a_lora_pair_is_refused(tmp_path, capsys):
    class Adapter(nnx.Module):
        def __init__(self):
            self.w_lora_a = nnx.LoRAParam(np.ones((2, 2), np.float32))

    save(Adapter(), tmp_path / "root", 1)
    argv = [tmp_path / "root", "--base", BASE, "--output", tmp_path / "out", "--lora-alpha", "8"]
    assert convert(*argv) == 2
    assert "'w_lora_b' is missing: half a pair" in capsys.readouterr().err
