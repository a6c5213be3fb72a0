"""The prefill phase of a group of 16 samples on a 512-token prompt, with and without sharing.

    python benchmarks/throughput/prefix_sharing.py

One engine has the prefix cache, the other has `disable_radix_cache`; everything else is equal, and
both live in one process and take turns. What is timed is a whole `generate` call with
`max_new_tokens=1`: it returns when each of the 16 samples has its first token, so it holds all
prefill, the copies of the half-filled page, one decode step and the host's work. Every call has a
new prompt, so nothing is found in the cache but what the group itself put there. Compilation is
done before, in `warmup` and an untimed call.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, SamplingParams
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS

PROMPT_TOKENS, NUM_SAMPLES = 512, 16
REQUIRED_RATIO = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Times of one engine, seconds a call, and what one call prefilled."""

    name: str
    runs_s: list[float]
    prefill_tokens: int
    cached_tokens: int
    page_copies: int

    @property
    def median_s(self) -> float:
        """Seconds of the median call."""
        return float(np.median(self.runs_s))


def make_engine(*, is_sharing: bool) -> Engine:
    """Returns an engine that holds the whole group, all programs compiled."""
    engine = Engine(
        model_config=SMALL,
        load_format="dummy",
        max_running_requests=NUM_SAMPLES,
        num_kv_tokens=2 * NUM_SAMPLES * PROMPT_TOKENS,
        disable_radix_cache=not is_sharing,
        compilation_cache_dir=None,
    )
    engine.warmup()
    return engine


def run_group(engine: Engine, prompt: list[int]) -> float:
    """Returns the seconds until every sample of the prompt has its first token."""
    params = SamplingParams(n=NUM_SAMPLES, temperature=1.0, max_new_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    outputs = engine.generate_requests([prompt], params)
    seconds = time.perf_counter() - start
    assert [len(output.output_ids) for output in outputs] == [1] * NUM_SAMPLES
    return seconds


def measure(repeats: int) -> list[Result]:
    """Runs both engines in turns, the first one of a turn changing."""
    rng = np.random.default_rng(0)
    engines = {
        "sharing": make_engine(is_sharing=True),
        "no sharing": make_engine(is_sharing=False),
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    before = {}
    for turn in range(-1, repeats):
        prompt = rng.integers(0, SMALL.vocab_size, PROMPT_TOKENS).tolist()
        names = list(engines)[:: 1 if turn % 2 else -1]
        if turn == 0:
            before = {name: e.get_internal_state().counters for name, e in engines.items()}
        for name in names:
            seconds = run_group(engines[name], prompt)
            if turn >= 0:
                times[name].append(seconds)
                print(f"{name}: {seconds:.3f} s", flush=True)
    results = []
    for name, engine in engines.items():
        now, then = engine.get_internal_state().counters, before[name]
        results.append(
            Result(
                name=name,
                runs_s=times[name],
                prefill_tokens=(now.num_prefill_tokens - then.num_prefill_tokens) // repeats,
                cached_tokens=(now.num_cached_tokens - then.num_cached_tokens) // repeats,
                page_copies=(now.num_page_copies - then.num_page_copies) // repeats,
            )
        )
        engine.shutdown()
    return results


def main() -> None:
    """Measures and writes the results; exits with 1 when sharing is not fast enough."""
    parser = argparse.ArgumentParser(description="A group's prefill with and without sharing.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/prefix_sharing.md"
    )
    args = parser.parse_args()
    results = measure(args.repeats)
    environment = describe_environment(jax.devices()[0].device_kind)
    ratio = results[1].median_s / results[0].median_s
    lines = [
        *report_head(
            "Prefill of 16 samples on a 512-token prompt, with and without sharing",
            "benchmarks/throughput/prefix_sharing.py",
            environment,
            f"Model: {SMALL_IN_WORDS}, vocabulary {SMALL.vocab_size}, float32",
        ),
        "| engine | s to all first tokens (median) | runs, s | tokens prefilled | tokens shared "
        "| pages copied |",
        "|---|---:|---|---:|---:|---:|",
        *(
            f"| {r.name} | {r.median_s:.3f} | {', '.join(f'{s:.2f}' for s in r.runs_s)} "
            f"| {r.prefill_tokens} | {r.cached_tokens} | {r.page_copies} |"
            for r in results
        ),
        "",
        f"Ratio: {ratio:.2f} (at least {REQUIRED_RATIO:g} is required)",
    ]
    content = {"results": [dataclasses.asdict(r) for r in results], "ratio": ratio}
    write_report(args.output, lines, environment, content)
    if ratio < REQUIRED_RATIO:
        raise SystemExit(f"sharing is only {ratio:.2f} times faster")


if __name__ == "__main__":
    main()
