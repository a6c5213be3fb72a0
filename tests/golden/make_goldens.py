"""Writes the golden models: small random checkpoints and what transformers computes on them.

Run by hand, never by the test suite, which needs no torch:

    python -m venv goldvenv
    goldvenv/bin/pip install "transformers==5.12.1" "numpy>=2" "torch==2.13.0"  # its CPU build
    goldvenv/bin/python tests/golden/make_goldens.py

Everything runs on the CPU in float32 on one thread, from fixed seeds, with no network access:
a second run on the same machine writes the same bytes.

Each configuration becomes a folder `<family>_<name>` beside this file, with a checkpoint as
`save_pretrained` writes it and `golden.npz`, P being the number of prompts:

    prompt_<i>        int32[L_i]        Token ids of prompt i, 0 <= i < P.
    logits_<i>        float32[L_i, V]   Logits at every position of prompt i.
    greedy_<i>        int32[64]         Greedy continuation, end tokens ignored.
    greedy_logps_<i>  float64[64]       Log-prob of each greedy token, a float64 log_softmax of
                                        the float32 logits.
    num_prompts       int64[]           P.
    min_gap           float64[]         Smallest top-1 to top-2 logit gap of any greedy step.
    float32_noise     float64[]         Largest |float32 - float64| logit, a hint for tolerances.
    seed              int64[]           Seed of the weights.

The last two prompts share their first 32 tokens. Seeds are searched until the greedy tokens are
robust (`_rejection`): a gap that no rounding bridges, no special token, and no short cycle. What a
model computes differently from others is then shown to matter (`check_sensitivity`): with another
setting, or with some weights zeroed, logits and greedy tokens must differ.
"""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_specs import (
    DEFAULT_EPS,
    FAMILIES,
    MULTIMODAL,
    SPECIAL_TOKENS,
    SPECS,
    GoldenSpec,
)
from hybrid_specs import HYBRID_SPECS
from latent_specs import LATENT_SPECS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

logger = logging.getLogger("make_goldens")

NUM_GREEDY = 64
PROMPT_LENGTHS = (1, 5, 16, 17, 40)
SHARED_PREFIX = 32
PROMPT_SEED = 1234
MIN_GAP = 2e-3
MIN_GAP_OVER_NOISE = 10.0
MAX_NOISE = 3e-5  # tests allow 1e-4 between two float32 computations
MAX_HYBRID_NOISE = 6e-5  # tests allow 2e-4; also in float64 transformers' recurrence is float32
MIN_DISTINCT = 12
MAX_SEEDS = 500
MAX_TOTAL_BYTES = 9_000_000
PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
MIN_SENSITIVITY = 0.1
DEFAULT_THETAS = (10_000.0, 1_000_000.0)
MONOTONE = ("final_logit_softcapping",)
"""Settings that keep the order of logits: no greedy token can tell."""

