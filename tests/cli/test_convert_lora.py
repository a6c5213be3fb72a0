"""`convert` of LoRA checkpoints: merged into a folder, and as an adapter that PEFT loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgljax_engine import Engine, HfTensor, load_model_config, to_hf_tensors
from tests import lora_models
from tests.adapter.helpers import named_params
from tests.cli import lora_checkpoints as checkpoints
from tests.cli.test_convert import assert_same, convert, tensors_of
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL
from tests.tiers import tiered
from tunix_sgljax.checkpoints.lora_files import HfPair, peft_config
from tunix_sgljax.checkpoints.lora_settings import LoraSettings, write_settings
from tunix_sgljax.lora import find_lora
from tunix_sgljax.mappings import lora_factor, lora_in_axes, to_rules

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

BASE = GOLDEN / "qwen3_gqa_tied"


def engines_own(name, model):
    """The merged tensors by the engine's LoRA rules, whose scale and axes are the model's own."""
    config = load_model_config(GOLDEN / name)
    weights = {key: np.asarray(value) for key, value in named_params(model).items()}
    plain = {key: value for key, value in weights.items() if "_lora_" not in key}
    found = find_lora(model, None)
    assert found is not None
    rules = (*to_rules(None, plain, config.architecture), *found.rules)
    prefix = "model.language_model." if "multimodal" in name else "model."
    tensors = to_hf_tensors(config, weights, rules).items()
    return {k.replace("model.", prefix, 1): v.load() for k, v in tensors}


def differing(got, base):
    return {name for name, tensor in got.items() if not np.array_equal(tensor, base[name])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The Qwen3 golden with pairs everywhere: the model, and a checkpoint of its pairs."""
    model = checkpoints.make("qwen3_gqa_tied")
    return model, checkpoints.save(model, tmp_path_factory.mktemp("lora"))


# ------------------------------------------------------------------ merged


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_gqa_tied",
        pytest.param("gemma4_multimodal_keys_as_values", marks=pytest.mark.soak),
        pytest.param("qwen3_moe_normalised", marks=pytest.mark.soak),
    ],
)
def test_pairs_are_merged_as_the_engine_does_it(name, tmp_path):
    model = checkpoints.make(name, "two")
    root = checkpoints.save(model, tmp_path / "root")
    output = tmp_path / "out"
    argv = [root, "--base", GOLDEN / name, "--output", output]
    assert convert(*argv, "--lora-alpha", checkpoints.ALPHA) == 0
    got, wanted = tensors_of(output), engines_own(name, model)
    assert set(got) == set(wanted)
    for key, tensor in wanted.items():
        np.testing.assert_allclose(got[key], tensor, rtol=1e-6, atol=1e-6, err_msg=key)
    changed = differing(got, tensors_of(GOLDEN / name))
    config = load_model_config(GOLDEN / name)
    num_values = sum(not config.values_are_keys(layer) for layer in range(config.num_layers))
    num_in_mlps = 2 if config.moe is None else 0  # qwix has no pairs for experts
    assert len(changed) == 3 * config.num_layers + num_values + num_in_mlps


@pytest.mark.soak
def test_an_adapter_of_a_multimodal_model_names_its_modules(tmp_path):
    name, output = "gemma4_multimodal_keys_as_values", tmp_path / "out"
    root = checkpoints.save(checkpoints.make(name, "two"), tmp_path / "root")
    argv = [root, "--base", GOLDEN / name, "--output", output, "--peft"]
    assert convert(*argv, "--lora-alpha", checkpoints.ALPHA) == 0
    prefix, found = "base_model.model.model.language_model.layers.", set()
    for key in load_file(output / "adapter_model.safetensors"):
        assert key.startswith(prefix)
        found.add(key.removeprefix(prefix))
    assert "1.self_attn.v_proj.lora_A.weight" in found
    assert "2.self_attn.k_proj.lora_B.weight" in found
    assert "2.self_attn.v_proj.lora_A.weight" not in found  # the keys are the values


