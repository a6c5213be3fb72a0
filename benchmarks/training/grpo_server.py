"""A long GRPO run with the server up, beside the same run without: memory, step time, reward.

    python benchmarks/training/grpo_server.py --steps 1000 --prompts 4

The run is `examples/grpo_addition.py`'s, each in a process of its own, one after the other. In the
one with the server, a client asks for a completion every second, and for the server's state; what
it gets joins the batches of the rollout. `--prompts` is the prompts of a step (16 in the example).
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import psutil

from benchmarks.lib.reporting import ROOT, report_head, write_report
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.training import TrainConfig, load_config
from tunix_sgljax.training.report import StepRecord

sys.path.insert(0, str(ROOT / "examples"))
import grpo_addition

ASK_S = 1.0
NUM_BLOCKS = 10
MODES = ("without", "with")


def ask(url: str, end: threading.Event, counts: dict[str, int]) -> None:
    """A client of the policy that is trained."""
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=300) as http:
        while not end.wait(ASK_S):
            reply = http.post("/v1/completions", json=body)
            reply.raise_for_status()
            assert len(reply.json()["choices"][0]["token_ids"]) == 20
            http.get("/get_server_info").raise_for_status()
            counts["answered"] += 1


def run(config: TrainConfig, *, is_served: bool) -> dict[str, Any]:
    """Trains; returns a record a step, and what the client got."""
    rollouts: list[SglJaxRollout] = []
    steps: list[dict[str, float]] = []
    counts = {"answered": 0}
    end = threading.Event()
    client = threading.Thread()
    process = psutil.Process()

    class Kept(SglJaxRollout):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            rollouts.append(self)

    def choose(config: TrainConfig) -> Any:
        return functools.partial(Kept, **config.sgljax_config, random_seed=config.seed)

    def on_step(record: StepRecord) -> None:
        nonlocal client
        if is_served and not steps:
            server = rollouts[0].serve(port=0)
            client = threading.Thread(target=ask, args=(server.url, end, counts))
            client.start()
        steps.append(
            {
                "reward": record.reward,
                "step_s": record.step_s,
                "rss_mib": process.memory_info().rss / 2**20,
                "threads": process.num_threads(),
            }
        )
        if record.step == config.num_batches and is_served:
            end.set()
            client.join()
        if record.step % 50 == 0:
            print(f"step {record.step}: reward {record.reward:.3f}", file=sys.stderr, flush=True)

    grpo_addition.choose_rollout = choose
    grpo_addition.train(config, on_step)
    return {"steps": steps, **counts}


def blocks(steps: list[dict[str, float]], name: str) -> list[float]:
    """Mean rewards, and medians of all else, of each tenth of the run."""
    values = np.array([step[name] for step in steps])
    average = np.mean if name == "reward" else np.median
    return [float(average(part)) for part in np.array_split(values, NUM_BLOCKS)]


def main() -> None:
    """Runs both, and writes the report."""
    parser = argparse.ArgumentParser(description="GRPO with the server up.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/grpo_server.md")
    args = parser.parse_args()
    overrides = [f"num_batches={args.steps}", f"batch_size={args.prompts}"]
    config = load_config(ROOT / "configs/grpo_addition.yaml", overrides)
    if args.mode:
        json.dump(run(config, is_served=args.mode == "with"), sys.stdout)
        return
    runs: dict[str, Any] = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--mode", mode]
        command += ["--steps", str(args.steps), "--prompts", str(args.prompts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs[mode] = json.loads(done.stdout[done.stdout.index('{"steps"') :])
    environment = describe_environment(jax.devices()[0].device_kind)
    columns = {
        (mode, name): blocks(runs[mode]["steps"], name)
        for name in ("reward", "step_s", "rss_mib", "threads")
        for mode in MODES
    }
    lines = [
        *report_head(
            "GRPO with the server up",
            f"benchmarks/training/grpo_server.py --steps {args.steps} --prompts {args.prompts}",
            environment,
            f"The client asked {runs['with']['answered']} times; each time it was answered",
        ),
        "Means of rewards, medians of all else, over each tenth of the run.",
        "",
        "| steps | " + " | ".join(f"{name}, {mode}" for mode, name in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    size = args.steps // NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        digits = {"reward": 3, "step_s": 2, "rss_mib": 0, "threads": 0}
        cells = [f"{values[block]:.{digits[key[1]]}f}" for key, values in columns.items()]
        lines.append(f"| {block * size + 1} to {(block + 1) * size} | {' | '.join(cells)} |")
    write_report(args.output, lines, environment, {"runs": runs})


if __name__ == "__main__":
    main()
