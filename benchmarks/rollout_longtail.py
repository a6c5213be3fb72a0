"""Useful tokens a second on long-tailed output lengths: the engine against Tunix's vanilla sampler.

    python benchmarks/rollout_longtail.py

Both sample from the same weights, in one process, in turns. The workload is that of a GRPO step:
16 prompts of 64 to 128 tokens, 8 samples each, whose lengths are drawn from a lognormal
distribution (median 64, sigma 0.8) clipped to 16 .. 256. The engine gets each request's length;
the vanilla sampler has no such setting, so it decodes all rows to the longest. Only the tokens that
a request asked for count. Compilation is timed apart, in a first run.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3

from reporting import (
    ROOT,
    SMALL,
    SMALL_IN_WORDS,
    describe_environment,
    report_head,
    write_report,
)
from sgljax_engine import SamplingParams
from tunix_sgljax import create_sgljax_rollout

NUM_PROMPTS, NUM_SAMPLES = 16, 8
MAX_PROMPT, MAX_NEW = 128, 256


class IdTokenizer:
    """Space-separated token ids as text; pad 0, no BOS, an end token that never comes."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids in the text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        """Returns the ids as text."""
        return " ".join(str(int(token)) for token in ids)

    def bos_id(self) -> int:
        """Returns 0: no BOS."""
        return 0

    def eos_id(self) -> int:
        """Returns -1: no token ends a sequence."""
        return -1

    def pad_id(self) -> int:
        """Returns 0."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Times of one engine. `runs_s` in seconds, the first run (which compiles) apart."""

    name: str
    first_run_s: float
    runs_s: list[float]
    useful_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens a second in the median run."""
        return self.useful_tokens / float(np.median(self.runs_s))


def make_model() -> Qwen3:
    """Returns the model with random weights, none of them zero."""
    config = ModelConfig(
        num_layers=SMALL.num_layers,
        vocab_size=SMALL.vocab_size,
        embed_dim=SMALL.hidden_size,
        hidden_dim=SMALL.intermediate_size,
        num_heads=SMALL.num_heads,
        num_kv_heads=SMALL.num_kv_heads,
        head_dim=SMALL.head_dim,
        rope_theta=int(SMALL.rope.theta),
        norm_eps=SMALL.rms_norm_eps,
        use_tied_embedding=True,
    )
    model = Qwen3(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(0)
    filled = [
        x if x.ndim == 1 else jax.numpy.asarray(rng.normal(0, 0.04, x.shape).astype(np.float32))
        for x in leaves
    ]
    nnx.update(model, jax.tree.unflatten(tree, filled))
    return model


def make_workload() -> tuple[list[list[int]], list[int]]:
    """Returns the prompts, each repeated for its samples, and the length of each sample."""
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(1, SMALL.vocab_size, rng.integers(64, MAX_PROMPT + 1)).tolist()
        for _ in range(NUM_PROMPTS)
    ]
    lengths = rng.lognormal(np.log(64), 0.8, NUM_PROMPTS * NUM_SAMPLES).round()
    lengths = np.clip(lengths, 16, MAX_NEW).astype(int)
    return [prompt for prompt in prompts for _ in range(NUM_SAMPLES)], lengths.tolist()


def timed(run: Callable[[], object]) -> float:
    """Returns the seconds that `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(repeats: int) -> list[Result]:
    """Runs both engines in turns."""
    model, tokenizer = make_model(), IdTokenizer()
    prompts, lengths = make_workload()
    rollout = create_sgljax_rollout(
        model, tokenizer, max_model_len=MAX_PROMPT + MAX_NEW, max_running_requests=len(prompts)
    )
    params = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths]
    sampler = Sampler(
        model,
        tokenizer,
        CacheConfig(
            cache_size=MAX_PROMPT + MAX_NEW,
            num_layers=SMALL.num_layers,
            num_kv_heads=SMALL.num_kv_heads,
            head_dim=SMALL.head_dim,
        ),
    )
    texts = [tokenizer.decode(prompt) for prompt in prompts]

    def vanilla() -> None:
        sampler(
            input_strings=texts,
            max_generation_steps=MAX_NEW,
            max_prompt_length=MAX_PROMPT,
            temperature=1.0,
            top_p=1.0,
            seed=time.perf_counter_ns() % 2**31,
        )

    runs = {"sgljax": lambda: rollout.engine.generate_requests(prompts, params), "vanilla": vanilla}
    first = {name: timed(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(timed(run))
            print(f"{name}: {sum(lengths) / times[name][-1]:.0f} useful tokens/s", flush=True)
    rollout.close()
    return [
        Result(name=name, first_run_s=first[name], runs_s=times[name], useful_tokens=sum(lengths))
        for name in runs
    ]


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Long-tailed rollouts.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/rollout_longtail.md"
    )
    args = parser.parse_args()
    results = measure(args.repeats)
    environment = describe_environment(jax.devices()[0].device_kind)
    ratio = results[0].tokens_per_s / results[1].tokens_per_s
    lines = [
        *report_head(
            "Long-tailed rollouts: the engine against Tunix's vanilla sampler",
            "benchmarks/rollout_longtail.py",
            environment,
            f"Model: {SMALL_IN_WORDS}, vocabulary {SMALL.vocab_size}, float32; "
            f"{results[0].useful_tokens} useful tokens in {NUM_PROMPTS * NUM_SAMPLES} samples",
        ),
        "| engine | useful tokens/s (median) | runs, s | first run with compilation, s |",
        "|---|---:|---|---:|",
        *(
            f"| {r.name} | {r.tokens_per_s:.0f} | {', '.join(f'{s:.1f}' for s in r.runs_s)} "
            f"| {r.first_run_s:.1f} |"
            for r in results
        ),
        "",
        f"Ratio: {ratio:.2f}",
    ]
    content = {"results": [dataclasses.asdict(r) for r in results]}
    write_report(args.output, lines, environment, content)


if __name__ == "__main__":
    main()
