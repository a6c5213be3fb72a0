"""A real model's training with either engine: what it learned, and where the seconds went.

    python examples/grpo_reasoning.py --seed 0 --output-dir outputs/sgljax_0
    python examples/grpo_reasoning.py --seed 0 --rollout vanilla --output-dir outputs/vanilla_0
    python benchmarks/throughput/real_training.py outputs/sgljax_0 outputs/vanilla_0

Held-out rewards are of one answer to each prompt. Seconds are of all steps but the first, which
compiles, and of the whole training with it, evaluations left out. `docs/make_engines_plot.py` draws
the runs. For runs that compile everything: `--set sgljax_config.compilation_cache_dir=null`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.reporting import make_parser, output_dir, write_results

_FIELDS = ("reward", "num_tokens", "rollout_s", "sync_s", "trainer_s", "end_s")


def read_run(folder: Path) -> dict[str, Any]:
    """A run of grpo_reasoning.py, from its records.json."""
    content = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    settings = content["settings"]
    return {
        "engine": settings["rollout_engine"],
        "seed": settings["seed"],
        "device": settings["device"],
        "tokens": settings["rollout_config"]["total_generation_steps"],
        "rows": settings["batch_size"] * settings["grpo_config"]["num_generations"],
        "steps": [{name: round(step[name], 4) for name in _FIELDS} for step in content["steps"]],
        "held_out": [
            {"num_steps": each["num_steps"], "reward": each["reward"]}
            for each in content["held_out"]
        ],
    }


def lines_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The report's table."""
    lines = [
        "| engine | seed | steps | held-out reward before | after | tokens an answer "
        "| rollout, s a step | sync | trainer | whole, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        first, last = (run["held_out"][at]["reward"] for at in (0, -1))
        tokens = sum(step["num_tokens"] for step in run["steps"]) / len(run["steps"]) / run["rows"]
        timed = run["steps"][1:] or run["steps"]
        means = (
            sum(step[name] for step in timed) / len(timed)
            for name in ("rollout_s", "sync_s", "trainer_s")
        )
        cells = " | ".join(f"{mean:.2f}" for mean in means)
        lines.append(
            f"| {run['engine']} | {run['seed']} | {len(run['steps'])} | {first:.2f} | {last:.2f} "
            f"| {tokens:.0f} | {cells} | {run['steps'][-1]['end_s']:.0f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Reads runs and writes the results."""
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of grpo_reasoning.py")
    args = parser.parse_args(argv)
    runs = [read_run(folder) for folder in args.runs]
    first = runs[0]
    write_results(
        output_dir(args) / "real_training.md",
        "A real model's training with either engine",
        "benchmarks/throughput/real_training.py",
        lines_of(runs),
        {"runs": runs},
        facts=[
            f"GRPO with LoRA on SmolLM2-135M-Instruct, which learns plain words; "
            f"{first['rows']} completions of at most {first['tokens']} tokens a step"
        ],
        device=first["device"],
    )


if __name__ == "__main__":
    main()