TOKENIZER_TEXT = (
    "What is 12 + 7? The answer is 19.",
    "What is 30 - 4? The answer is 26.",
    "Let me think step by step. First we add the tens, then we add the ones.",
    "<reasoning> 37 + 58 = 95 </reasoning> <answer> 95 </answer>",
    "The quick brown fox jumps over the lazy dog, then the dog sleeps.",
    "def add(first: int, second: int) -> int: return first + second",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """What one model computes on the prompts; one list entry a prompt."""

    logits: list[np.ndarray]
    greedy: list[np.ndarray]
    greedy_logps: list[np.ndarray]
    min_gap: float
    noise: float


def build_model(spec: GoldenSpec, seed: int) -> transformers.PreTrainedModel:
    """Builds a float32 model whose logits are well spread."""
    eos_token_id: int | list[int] = [EOS_ID, 4] if spec.with_tokenizer else EOS_ID
    config_class, model_class = FAMILIES[spec.family]
    # Qwen2 has no head_dim of its own.
    own_head_dim = {} if spec.family == "qwen2" else {"head_dim": spec.head_dim}
    config = config_class(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        tie_word_embeddings=spec.tied,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=spec.rope_parameters,
        max_position_embeddings=512,
        pad_token_id=PAD_ID,
        eos_token_id=eos_token_id,
        bos_token_id=BOS_ID,
        **own_head_dim,
        **spec.settings,
    )
    if spec.is_multimodal:
        config = MULTIMODAL[spec.family](config)
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if name.endswith("A_log"):  # states that forget slowly
                param.copy_(noise - 2.0)
            elif "norm" in name:
                param.copy_(_norm_centre(spec, name) + 0.25 * noise)
            elif "bias" in name:
                # Large ones let it repeat its last token.
                param.copy_(noise * (0.3 if spec.has_latents else 1.0))
            elif name.endswith(("router.scale", "per_expert_scale")):
                param.copy_(1.0 + 0.5 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                param.copy_(3.0 * noise / spec.hidden_size**0.5)
            else:
                gain = 10.0 if spec.family == "gemma" and "down_proj" in name else 2.0
                if spec.is_hybrid:  # recurrences amplify rounding errors
                    gain = 2.0 if spec.tied else 1.2
                # So does attention without norms of its queries and keys.
                if spec.family in ("mixtral", "smollm3") or spec.has_latents:
                    gain = 1.4
                param.copy_(gain * noise / param.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.1 * torch.rand(buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        # Special tokens stay unlikely, as in a trained model; the head is the embedding if tied.
        model.lm_head.weight[: spec.num_special] *= 0.1
    if spec.with_tokenizer:
        model.generation_config = transformers.GenerationConfig(
            do_sample=True,
            temperature=0.6,
            top_k=20,
            top_p=0.95,
            pad_token_id=PAD_ID,
            eos_token_id=eos_token_id,
            bos_token_id=BOS_ID,
        )
    return model


def _norm_centre(spec: GoldenSpec, name: str) -> float:
    """The mean of a norm's weights; around it they differ, so that none can be left out."""
    if spec.is_hybrid:
        return 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
    if not spec.scales_embeddings:
        return 1.0
    if spec.family.startswith("gemma4") and ("q_norm" in name or "k_norm" in name):
        return 0.4  # its products are not scaled: larger ones would amplify rounding errors
    # Gemma's scaled embeddings are large: with small outputs of the layers, and the embeddings as
    # the head, it would repeat its last token forever.
    is_post_norm = spec.family != "gemma" and "post_" in name
    if is_post_norm and "per_layer" in name:
        return 3.0
    return 12.0 if is_post_norm else 0.0 if spec.has_offset_norms else 1.0


def save_checkpoint(spec: GoldenSpec, seed: int, folder: Path) -> None:
    """Writes the model of one seed, and config.json in the layout that the spec asks for."""
    model = build_model(spec, seed).to(spec.dtype)
    model.save_pretrained(folder, max_shard_size=spec.max_shard_size)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    text = config.get("text_config", config)
    if "rope_theta" in text or text["rope_parameters"] != spec.rope_parameters:
        raise RuntimeError(f"unexpected rope layout in {path}: {config}")
    if spec.legacy_config:
        del config["rope_parameters"]
        config.pop("layer_types", None)
        scaling = {k: v for k, v in spec.rope_parameters.items() if k != "rope_theta"}
        config |= {
            "rope_theta": spec.rope_theta,
            "rope_scaling": None if spec.rope is None else scaling,
            "torch_dtype": config.pop("dtype"),
            "transformers_version": "4.51.0",
        }
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="ascii")


def load_model(
    spec: GoldenSpec, folder: Path, override: tuple[str, Any] | None = None
) -> transformers.PreTrainedModel:
    """Loads a checkpoint in float32, whatever the dtype it is stored in.

    Args:
        spec: What it is a checkpoint of.
        folder: The checkpoint.
        override: A field of the config and the value to use instead of the stored one.

    Returns:
        The model, in evaluation mode.
    """
    _, model_class = FAMILIES[spec.family]
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if override is not None:
        setattr(config.get_text_config(), *override)
    model = model_class.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        # A plain loop over experts, also in float64.
        **({"experts_implementation": "eager"} if spec.has_experts else {}),
    )
    return model.eval()


def make_prompts(spec: GoldenSpec) -> list[np.ndarray]:
    """Draws ragged prompts, int32[L_i]; the last two share a prefix."""
    rng = np.random.default_rng(PROMPT_SEED)
    prompts = [
        rng.integers(spec.num_special, spec.vocab_size, length, dtype=np.int32)
        for length in PROMPT_LENGTHS
    ]
    tail = rng.integers(spec.num_special, spec.vocab_size, 6, dtype=np.int32)
    return [*prompts, np.concatenate([prompts[-1][:SHARED_PREFIX], tail])]


def forward(model: transformers.PreTrainedModel, token_ids: np.ndarray) -> torch.Tensor:
    """Returns the logits [L, V] of one sequence, with no cache and no padding."""
    input_ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits[0]


def greedy_continuation(model: transformers.PreTrainedModel, prompt: np.ndarray) -> np.ndarray:
    """Returns int32[NUM_GREEDY]; recomputes the whole sequence at each step."""
    token_ids = prompt
    for _ in range(NUM_GREEDY):
        next_id = forward(model, token_ids)[-1].argmax().item()
        token_ids = np.append(token_ids, np.int32(next_id))
    return token_ids[len(prompt) :]


def compute_golden(model: transformers.PreTrainedModel, prompts: list[np.ndarray]) -> Golden:
    """Computes logits, greedy continuations and their log-probs, and how robust they are."""
    logits, greedy, greedy_logps, gaps, all_logits = [], [], [], [], []
    for prompt in prompts:
        tokens = greedy_continuation(model, prompt)
        logits_lv = forward(model, np.concatenate([prompt, tokens[:-1]]))
        steps_nv = logits_lv[len(prompt) - 1 :]
        top2 = steps_nv.topk(2, dim=-1)
        # One pass over the whole sequence must choose what the step-by-step passes chose.
        agree = np.array_equal(top2.indices[:, 0].numpy(), tokens)
        gaps.append((top2.values[:, 0] - top2.values[:, 1]).min().item() if agree else 0.0)
        logps = torch.log_softmax(steps_nv.double(), dim=-1).numpy()
        logits.append(logits_lv[: len(prompt)].numpy())
        greedy.append(tokens)
        greedy_logps.append(logps[np.arange(NUM_GREEDY), tokens])
        all_logits.append(logits_lv)
    model.double()
    errors = [
        (forward(model, np.concatenate([prompt, tokens[:-1]])) - logits_lv).abs().max().item()
        for prompt, tokens, logits_lv in zip(prompts, greedy, all_logits, strict=True)
    ]
    model.float()
    return Golden(
        logits=logits,
        greedy=greedy,
        greedy_logps=greedy_logps,
        min_gap=min(gaps),
        noise=max(errors),
    )


def _rejection(spec: GoldenSpec, golden: Golden) -> str | None:
    """Says why the greedy tokens of a seed would make poor goldens; None when they are good."""
    if golden.min_gap < max(MIN_GAP, MIN_GAP_OVER_NOISE * golden.noise):
        return f"gap {golden.min_gap:.2e} with noise {golden.noise:.2e}"
    if golden.noise > (MAX_HYBRID_NOISE if spec.is_hybrid else MAX_NOISE):
        return f"noise {golden.noise:.2e}"
    if any((tokens < spec.num_special).any() for tokens in golden.greedy):
        return "a special token in a greedy continuation"
    distinct = min(len(set(tokens.tolist())) for tokens in golden.greedy)
    if distinct < MIN_DISTINCT:
        return f"only {distinct} distinct tokens in a greedy continuation"
    return None


def check_sensitivity(spec: GoldenSpec, folder: Path, golden: Golden) -> None:
    """Checks that a wrong setting would be seen in logits and greedy tokens.

    Tried are the wrong settings and weights of the spec, thetas and an eps that are defaults, and,
    where the family does them, embeddings that are not scaled and norms without their offset.
    """
    wrong = [] if spec.rope is not None else _wrong_thetas(spec)
    if spec.rms_norm_eps not in (DEFAULT_EPS, 1e-5):  # those are too small to be seen
        wrong.append(("rms_norm_eps", DEFAULT_EPS))
    for field, value in (*wrong, *spec.wrong_settings):
        model = load_model(spec, folder, override=(field, value))
        _check_seen(spec, model, golden, f"{field} = {value}", in_tokens=field not in MONOTONE)
    for ending in spec.wrong_weights:
        model = load_model(spec, folder)
        _fill(model, ending, 0.0)
        _check_seen(spec, model, golden, f"{ending} = 0")
    for ending in spec.unit_weights:
        model = load_model(spec, folder)
        _fill(model, ending, 1.0)
        _check_seen(spec, model, golden, f"{ending} = 1")
    if spec.has_offset_norms:
        model = load_model(spec, folder)
        for name, param in model.named_parameters():
            if "norm" in name and "linear_attn" not in name:
                param.data -= 1.0
        _check_seen(spec, model, golden, "norm weights without their offset")
    if spec.scales_embeddings:
        model = load_model(spec, folder)
        model.get_input_embeddings().embed_scale = torch.tensor(1.0)
        _check_seen(spec, model, golden, "embeddings not scaled")


def _wrong_thetas(spec: GoldenSpec) -> list[tuple[str, Any]]:
    return [
        ("rope_parameters", {"rope_type": "default", "rope_theta": theta})
        for theta in DEFAULT_THETAS
        if theta != spec.rope_theta
    ]


def _fill(model: transformers.PreTrainedModel, ending: str, value: float) -> None:
    for name, param in model.state_dict().items():
        if name.endswith(ending):
            param.fill_(value)


def _check_seen(
    spec: GoldenSpec,
    model: transformers.PreTrainedModel,
    golden: Golden,
    what: str,
    in_tokens: bool = True,
) -> None:
    """Checks that a wrong model differs from the golden on the last prompt."""
    prompt = make_prompts(spec)[-1]
    error = np.abs(forward(model, prompt).numpy() - golden.logits[-1]).max()
    same = np.array_equal(greedy_continuation(model, prompt), golden.greedy[-1])
    if error < MIN_SENSITIVITY or (same and in_tokens):
        tokens = "the same" if same else "others"
        raise RuntimeError(
            f"{spec.folder_name}: {what} would pass unseen: logits differ by {error:.3f} (at least "
            f"{MIN_SENSITIVITY} is needed), greedy tokens are {tokens}; MONOTONE lists settings "
            "that keep the order"
        )
    logger.info("  with %s, logits differ by %.2f", what, error)


def save_tokenizer(spec: GoldenSpec, folder: Path) -> None:
    """Trains a byte-level BPE tokenizer whose vocabulary is exactly the model's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        bos_token=SPECIAL_TOKENS[BOS_ID],
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
    fast.save_pretrained(folder)
    # The names that transformers 4 knows too.
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    del config["backend"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="ascii")
    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "2 + 2 = 4, caf\u00e9 \u4e16\U0001f600\n"
    ids = loaded.encode(text, add_special_tokens=False)
    if len(loaded) != spec.vocab_size or loaded.decode(ids) != text or max(ids) >= spec.vocab_size:
        raise RuntimeError(f"bad tokenizer: {len(loaded)} tokens, {loaded.decode(ids)!r}")
    if loaded.decode(range(spec.num_special), skip_special_tokens=True) != "":
        raise RuntimeError("special tokens are not special")
    if (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) != (PAD_ID, EOS_ID, BOS_ID):
        raise RuntimeError("bad special token ids")


def write_config(spec: GoldenSpec, out: Path) -> int:
    """Writes the folder of one configuration and returns its size in bytes."""
    prompts = make_prompts(spec)
    for seed in range(MAX_SEEDS):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            save_checkpoint(spec, seed, folder)
            golden = compute_golden(load_model(spec, folder), prompts)
            if (why := _rejection(spec, golden)) is not None:
                logger.info("%s: seed %d rejected: %s", spec.folder_name, seed, why)
                continue
            logger.info("%s: seed %d, smallest gap %.2e", spec.folder_name, seed, golden.min_gap)
            check_sensitivity(spec, folder, golden)
            if spec.with_tokenizer:
                save_tokenizer(spec, folder)
            arrays: dict[str, np.ndarray] = {
                "num_prompts": np.array(len(prompts), np.int64),
                "min_gap": np.array(golden.min_gap),
                "float32_noise": np.array(golden.noise),
                "seed": np.array(seed, np.int64),
            }
            for i, prompt in enumerate(prompts):
                arrays[f"prompt_{i}"] = prompt
                arrays[f"logits_{i}"] = golden.logits[i]
                arrays[f"greedy_{i}"] = golden.greedy[i]
                arrays[f"greedy_logps_{i}"] = golden.greedy_logps[i]
            np.savez_compressed(folder / "golden.npz", allow_pickle=False, **arrays)
            target = out / spec.folder_name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target)
            target.chmod(0o755)
            for path in target.iterdir():
                path.chmod(0o644)
            return sum(path.stat().st_size for path in target.iterdir())
    raise RuntimeError(f"{spec.folder_name}: no good seed below {MAX_SEEDS}")


def main() -> None:
    """Writes every golden folder."""
    parser = argparse.ArgumentParser(description="Write the golden models.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="parent folder")
    parser.add_argument("--only", help="folders whose names begin so")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    specs = [
        spec
        for spec in (*SPECS, *HYBRID_SPECS, *LATENT_SPECS)
        if spec.folder_name.startswith(args.only or "")
    ]
    sizes = {spec.folder_name: write_config(spec, args.out) for spec in specs}
    logger.info("bytes: %s", sizes)
    if sum(sizes.values()) > MAX_TOTAL_BYTES:
        raise RuntimeError(f"goldens take {sum(sizes.values())} bytes, limit {MAX_TOTAL_BYTES}")


if __name__ == "__main__":
    main()
