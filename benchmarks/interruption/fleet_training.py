"""What the syncs of whole trainings take: GRPO on addition with two servers over a slow network.

    python benchmarks/interruption/fleet_training.py           # 10 minutes on 2 cores
    python benchmarks/interruption/fleet_training.py --quick   # a smoke test

`configs/grpo_addition.yaml` for 20 steps (`full`), and `configs/grpo_addition_lora.yaml` twice: its
pairs alone are sent (`adapter`), or merged into the weights (`merged`). The network is a proxy in
front of each server: 50 ms each way, and 1 % of the chunks retransmitted. Seconds are those of
`update_params`: until both servers serve the version, which they read from a folder.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from benchmarks.lib.slow_network import SlowNetwork

sys.path.insert(0, str(ROOT / "examples"))

from fleet.audit import Audit
from fleet.processes import Fleet
from fleet.services import worker_services
from fleet.training import train
from hf_folder import write_hf_folder
from sgljax_engine.fleet import RemoteEngine
from tunix_sgljax import SglJaxFleetRollout
from tunix_sgljax.training import load_config

_DELAY_S, _LOSS = 0.05, 0.01
_NUM_SERVERS = 2
_RANK = 8
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("grpo_addition.yaml", {}, {}),
    "adapter": (
        "grpo_addition_lora.yaml",
        {"lora": "adapter"},
        {"max_loras": 1, "max_lora_rank": _RANK},
    ),
    "merged": ("grpo_addition_lora.yaml", {"lora": "merged"}, {}),
}
"""For each run its config, options of the rollout, and more options of the servers' engines."""


class TimedFleetRollout(SglJaxFleetRollout):
    """A rollout that records its syncs: seconds, bytes, and bytes of the whole."""

    def __init__(self, *, syncs: list[dict[str, Any]], **arguments: Any) -> None:
        """Adds to `syncs`."""
        self._syncs = syncs
        super().__init__(**arguments)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Syncs, and records what it took."""
        began = time.perf_counter()
        super().update_params(params, filter_types)
        assert isinstance(self.engine, RemoteEngine)
        written = self.engine.last_written
        assert written is not None
        self._syncs.append(
            {
                "seconds": time.perf_counter() - began,
                "is_base": written.is_base,
                "bytes": written.num_bytes,
                "whole_bytes": written.whole_bytes,
            }
        )


def run(name: str, num_steps: int, batch_size: int) -> dict[str, Any]:
    """Trains; returns the rewards and the syncs.

    Raises:
        AssertionError: A row was lost, trained twice, or of other weights.
    """
    config_name, lora, engine = RUNS[name]
    syncs: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = [f"num_batches={num_steps}", f"batch_size={batch_size}", f"output_dir={output}"]
        config = load_config(ROOT / "configs" / config_name, settings)
        options = {**config.sgljax_config, **engine}
        options.pop("lora", None)
        model = write_hf_folder(output / "model")
        services = worker_services(_NUM_SERVERS, model, output / "weights", options)
        fleet = stack.enter_context(Fleet(services, output / "logs"))
        fleet.wait_until_healthy()
        urls = [
            stack.enter_context(SlowNetwork(each.url, delay_s=_DELAY_S, loss=_LOSS)).url
            for each in services
        ]
        make_rollout = functools.partial(
            TimedFleetRollout,
            syncs=syncs,
            fleet={"urls": urls, "weights_store": str(output / "weights")},
            random_seed=config.seed,
            **lora,
        )
        audit = Audit()
        records = train(config, make_rollout, audit, lambda record: None)
    if audit.wrong_versions + audit.num_trained_twice + audit.num_lost:
        raise AssertionError(
            f"{name}: rows were not trained once each, with their weights: {audit}"
        )
    rewards = [float(record.reward) for record in records]
    return {"rewards": rewards, "rows": audit.num_rows, "syncs": syncs}


def row(name: str, found: dict[str, Any]) -> str:
    """A row of the table: medians of syncs behind the first, which is of a base."""
    syncs = found["syncs"][1:]
    seconds, sizes, whole = (
        [each[key] for each in syncs] for key in ("seconds", "bytes", "whole_bytes")
    )
    rewards = found["rewards"]
    cells = [
        f"{found['syncs'][0]['bytes'] / 1e6:.2f}",
        f"{np.median(sizes) / 1e6:.3f}",
        f"{np.sum(sizes) / np.sum(whole):.1%}",
        f"{np.median(seconds):.2f}",
        f"{np.max(seconds):.2f}",
        str(found["rows"]),
        f"{np.mean(rewards[:5]):.2f} to {np.mean(rewards[-5:]):.2f}",
    ]
    return f"| {name} | {len(syncs)} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__).parse_args(argv)
    num_steps, batch_size = (2, 2) if args.quick else (20, 16)
    found = {name: run(name, num_steps, batch_size) for name in RUNS}
    lines = [
        "| run | syncs | MB, first | MB, then | of the whole | s | longest | rows | reward |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
        *(row(name, each) for name, each in found.items()),
    ]
    write_results(
        output_dir(args) / "fleet_training.md",
        "Syncs of whole trainings on a fleet",
        "benchmarks/interruption/fleet_training.py",
        lines,
        {"runs": found},
        facts=[
            f"{_NUM_SERVERS} servers, each behind {1000 * _DELAY_S:.0f} ms and {_LOSS:.0%} loss",
            "Each row was trained once, with its step's weights",
            f"Reward: means of the first and the last 5 of {num_steps} steps",
        ],
    )


if __name__ == "__main__":
    main()
