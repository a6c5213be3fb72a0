"""How near the engine's log-probs are to MaxText's own, for every family in every form.

    python -m tests.maxtext.agreement                   # benchmarks/results/maxtext.json
    python -m tests.maxtext.agreement gemma4-31b        # those of a family
    python -m tests.maxtext.agreement gemma4-31b-flat   # its rows with flat layers

Greedy and sampled tokens of the engine, after two updates of all weights, are scored by the adapter
in one forward pass without a cache, of rows padded on the left as Tunix pads them; hybrids' on the
right, since MaxText's nets see padding before a prompt (see `known_faults`). In bfloat16 both are
held against MaxText's float32, too: they round in other places, and neither is right.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.sft import utils

from sgljax_engine import SamplingParams
from tests.maxtext import actors
from tunix_sgljax.maxtext.known_faults import padding_fault

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "maxtext.json"
NUM_UPDATES, NUM_NEW = 2, 24
_PROMPT_LENGTHS = (5, 12, 3, 9)
_PAD_BIAS = {actors.PAD_ID: -100.0}
"""A sampled pad id would count as padding in the trainer's rows."""

_SMALL = (
    "base_emb_dim=64",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=16",
    "base_mlp_dim=96",
    "base_num_decoder_layers=3",
    "matmul_precision=highest",
    "max_target_length=64",
)
_GEMMA = ("sliding_window_size=8", "base_num_decoder_layers=7")
_GEMMA4 = (*_GEMMA, "global_head_dim=32", "global_num_kv_heads=1")
_HYBRID = (
    "base_num_decoder_layers=4",
    "head_dim=32",
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=6",
    "gdn_key_head_dim=16",
    "gdn_value_head_dim=8",
    "gdn_chunk_size=8",
)
_YARN = (
    "sliding_window_size=8",
    "original_max_position_embeddings=16",
    "rope_factor=4",
    "max_position_embeddings=64",
)
_EXPERTS = ("num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=32")
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama3.1-8b": (),
    "qwen2.5-1.5b": (),
    "qwen3-0.6b": (),
    "qwen3-30b-a3b": (*_EXPERTS, "base_mlp_dim=32"),
    "qwen3-next-80b-a3b": (*_EXPERTS, *_HYBRID),
    "qwen3.5-35b-a3b": (*_EXPERTS, *_HYBRID, "mrope_section=[2,1,1]"),
    "gemma2-2b": ("sliding_window_size=8", "base_num_decoder_layers=2"),
    "gemma3-4b": _GEMMA,
    "gemma4-31b": _GEMMA4,
    "gemma4-26b": (*_GEMMA4, *_EXPERTS),
    "gemma4-e2b": (
        *_GEMMA4,
        "base_num_decoder_layers=10",
        "base_num_kv_heads=1",
        "num_kv_shared_layers=5",
        "hidden_size_per_layer_input=8",
        "vocab_size_per_layer_input=104",
    ),
    "mixtral-8x7b": (*_EXPERTS, "base_mlp_dim=32"),
    "deepseek2-16b": (
        *_YARN,
        *_EXPERTS,
        "base_num_kv_heads=4",
        "kv_lora_rank=24",
        "qk_nope_head_dim=12",
        "qk_rope_head_dim=8",
        "v_head_dim=16",
    ),
    "gpt-oss-20b": (*_YARN, *_EXPERTS, "base_mlp_dim=48", "base_num_decoder_layers=3"),
    "olmo3-7b": (*_YARN, "base_num_decoder_layers=5"),
}
"""Sizes of a small model by the name of MaxText's."""