@pytest.mark.parametrize("name", tiered(lora_models.MODELS, ["gqa2_tied", "gemma_mha"], []))
def test_the_axes_and_the_scale_of_each_pair_are_known(name):
    found = find_lora(lora_models.make(name), None)
    assert found is not None
    assert len(found.rules) >= 2 * 5
    for rule in found.rules:
        assert lora_in_axes(rule.weight) == rule.in_axes, rule.weight
        # Gemma 4 multiplies one weight by a factor, and not its pair.
        assert rule.scale == pytest.approx(2.0 / lora_factor(rule.weight, num_in=32)), rule.weight


@pytest.mark.slow
def test_a_checkpoint_of_everything_gives_the_same(saved, tmp_path):
    model, root = saved
    whole = checkpoints.save(model, tmp_path / "whole", only_pairs=False)
    argv = ["--base", BASE, "--lora-scaling", checkpoints.ALPHA / 4, "--quiet"]
    assert convert(whole, *argv, "--output", tmp_path / "a") == 0
    assert convert(root, *argv, "--output", tmp_path / "b") == 0
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


def test_sums_are_rounded_once(saved, tmp_path):
    base = tmp_path / "base"
    assert convert(BASE, "--output", base, "--dtype", "bfloat16") == 0
    argv = [saved[1], "--base", base, "--lora-alpha", checkpoints.ALPHA]
    assert convert(*argv, "--output", tmp_path / "half") == 0
    assert convert(*argv, "--output", tmp_path / "full", "--dtype", "float32") == 0
    half, full = tensors_of(tmp_path / "half"), tensors_of(tmp_path / "full")
    assert_same(half, {name: full[name].astype(half[name].dtype) for name in half})
    assert differing({name: tensor.astype(np.float32) for name, tensor in half.items()}, full)


def test_what_train_wrote_beside_the_checkpoint_tells_the_scale(saved, tmp_path):
    model, _ = saved
    root = checkpoints.save(model, tmp_path / "root")
    write_settings(root, LoraSettings(rank=4, alpha=checkpoints.ALPHA, module_path=".*"))
    base = ["--base", BASE, "--quiet"]
    assert convert(root, *base, "--output", tmp_path / "a") == 0
    assert convert(root / "actor/5", *base, "--output", tmp_path / "b") == 0
    assert convert(root, *base, "--output", tmp_path / "c", "--lora-alpha", 6) == 0
    assert convert(root, *base, "--output", tmp_path / "d", "--lora-alpha", 3) == 0
    a, b, c, d = (tensors_of(tmp_path / letter) for letter in "abcd")
    assert_same(a, b)
    assert_same(a, c)
    assert differing(a, d)


# ------------------------------------------------------------------ adapters


