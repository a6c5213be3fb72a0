"""Writes the policy of the addition task as a Hugging Face folder.

    python examples/hf_folder.py outputs/addition_hf

The folder holds config.json, generation_config.json, safetensors and a tokenizer with a chat
template, as any model's folder does, so that everything that takes a model's path can be tried
without a download.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast
from tunix.models.qwen3 import model as qwen3

from addition_task import Tokenizer, model_config

CHECKPOINT = Path(__file__).parent / "data/addition_sft.safetensors"
CONTEXT_LENGTH = 512

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}= A:"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
"""A user's message is a sum, `37+58`; the answer is what the policy writes after its prompt."""


def hf_config(config: qwen3.ModelConfig) -> dict[str, object]:
    """Returns config.json of a policy of this shape."""
    tokenizer = Tokenizer()
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.use_tied_embedding,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "pad_token_id": tokenizer.pad_id(),
        "bos_token_id": tokenizer.bos_id(),
        "eos_token_id": tokenizer.eos_id(),
    }


def hf_weights(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns the parameters in a task's checkpoint by their Hugging Face names, in float32.

    Tunix stores a projection as [in, heads, head] and [in, out], Hugging Face as [out, in].
    """
    weights = {}
    with safe_open(checkpoint, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            array = file.get_tensor(name).astype(np.float32)
            if name.endswith("o_proj.w"):
                array = array.reshape(-1, array.shape[-1]).T
            elif array.ndim > 1 and not name.startswith("embedder."):
                array = array.reshape(array.shape[0], -1).T
            weights[_hf_name(name)] = np.ascontiguousarray(array)
    return weights


def _hf_name(name: str) -> str:
    if name == "embedder.input_embedding":
        return "model.embed_tokens.weight"
    if name == "final_norm.w":
        return "model.norm.weight"
    stem = name.rpartition(".")[0].replace(".attn.", ".self_attn.")
    return f"model.{stem}.weight"


def hf_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the task's tokenizer, a token per character, as Hugging Face's library has it."""
    special = ["<pad>", "<bos>", "<eos>"]
    first_id = len(special)
    characters = [Tokenizer().decode([i]) for i in range(first_id, Tokenizer.vocab_size)]
    vocab = {token: i for i, token in enumerate([*special, *characters])}
    fast = FastTokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    fast.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = "<bos>" + CHAT_TEMPLATE
    return tokenizer


def write_hf_folder(
    folder: Path, checkpoint: Path = CHECKPOINT, config: qwen3.ModelConfig | None = None
) -> Path:
    """Writes a policy as a Hugging Face folder, and returns the folder.

    Args:
        folder: Made if it does not exist.
        checkpoint: What `addition_task.save_checkpoint` wrote.
        config: The policy's shape; None takes that of the addition task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = hf_config(config or model_config())
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    generation = {"eos_token_id": shape["eos_token_id"], "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(hf_weights(checkpoint), folder / "model.safetensors", {"format": "np"})
    hf_tokenizer().save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Writes the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Write the addition policy as an HF folder.")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    print(f"wrote {write_hf_folder(args.folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
