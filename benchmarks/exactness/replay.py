"""GRPO on addition with filters that leave out tokens, with sampling replay and without.

    python benchmarks/exactness/replay.py --seeds 0 1 2    # 40 minutes on 2 cores
    python docs/make_replay_plot.py                        # draws them

Trainings are added to those of earlier runs, one by one. `configs/grpo_addition.yaml` with two
updates a step. Before the first of them each step records, over all sampled tokens: the KL
divergence of the policy from the start, over the whole vocabulary in either way; and log-ratios of
the loss's log-prob to that of the sampler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from scipy.special import log_softmax, logsumexp
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rl_cluster import Mode

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, read_results, write_results
from tunix_sgljax import GrpoLearner, SglJaxRollout
from tunix_sgljax.padding import right_pad
from tunix_sgljax.training import load_config

sys.path.insert(0, str(ROOT / "examples"))

import addition_task
import grpo_addition

FILTERS: dict[str, dict[str, Any]] = {"top_k=20": {"top_k": 20}, "top_p=0.9": {"top_p": 0.9}}
REPLAY = ("support", "off")
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class Rollout(SglJaxRollout):
    """Keeps its last output."""

    last: Any = None

    def generate(self, prompts: Any, rollout_config: Any, **options: Any) -> Any:
        """Samples a step's completions, in one call."""
        self.last = super().generate(prompts, rollout_config, **options)
        return self.last


class Learner(GrpoLearner):
    """Records each step before its first update."""

    def __init__(self, cluster: Any, config: GRPOConfig, replay: str) -> None:
        """Takes a cluster whose rollout reports the sampler's log-probs."""
        super().__init__(cluster, self._reward, config, replay=replay)
        self.steps: list[dict[str, Any]] = []
        self._rewards: list[float] = []

    def _reward(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        self._rewards = addition_task.exact_match(prompts, completions, **columns)
        return self._rewards

    def _generate_and_compute_advantage(self, training_input: Any, mode: Any = Mode.TRAIN) -> Any:
        example = super()._generate_and_compute_advantage(training_input, mode)
        rollout: Any = self.rl_cluster.rollout
        ids_BC = np.asarray(example.completion_ids)
        sampled_BC = right_pad(rollout.last.logprobs, ids_BC.shape[1], np.nan)
        is_sampled = np.asarray(example.completion_mask).astype(bool) & ~np.isnan(sampled_BC)
        policy_BCV = _logits(self.rl_cluster.actor_trainer.model, example)
        start_BCV = _logits(self.rl_cluster.inference_worker.get_model("reference"), example)
        policy, start = log_softmax(policy_BCV, axis=-1), log_softmax(start_BCV, axis=-1)
        kl_BC = np.sum(np.exp(policy) * (policy - start), axis=-1)
        if getattr(example, "sampling_masks", None) is not None:
            for row, column in np.argwhere(is_sampled):
                mask = example.sampling_masks[row, column]
                kept = policy[row, column, mask[mask >= 0]]
                policy[row, column] -= logsumexp(kept)
        trained_BC = np.take_along_axis(policy, ids_BC[..., None], axis=-1)[..., 0]
        ratios = (trained_BC - sampled_BC)[is_sampled]
        self.steps.append(
            {
                "reward": float(np.mean(self._rewards)),
                "kl": float(kl_BC[is_sampled].mean()),
                "abs_log_ratio": float(np.abs(ratios).mean()),
                "log_ratio_quantiles": np.quantile(ratios, QUANTILES).tolist(),
            }
        )
        return example


def _logits(model: nnx.Module, example: Any) -> np.ndarray:
    """What each token of the completions was drawn from, float64 [B, C, V]."""
    _, logits = compute_per_token_logps(
        *nnx.split(model),
        prompt_tokens=example.prompt_ids,
        completion_tokens=example.completion_ids,
        pad_id=addition_task.Tokenizer().pad_id(),
        eos_id=addition_task.Tokenizer().eos_id(),
        return_logits=True,
    )
    return np.asarray(logits, np.float64)


def train(filters: str, replay: str, seed: int, num_steps: int) -> list[dict[str, Any]]:
    """What each step of a training recorded."""
    overrides = [f"seed={seed}", f"num_batches={2 * num_steps}"]  # of updates
    config = load_config(ROOT / "configs/grpo_addition.yaml", overrides)
    engine = functools.partial(
        Rollout,
        **config.sgljax_config,
        random_seed=seed,
        logprobs_mode="processed_logprobs",
    )
    cluster: Any = grpo_addition.make_cluster(config, engine)
    for name, value in {**FILTERS[filters], "return_logprobs": True}.items():
        setattr(cluster.cluster_config.rollout_config, name, value)
    cluster.actor_trainer.config.max_steps = None
    fields: dict[str, Any] = {**config.grpo_config, "num_iterations": 2}
    learner = Learner(cluster, GRPOConfig(**fields), replay)
    try:
        learner.train(addition_task.problem_batches(num_steps, config.batch_size, seed))
    finally:
        cluster.rollout.close()
    return learner.steps


def main(argv: Sequence[str] | None = None) -> None:
    """Trains both ways with both filters."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="to train with (0)")
    parser.add_argument("--steps", type=int, help="of each training (25)")
    args = parser.parse_args(argv)
    output, num_steps = output_dir(args) / "replay.md", args.steps or (2 if args.quick else 25)
    found: list[dict[str, Any]] = read_results(output).get("trainings", [])
    done = {(each["filters"], each["replay"], each["seed"]) for each in found}
    for seed in args.seeds:
        for filters in FILTERS:
            for replay in REPLAY[:: -1 if seed % 2 else 1]:
                if (filters, replay, seed) not in done:
                    steps = train(filters, replay, seed, num_steps)
                    name = {"filters": filters, "replay": replay, "seed": seed}
                    found.append({**name, "steps": steps})
                    _write(output, found)


def _write(output: Path, found: Sequence[dict[str, Any]]) -> None:
    lines = [
        "| filter | replay | seed | steps | reward, first 3 | last 3 | KL to the start, last 3 "
        "| mean abs log-ratio | largest |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        first, last = each["steps"][:3], each["steps"][-3:]
        rewards = (np.mean([step["reward"] for step in some]) for some in (first, last))
        ratio = np.mean([step["abs_log_ratio"] for step in each["steps"]])
        largest = np.abs([step["log_ratio_quantiles"] for step in each["steps"]]).max()
        lines.append(
            f"| {each['filters']} | {each['replay']} | {each['seed']} | {len(each['steps'])} "
            f"| {' | '.join(f'{reward:.3f}' for reward in rewards)} "
            f"| {np.mean([step['kl'] for step in last]):.4f} | {ratio:.1e} | {largest:.1e} |"
        )
    command = "benchmarks/exactness/replay.py"
    content = {"quantiles": QUANTILES, "trainings": found}
    write_results(output, "Sampling replay in GRPO on addition", command, lines, content)


if __name__ == "__main__":
    main()