@pytest.mark.parametrize("name", tiered(checkpoints.ADAPTERS, ["qwen3_gqa_tied"]))
def test_the_adapter_is_the_one_that_peft_was_given(name, tmp_path):
    """tests/golden/make_peft_goldens.py has loaded these very files with PEFT."""
    root = checkpoints.save(checkpoints.make(name, checkpoints.ADAPTERS[name]), tmp_path / "root")
    output = tmp_path / "out"
    argv = [root, "--base", GOLDEN / name, "--output", output, "--peft"]
    assert convert(*argv, "--lora-alpha", checkpoints.ALPHA) == 0
    golden = GOLDEN / "adapters" / name
    assert sorted(path.name for path in output.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    got, wanted = (load_file(f / "adapter_model.safetensors") for f in (output, golden))
    assert_same(got, wanted)
    configs = [json.loads((f / "adapter_config.json").read_text()) for f in (output, golden)]
    assert configs[0].pop("base_model_name_or_path") == str(GOLDEN / name)
    configs[1].pop("base_model_name_or_path")
    assert configs[0] == configs[1]


def prompts_and_logits(name):
    golden = np.load(GOLDEN / "adapters" / name / "peft.npz")
    for i in range(int(golden["num_prompts"])):
        yield golden[f"prompt_{i}"], golden[f"logits_{i}"]


@pytest.mark.soak
def test_peft_computes_what_was_trained():
    model = checkpoints.make("qwen3_gqa_tied", checkpoints.ADAPTERS["qwen3_gqa_tied"])
    for prompt, logits in prompts_and_logits("qwen3_gqa_tied"):
        np.testing.assert_allclose(checkpoints.logits(model, prompt), logits, atol=1e-3)


@pytest.mark.parametrize("name", tiered(checkpoints.ADAPTERS, ["qwen3_gqa_tied"]))
def test_peft_computes_what_the_merged_model_does(name, tmp_path):
    root = checkpoints.save(checkpoints.make(name, checkpoints.ADAPTERS[name]), tmp_path / "root")
    argv = [root, "--base", GOLDEN / name, "--output", tmp_path / "out"]
    assert convert(*argv, "--lora-alpha", checkpoints.ALPHA) == 0
    prompts, logits = zip(*prompts_and_logits(name), strict=True)
    with Engine(tmp_path / "out", **SMALL) as engine:
        found = engine.score([prompt.tolist() for prompt in prompts])
    for prompt, wanted, logps in zip(prompts, logits, found, strict=True):
        wide = wanted.astype(np.float64)
        wide -= np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
        wide -= wanted.max(-1, keepdims=True)
        expected = wide[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(logps, expected, atol=1e-4)


def test_ranks_and_alphas_of_an_adapters_modules():
    def pair(rank, scale):
        return HfPair(np.zeros((rank, 2)), np.zeros((3, rank)), scale)

    sizes = {"q_proj": (4, 2.0), "v_proj": (2, 2.0), "o_proj": (2, 4.0)}
    names = {name: f"model.layers.0.self_attn.{name}.weight" for name in sizes}
    tensors = {x: HfTensor((3, 2), np.dtype("f4"), lambda: np.zeros(0)) for x in names.values()}
    pairs = {names[name]: pair(*size) for name, size in sizes.items()}
    config = peft_config(pairs, tensors, "x")
    for name, (rank, scale) in sizes.items():
        alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
        found = config["rank_pattern"].get(name, config["r"]), alpha
        assert found == (rank, rank * scale)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing tells the scale of the LoRA pairs"),
        (["--peft"], "give --lora-alpha"),
        (["--lora-alpha", "8", "--lora-scaling", "2"], "give one of them"),
        (["--lora-scaling", "nan"], "--lora-scaling must be finite, got nan"),
        (["--lora-alpha", "8", "--peft", "--max-shard-size", "1GB"], "an adapter is one file"),
    ],
)
def test_bad_options(saved, tmp_path, capsys, options, message):
    argv = [saved[1], "--base", BASE, "--output", tmp_path / "out"]
    assert convert(*argv, *options) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_that_nothing_reads(tmp_path, capsys):
    root = checkpoints.save(
        checkpoints.load_into_tunix("qwen3_gqa_tied"), tmp_path / "root", only_pairs=False
    )
    argv = [root, "--base", BASE, "--output", tmp_path / "out"]
    assert convert(*argv, "--lora-alpha", 8) == 2
    assert "go with LoRA parameters" in capsys.readouterr().err
    assert convert(*argv, "--peft") == 2
    assert "--peft needs LoRA parameters" in capsys.readouterr().err
    assert convert(BASE, "--output", tmp_path / "out", "--lora-alpha", 8) == 2
    assert "--lora-alpha and --lora-scaling go with a Tunix checkpoint" in capsys.readouterr().err
    assert convert(BASE, "--output", tmp_path / "out", "--peft") == 2
    assert "--peft needs a Tunix checkpoint" in capsys.readouterr().err


def test_an_adapter_never_leaves_out_what_else_was_trained(saved, tmp_path, capsys):
    model, _ = saved
    other = checkpoints.make("qwen3_gqa_tied")
    other.final_norm.w[...] = model.final_norm.w[...] + 1
    root = checkpoints.save(other, tmp_path / "root", only_pairs=False)
    argv = [root, "--base", BASE, "--output", tmp_path / "out", "--lora-alpha", 8, "--peft"]
    assert convert(*argv) == 2
    assert "'model.norm.weight' of the checkpoint is not that of" in capsys.readouterr().err


def test_pairs_of_another_model_are_all_listed(saved, tmp_path, capsys):
    argv = [saved[1], "--base", GOLDEN / "qwen3_mqa_untied", "--output", tmp_path / "out"]
    assert convert(*argv, "--lora-alpha", 8) == 2
    message = capsys.readouterr().err
    assert "do not fit (" in message
    assert "'layers.0.attn.k_proj.w': A and B make" in message
    assert not (tmp_path / "out").exists()
