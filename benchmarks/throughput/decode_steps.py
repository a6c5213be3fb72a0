"""Decode steps a dispatch: tokens a second, and how long a command waits.

    python benchmarks/throughput/decode_steps.py

Engines that differ in `decode_steps` alone run the same requests in turns: fixed numbers of steps
without a bound on time, and the default, as many as fit `max_dispatch_s`. While they generate, a
second thread asks for the engine's state every 50 ms; a command waits for the dispatch that runs.
Two workloads for each model: as many requests as rows, and a burst of longer prompts, which are
prefilled over many dispatches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import threading
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, ModelConfig, SamplingParams
from tunix_sgljax.bench.environment import Environment, describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS

TINY = dataclasses.replace(
    SMALL,
    hidden_size=192,
    intermediate_size=576,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one model: `rows` at most run together."""

    name: str
    model: ModelConfig
    rows: int
    num_prompts: int
    prompt_len: int
    max_new: int


WORKLOADS = (
    Workload(name="tiny, 1 row", model=TINY, rows=1, num_prompts=1, prompt_len=64, max_new=256),
    Workload(name="tiny, 8 rows", model=TINY, rows=8, num_prompts=8, prompt_len=64, max_new=256),
    Workload(
        name="small, 64 rows", model=SMALL, rows=64, num_prompts=64, prompt_len=64, max_new=64
    ),
    Workload(
        name="small, burst of 48 prompts of 512",
        model=SMALL,
        rows=48,
        num_prompts=48,
        prompt_len=512,
        max_new=48,
    ),
)
SETTINGS = {
    "1": {"decode_steps": 1, "max_dispatch_s": math.inf},
    "4": {"decode_steps": 4, "max_dispatch_s": math.inf},
    "16": {"decode_steps": 16, "max_dispatch_s": math.inf},
    "64": {"decode_steps": 64, "max_dispatch_s": math.inf},
    "up to 64 in 0.25 s": {"decode_steps": 64, "max_dispatch_s": 0.25},
    "default": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One workload with one setting; every run, and every wait of a command in any of them."""

    workload: str
    setting: str
    tokens: int
    runs_s: list[float]
    waits_s: list[float]
    num_dispatches: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second in the median run."""
        return self.tokens / float(np.median(self.runs_s))


def ask_often(engine: Engine, end: threading.Event, waits_s: list[float]) -> None:
    """Asks for the engine's state until the end, and notes how long each answer took."""
    while not end.wait(0.05):
        started = time.perf_counter()
        engine.get_internal_state()
        waits_s.append(time.perf_counter() - started)


def measure(workload: Workload, names: list[str], repeats: int) -> list[Result]:
    """Runs all settings in turns; the first run of each compiles and does not count."""
    rng = np.random.default_rng(0)
    shape = (workload.num_prompts, workload.prompt_len)
    prompts = rng.integers(0, workload.model.vocab_size, shape).tolist()
    params = SamplingParams(max_new_tokens=workload.max_new, ignore_eos=True)
    runs_s: dict[str, list[float]] = {name: [] for name in names}
    waits_s: dict[str, list[float]] = {name: [] for name in names}
    dispatches = dict.fromkeys(names, 0)
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(
                    model_config=workload.model,
                    load_format="dummy",
                    max_running_requests=workload.rows,
                    num_kv_tokens=2 * workload.rows * (workload.prompt_len + workload.max_new),
                    disable_radix_cache=True,
                    random_seed=0,
                    **SETTINGS[name],
                )
            )
            for name in names
        }
        for engine in engines.values():
            engine.generate_requests(prompts, params)
        for _ in range(repeats):
            for name, engine in engines.items():
                before = engine.get_internal_state().counters.num_dispatches
                end = threading.Event()
                asker = threading.Thread(target=ask_often, args=(engine, end, waits_s[name]))
                asker.start()
                started = time.perf_counter()
                engine.generate_requests(prompts, params)
                runs_s[name].append(time.perf_counter() - started)
                end.set()
                asker.join()
                dispatches[name] += engine.get_internal_state().counters.num_dispatches - before
    return [
        Result(
            workload=workload.name,
            setting=name,
            tokens=workload.num_prompts * workload.max_new,
            runs_s=runs_s[name],
            waits_s=waits_s[name],
            num_dispatches=dispatches[name] / repeats,
        )
        for name in names
    ]


def report(results: list[Result], repeats: int, environment: Environment) -> list[str]:
    """Returns the lines of the results in Markdown."""
    return [
        *report_head(
            "Decode steps a dispatch",
            "benchmarks/throughput/decode_steps.py",
            environment,
            f"small: {SMALL_IN_WORDS}; tiny: 4 layers, hidden {TINY.hidden_size}; float32",
            f"Medians of {repeats} runs, settings in turns",
        ),
        "| workload | decode steps | tokens/s | dispatches | wait of a command, median | longest |",
        "|---|---|---:|---:|---:|---:|",
        *(
            f"| {r.workload} | {r.setting} | {r.tokens_per_s:.0f} | {r.num_dispatches:.0f} "
            f"| {np.median(r.waits_s):.3f} s | {max(r.waits_s):.3f} s |"
            for r in results
        ),
    ]


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Decode steps a dispatch.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="workloads whose names begin with this")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, with commas")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/decode_steps.md")
    args = parser.parse_args()
    results: list[Result] = []
    for workload in WORKLOADS:
        if workload.name.startswith(args.only):
            results += measure(workload, args.settings.split(","), args.repeats)
            print(f"{workload.name}: done", flush=True)
    environment = describe_environment(jax.devices()[0].device_kind)
    content = {"repeats": args.repeats, "results": [dataclasses.asdict(r) for r in results]}
    write_report(args.output, report(results, args.repeats, environment), environment, content)


if __name__ == "__main__":
    main()