SCANNED = {
    "qwen3-next-80b-a3b": "base_num_decoder_layers=10",
    "qwen3.5-35b-a3b": "base_num_decoder_layers=8",  # MaxText scans whole cycles alone
    "gemma3-4b": "base_num_decoder_layers=14",
    "gemma4-31b": "base_num_decoder_layers=14",
    "gpt-oss-20b": "base_num_decoder_layers=4",
    "olmo3-7b": "base_num_decoder_layers=8",
}
"""Layers of scanned models: two whole cycles and a rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A family in a form.

    Attributes:
        family: Name of MaxText's model.
        is_scanned: Whether equal layers are stacked in one array.
        is_tied: Whether the head is the embedding.
    """

    family: str
    is_scanned: bool
    is_tied: bool

    def __str__(self) -> str:
        layers, head = "scanned" if self.is_scanned else "flat", "tied" if self.is_tied else "head"
        return f"{self.family}-{layers}-{head}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a case gave in one dtype.

    Attributes:
        case: The case.
        dtype: In which MaxText computes.
        num_equal: Greedy tokens that MaxText's log-probs put first too.
        num_greedy: Greedy tokens.
        difference: Largest difference of the log-probs of tokens, greedy and sampled.
        own_difference: The same of MaxText from itself, when it scores each row alone.
        error: Mean difference of the engine's log-probs from MaxText's in float32.
        maxtext_error: The same of MaxText's in this dtype.
    """

    case: Case
    dtype: str
    num_equal: int
    num_greedy: int
    difference: float
    own_difference: float
    error: float
    maxtext_error: float


CASES = [
    Case(family=family, is_scanned=is_scanned, is_tied=is_tied)
    for family in FAMILIES
    for is_scanned in (True, False)
    for is_tied in (True, False)
    if not (is_scanned and family == "gemma4-e2b")  # MaxText's config refuses it
]


def measure(case: Case) -> list[Row]:
    """The rows of a case, float32 first."""
    exact, rounded = (Scorer(make_actor(case, dtype)) for dtype in ("float32", "bfloat16"))
    rows = []
    for scorer in (exact, rounded):
        outputs, tokens = _sample(scorer.actor)
        nnx.update(exact.actor.model, nnx.state(scorer.actor.model, nnx.Param))
        rows.append(_compare(case, scorer, exact, outputs, tokens))
    return rows


class Scorer:
    """MaxText's log-probs under the weights of an actor, by one program for all calls."""

    def __init__(self, actor: actors.Actor) -> None:
        """Compiles nothing yet."""
        self.actor = actor
        graph = nnx.graphdef(actor.model)

        def logits(state: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
            positions = utils.build_positions_from_mask(mask)
            attention = utils.make_causal_attn_mask(mask)
            return nnx.merge(graph, state)(ids, positions, None, attention)[0]

        self._logits = jax.jit(logits)

    def score(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probs [rows, NUM_NEW, vocabulary] of the last tokens, float64."""
        length = max(_PROMPT_LENGTHS) + NUM_NEW
        is_left = padding_fault(self.actor.config) is None
        starts = [length - len(row) if is_left else 0 for row in rows]
        ids = np.full((len(rows), length), actors.PAD_ID)
        mask = np.zeros((len(rows), length), bool)
        for i, (start, row) in enumerate(zip(starts, rows, strict=True)):
            ids[i, start : start + len(row)] = row
            mask[i, start : start + len(row)] = True
        with jax.set_mesh(self.actor.mesh):
            padded = np.asarray(self._logits(nnx.state(self.actor.model), ids, mask), np.float64)
        ends = [start + len(row) - 1 for start, row in zip(starts, rows, strict=True)]
        logits = np.stack([x[end - NUM_NEW : end] for x, end in zip(padded, ends, strict=True)])
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def make_actor(case: Case, dtype: str) -> actors.Actor:
    """A small model of a case, with the weights that MaxText gives it at first."""
    words = [*_SMALL, *FAMILIES[case.family]]
    if case.is_scanned:
        words.append(SCANNED.get(case.family, ""))
    return actors.make(
        *filter(None, words),
        f"model_name={case.family}",
        f"scan_layers={case.is_scanned}",
        f"logits_via_embedding={case.is_tied}",
        f"dtype={dtype}",
    )


def _change_weights(actor: actors.Actor, seed: int) -> None:
    """Adds noise to all weights; at first, makes logits and products of attention plausible."""
    model, config = actor.model, actor.config
    rng, state = np.random.default_rng(seed), nnx.state(model, nnx.Param)
    is_gemma4 = config.model_name.startswith("gemma4")
    is_divided = config.logits_via_embedding and config.normalize_embedding_logits
    deviation = 0.15 * (config.emb_dim**0.5 if is_divided else 1)
    changed = []
    for path, leaf in nnx.to_flat_state(state):
        value, name = np.asarray(leaf.get_value(), np.float32), str(path[-1])
        if seed == 0 and name == "embedding":
            value = deviation * value / value.std()
        if seed == 0 and is_gemma4 and "query_norm" in path:
            # Trained weights hold the factor of attention, which Gemma 4 does not have.
            value = value * value.shape[0] ** -0.5
        is_factor = "scale" in name or "scalar" in name or name in ("bias", "sinks")
        value = value + rng.normal(size=value.shape) * (0.1 if is_factor else 0.02)
        changed.append((path, leaf.replace(jnp.asarray(value, leaf.get_value().dtype))))
    nnx.update(model, nnx.from_flat_state(changed))


def _sample(actor: actors.Actor) -> tuple[list[Any], list[list[int]]]:
    """Outputs of greedy requests and of sampled ones, and the tokens of each with its prompt."""
    config = actors.rollout_config(max_prompt_length=16, max_tokens_to_generate=NUM_NEW)
    rollout = actors.make_rollout(actor, dataclasses.replace(config, kv_cache_size=64))
    rollout.engine  # noqa: B018
    for seed in range(NUM_UPDATES):
        _change_weights(actor, seed)
        rollout.update_params(nnx.state(actor.model, nnx.Param))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, actor.config.vocab_size, size).tolist() for size in _PROMPT_LENGTHS]
    outputs = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature,
            max_new_tokens=NUM_NEW,
            ignore_eos=True,
            logit_bias=_PAD_BIAS,
            seed=3,
        )
        outputs += rollout.engine.generate_requests(prompts, params)
    rollout.close()
    tokens = [[*output.prompt_ids, *output.output_ids] for output in outputs]
    return outputs, tokens


def _compare(
    case: Case,
    scorer: Scorer,
    exact: Scorer,
    outputs: Sequence[Any],
    tokens: Sequence[Sequence[int]],
) -> Row:
    scores = scorer.score(tokens)
    alone = np.concatenate([scorer.score([row]) for row in tokens])
    in_float32 = scores if scorer is exact else exact.score(tokens)
    chosen = np.array([output.output_ids for output in outputs])[..., None]
    own = np.array([output.logprobs for output in outputs])
    wanted, wanted_alone, wanted_exactly = (
        np.take_along_axis(each, chosen, -1)[..., 0] for each in (scores, alone, in_float32)
    )
    scores[..., actors.PAD_ID] = -np.inf
    greedy = chosen[: len(_PROMPT_LENGTHS), :, 0]
    return Row(
        case=case,
        dtype=str(scorer.actor.config.dtype.value),
        num_equal=int((scores[: len(greedy)].argmax(-1) == greedy).sum()),
        num_greedy=greedy.size,
        difference=float(np.abs(own - wanted).max()),
        own_difference=float(np.abs(wanted_alone - wanted).max()),
        error=float(np.abs(own - wanted_exactly).mean()),
        maxtext_error=float(np.abs(wanted - wanted_exactly).mean()),
    )


def _in_words(row: Row) -> str:
    return (
        f"{row.case} {row.dtype}: {row.num_equal}/{row.num_greedy} greedy, "
        f"difference {row.difference:.1e}, MaxText's own {row.own_difference:.1e}, "
        f"errors {row.error:.1e} and {row.maxtext_error:.1e}"
    )


def _record(rows: Sequence[Row]) -> None:
    """Puts the rows of a case into the results, in the place of older ones."""
    case = dataclasses.asdict(rows[0].case)
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    found = [row for row in kept if row["case"] != case] + list(map(dataclasses.asdict, rows))
    order = list(map(dataclasses.asdict, CASES))
    found.sort(key=lambda row: order.index(row["case"]))
    environment = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **{name: version(name) for name in ("maxtext", "google-tunix", "jax")},
    }
    content = {"environment": environment, "num_updates": NUM_UPDATES, "rows": found}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Measures cases, and records each."""
    parser = argparse.ArgumentParser(description="Measures cases, and records each.")
    parser.add_argument(
        "cases", nargs="*", help=f"{CASES[0]}, or {CASES[0].family}; all by default"
    )
    names = parser.parse_args(argv).cases or [""]
    for case in CASES:
        if any(str(case).startswith(name) for name in names):
            rows = measure(case)
            sys.stdout.write("".join(f"{_in_words(row)}\n" for row in rows))
            sys.stdout.flush()
            _record(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
