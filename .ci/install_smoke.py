"""What an installed tunix-sgljax must do: generate, train's calls, new weights, sleep.

    python install_smoke.py

It runs outside the checkout with nothing but the installed packages, and prints one JSON object:
the versions, and the outcome and seconds of each check. `install_matrix.py` runs it in every
environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path

PACKAGES = (
    "tunix-sgljax",
    "google-tunix",
    "jax",
    "jaxlib",
    "flax",
    "qwix",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
)
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
PROMPTS = [[3, 5, 7, 9], [3, 5, 7, 9, 11, 13], [4]]
NUM_TOKENS = 6


def check_imports() -> None:
    """The packages come from the environment, and load neither JAX nor Tunix."""
    import sgljax_engine
    import tunix_sgljax

    site_packages = Path(sysconfig.get_paths()["purelib"]).resolve()
    for package in (sgljax_engine, tunix_sgljax):
        path = Path(package.__file__ or "").resolve()
        if site_packages not in path.parents:
            raise AssertionError(f"{package.__name__} is at {path}, not below {site_packages}")
        if not (path.parent / "py.typed").is_file():
            raise AssertionError(f"{package.__name__} has no py.typed")
    heavy = sorted({"jax", "tunix", "flax", "transformers"} & set(sys.modules))
    if heavy:
        raise AssertionError(f"importing the packages imported {heavy}")
    for package in (sgljax_engine, tunix_sgljax):
        for name in package.__all__:
            getattr(package, name)


def write_model(folder: Path) -> None:
    """A Qwen3 of a few thousand parameters with a word tokenizer, as transformers saves them."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    hidden, inner, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    heads, kv_heads, head_dim = 2, 1, SHAPE["head_dim"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(SHAPE["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{layer}.self_attn.q_norm.weight": (head_dim,),
            f"{layer}.self_attn.k_norm.weight": (head_dim,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        **SHAPE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | names))


def check_engine() -> None:
    """Text and ids from an HF folder, a stream, log-probs, pause, and sleep with its state."""
    from sgljax_engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with Engine(folder, page_size=4, max_running_requests=4, max_model_len=32) as engine:
            greedy = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            text = engine.generate("w3 w5 w7 w9", greedy)
            outputs = engine.generate(input_ids=PROMPTS, sampling_params=greedy)
            assert text["output_ids"] == outputs[0]["output_ids"]
            assert [len(output["output_ids"]) for output in outputs] == [NUM_TOKENS] * 3
            sampled = {"temperature": 0.9, "top_p": 0.9, "top_k": 8, "seed": 1}
            pieces = list(engine.generate("w4", {**sampled, "max_new_tokens": 3}, stream=True))
            assert pieces[-1]["meta_info"]["finish_reason"]
            engine.pause_generation("retract")
            engine.continue_generation()
            engine.sleep(preserve_state=True)
            assert engine.is_sleeping()
            engine.wake_up()
            again = engine.generate(input_ids=PROMPTS, sampling_params=greedy)
            assert [o["output_ids"] for o in again] == [o["output_ids"] for o in outputs]
            engine.check_integrity()


class IntegerTokenizer:
    """Text is its ids."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids that `text` lists."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Returns `ids` as text."""
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        """Returns the pad id: Tunix prepends none."""
        return 0

    def eos_id(self) -> int:
        """Returns the end."""
        return 2

    def pad_id(self) -> int:
        """Returns 0."""
        return 0


def check_rollout() -> None:
    """A rollout of a Tunix model: log-probs, new weights, sleep and wake."""
    import jax
    import numpy as np
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from tunix_sgljax import SglJaxRollout

    shape = {
        "num_layers": 2,
        "vocab_size": 32,
        "embed_dim": 16,
        "hidden_dim": 24,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "use_tied_embedding": True,
    }
    model = Qwen3(ModelConfig(**shape), rngs=nnx.Rngs(0))
    config = RolloutConfig(
        max_tokens_to_generate=NUM_TOKENS,
        max_prompt_length=8,
        kv_cache_size=32,
        temperature=1.0,
        return_logprobs=True,
    )
    rollout = SglJaxRollout(
        rollout_actor=model,
        tokenizer=IntegerTokenizer(),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")),
        rollout_config=config,
        page_size=4,
        max_running_requests=4,
        random_seed=0,
    )
    prompts = [" ".join(map(str, ids)) for ids in PROMPTS]
    try:
        output = rollout.generate(prompts, config)
        assert output.logprobs is not None
        assert [len(row) for row in output.logprobs] == [len(row) for row in output.tokens]
        rollout.update_params(nnx.state(model, nnx.Param), (nnx.Param,))
        assert rollout.weight_version == 1
        rollout.engine.sleep()
        rollout.engine.wake_up()
        assert len(rollout.generate(prompts, config).tokens) == len(prompts)
        assert not rollout.find_differing_weights(nnx.state(model, nnx.Param))
    finally:
        rollout.close()


CHECKS = {"imports": check_imports, "engine": check_engine, "rollout": check_rollout}


def main() -> int:
    """Runs all checks; the last line of the output is the report."""
    steps, seconds = {}, {}
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            steps[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            steps[name] = "ok"
        seconds[name] = round(time.perf_counter() - start, 1)
    report = {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "steps": steps,
        "seconds": seconds,
    }
    print(json.dumps(report))
    return 0 if set(steps.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
