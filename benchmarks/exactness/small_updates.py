"""What of LoRA's first updates reaches a rollout in bfloat16, and what each way of applying costs.

    python benchmarks/exactness/small_updates.py            # about ten minutes
    python benchmarks/exactness/small_updates.py --quick

A GRPO run with Tunix's learner in bfloat16, with B = 0 at first. After each step three rollouts get
its pairs and score the same tokens: with merged pairs, with an adapter, and with merged pairs in
float32. The effect is the change of a token's log-prob since B = 0. It is compared with the effect
that Tunix's function computes in float32, on the trainer's own bfloat16 values.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.models import make_tunix_model
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, PAD_ID, IdTokenizer
from benchmarks.lib.turns import speed_table, take_turns
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.exactness.trainer_match import trainer_logps

MODEL, RANK, ALPHA = "tiny", 8, 16.0
NUM_ROWS, PROMPT, NEW = 16, 8, 16
WAYS: Mapping[str, dict[str, Any]] = {
    "merged": {"lora": "merged"},
    "adapter": {"lora": "adapter"},
    "merged, float32": {"lora": "merged", "dtype": "float32"},
}
SHOWN = (1, 2, 5, 10, 20)
"""Steps in the table."""


def make_actor(dtype: Any) -> Any:
    """The model with pairs at all projections."""
    base: Any = make_tunix_model(MODELS[MODEL].config, dtype=dtype)
    provider = qwix.LoraProvider(module_path=".*(attn|mlp).*", rank=RANK, alpha=ALPHA)
    return qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(0))


def config() -> RolloutConfig:
    """Sampling at temperature 1."""
    return RolloutConfig(
        max_tokens_to_generate=NEW,
        max_prompt_length=PROMPT,
        temperature=1.0,
        kv_cache_size=64,
        eos_tokens=[],
    )


class Scored:
    """The rollouts and the exact log-probs of some tokens, since the pairs changed nothing."""

    def __init__(self, actor: Any) -> None:
        """Scores for the first time."""
        self._exact = make_actor(jnp.float32)
        vocab_size, rng = MODELS[MODEL].config.vocab_size, np.random.default_rng(0)
        self._prompts = rng.integers(1, vocab_size, (NUM_ROWS, PROMPT)).astype(np.int32)
        self._completions = rng.integers(1, vocab_size, (NUM_ROWS, NEW)).astype(np.int32)
        self.held_bytes: dict[str, int] = {}
        self.rollouts: dict[str, SglJaxRollout] = {}
        for way, options in WAYS.items():
            before = sum(x.nbytes for x in jax.live_arrays())
            rollout = SglJaxRollout(
                rollout_actor=actor,
                tokenizer=IdTokenizer(),
                rollout_config=config(),
                num_kv_tokens=NUM_ROWS * 64,
                max_running_requests=NUM_ROWS,
                **options,
            )
            rollout.engine  # noqa: B018
            self.rollouts[way] = rollout
            self.held_bytes[way] = sum(x.nbytes for x in jax.live_arrays()) - before
        self._first = self._score(actor)
        self.sync_s: dict[str, list[float]] = {way: [] for way in WAYS}

    def _trainer(self, model: Any) -> np.ndarray:
        graphdef, state = nnx.split(model)
        given: Any = (self._prompts, self._completions)
        options: Any = {"pad_id": PAD_ID, "eos_id": -1, "temperature": 1.0, "batch_size": None}
        return trainer_logps(graphdef, state, *given, **options).astype(np.float64)

    def _score(self, actor: Any) -> dict[str, np.ndarray]:
        state = nnx.state(actor, nnx.Param)
        nnx.update(self._exact, jax.tree.map(lambda x: x.astype(jnp.float32), state))
        found = {"exact": self._trainer(self._exact), "trainer": self._trainer(actor)}
        prompts, completions = jnp.asarray(self._prompts), jnp.asarray(self._completions)
        for way, rollout in self.rollouts.items():
            logps = rollout.get_per_token_logps(prompts, completions)
            found[way] = np.asarray(logps, np.float64)
        return found

    def after_step(self, actor: Any) -> dict[str, Any]:
        """Gives the rollouts the pairs, and compares the effects."""
        pairs = nnx.state(actor, nnx.LoRAParam)
        for way, rollout in self.rollouts.items():
            start = time.perf_counter()
            rollout.update_params(pairs, (nnx.LoRAParam,))
            self.sync_s[way].append(time.perf_counter() - start)
        now = self._score(actor)
        effects = {name: now[name] - self._first[name] for name in now}
        exact = effects.pop("exact")
        row: dict[str, Any] = {"rms": float(np.sqrt((exact**2).mean()))}
        for name, effect in effects.items():
            correlation = float(np.corrcoef(effect.ravel(), exact.ravel())[0, 1])
            row[name] = [correlation, float(np.linalg.norm(effect) / np.linalg.norm(exact))]
        all_params = nnx.state(actor, nnx.Param)
        kept = self.rollouts["merged"].lora_effect(all_params)
        row["weights, merged"] = None if kept is None else list(kept[1:])
        return row


def train(learning_rate: float, num_steps: int, num_turns: int) -> dict[str, Any]:
    """Trains, and returns a row for each step, seconds and bytes."""
    actor = make_actor(jnp.bfloat16)
    scored, rows = Scored(actor), []

    class Learner(GRPOLearner):
        """Scores when the next step's samples are there."""

        def _generate_and_compute_advantage(self, training_input: Any, mode: Any = None) -> Any:
            example = super()._generate_and_compute_advantage(training_input, mode)
            if self.rl_cluster.actor_trainer.train_steps:
                rows.append(scored.after_step(self.rl_cluster.actor_trainer.model))
            return example

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [sum(int(word) % 2 == 0 for word in text.split()) / NEW for text in completions]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(learning_rate),
        eval_every_n_steps=1000,
        max_steps=num_steps + 1,
    )
    engine: Any = functools.partial(SglJaxRollout, max_running_requests=NUM_ROWS)
    cluster: Any = RLCluster(
        actor=actor,
        reference=make_tunix_model(MODELS[MODEL].config, dtype=jnp.bfloat16),
        tokenizer=IdTokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=engine,
            rollout_config=config(),
            training_config=training,
        ),
    )
    rng = np.random.default_rng(1)
    texts = [" ".join(map(str, rng.integers(1, 1024, 6))) for _ in range(NUM_ROWS // 4)]
    learner: Any = Learner(cluster, GRPOConfig(num_generations=4, beta=0.0), reward)
    learner.train([{"prompts": np.array(texts)}] * (num_steps + 1))
    runs: Any = {
        way: functools.partial(rollout.generate, texts * 4, config())
        for way, rollout in scored.rollouts.items()
    }
    generate_s = take_turns(runs, num_turns)
    for rollout in (cluster.rollout, *scored.rollouts.values()):
        rollout.close()
    return {
        "rows": rows,
        "generate_s": generate_s,
        "sync_s": {way: each[1:] for way, each in scored.sync_s.items()},
        "held_bytes": scored.held_bytes,
    }


def tables(found: Mapping[float, dict[str, Any]]) -> list[str]:
    """The report's lines."""
    lines = []
    names = ["trainer", *WAYS]
    for rate, each in found.items():
        lines += [
            f"## Learning rate {rate:g}: correlation and norm ratio of the effect on log-probs",
            "",
            f"| step | rms effect | {' | '.join(names)} | change of the weights, merged |",
            "|---:|---:|" + "---|" * (len(names) + 1),
        ]
        for step, row in enumerate(each["rows"], 1):
            if step in SHOWN:
                cells = [_pair(row[name]) for name in (*names, "weights, merged")]
                lines.append(f"| {step} | {row['rms']:.5f} | {' | '.join(cells)} |")
        lines.append("")
    last = list(found.values())[-1]
    held = ", ".join(f"{way} {size / 1e6:.1f}" for way, size in last["held_bytes"].items())
    return [
        *lines,
        "## What each costs",
        "",
        *speed_table({"generate": last["generate_s"], "sync": last["sync_s"]}, "merged"),
        "",
        f"Megabytes of the engine's arrays: {held}.",
    ]


def _pair(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.3f}, {values[1]:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__, pairs=7)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", DeprecationWarning)
    steps, rates = (2, [1e-4]) if args.quick else (SHOWN[-1], [1e-5, 1e-4])
    found = {rate: train(rate, steps, args.pairs) for rate in rates}
    write_results(
        output_dir(args) / "small_updates.md",
        "What of LoRA's first updates reaches a rollout in bfloat16",
        "benchmarks/exactness/small_updates.py",
        tables(found),
        {f"{rate:g}": each for rate, each in found.items()},
        facts=[
            f"{MODEL}: {MODELS[MODEL].in_words}; random weights in bfloat16",
            f"Pairs of rank {RANK}, alpha {ALPHA:g}, at all projections; adamw",
            "The trainer's own effect is in bfloat16 too: its rounding hides effects below some "
            "0.005",
        ],
    )


if __name__ == "__main__":
    main()
