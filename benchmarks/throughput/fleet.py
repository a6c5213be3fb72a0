"""What HTTP costs: an engine in process, one server, two behind a router, and a slow network.

    python benchmarks/throughput/fleet.py            # 8 minutes on 2 cores
    python benchmarks/throughput/fleet.py --quick    # a smoke test

The workload `rl_longtail` with the model `small`: 128 requests, 8 samples of 16 prompts, on 64
rows. Runs take turns, each from an empty prefix cache. Servers are processes of this machine, so
two share its cores: what they cost, not what they gain, is measured. The router is sglang-router,
if it is installed (`pip install sglang-router`). The slow network is a proxy in front of a server:
50 ms each way, and 1 % of the chunks retransmitted. A sync is `update_weights` of all
weights, changed by 1 %.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.fleet_worker import engine_options, fleet_worker
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, IdTokenizer
from benchmarks.lib.slow_network import SlowNetwork
from benchmarks.lib.turns import speed_table, take_turns
from benchmarks.lib.workloads import Workload, make_workload
from sgljax_engine import Engine, EngineConfig, SamplingParams, logical_rules
from sgljax_engine.fleet import FleetConfig, RemoteEngine
from sgljax_engine.models.registry import get_model

_DELAY_S, _LOSS = 0.05, 0.01
_NUM_ROWS = 64


def random_weights(name: str, seed: int) -> dict[str, np.ndarray]:
    """Weights in the engine's names and shapes."""
    config = MODELS[name].config
    specs = get_model(config.architecture).param_specs(config)
    rng = np.random.default_rng(seed)
    return {
        key: np.float32(0.02) * rng.standard_normal(spec.shape, np.float32)
        for key, spec in specs.items()
    }


def router_command(urls: Sequence[str], port: int) -> list[str] | None:
    """The router's command; None if it is not installed."""
    program = shutil.which("sglang-router")
    if program is None:
        return None
    return [
        *(program, "launch", "--policy", "cache_aware", "--host", "127.0.0.1"),
        *("--port", str(port), "--worker-urls", *urls, "--log-level", "error"),
    ]


@contextlib.contextmanager
def router(urls: Sequence[str]) -> Iterator[str | None]:
    """Wraps the life of a router's process; yields its address, None if it is not installed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = router_command(urls, port)
    if command is None:
        yield None
        return
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class Fleets:
    """Remote engines by name, and all that has to end."""

    def __init__(self, stack: contextlib.ExitStack, model: str, workload: Workload) -> None:
        """Ends with the stack."""
        self._stack, self._model, self._workload = stack, model, workload
        self._weights = random_weights(model, 0)

    def workers(self, name: str, count: int) -> tuple[Path, list[str]]:
        """A store, and servers that read it."""
        store = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        length = self._workload.max_model_len
        urls = [
            self._stack.enter_context(
                fleet_worker(self._model, store, f"{name}-{index}", _NUM_ROWS, length)
            )
            for index in range(count)
        ]
        return store, urls

    def engine(self, store: Path, urls: Sequence[str]) -> RemoteEngine:
        """A remote engine whose servers have the weights."""
        config = MODELS[self._model].config
        options = {"max_model_len": self._workload.max_model_len, "random_seed": 0}
        engine = RemoteEngine(
            FleetConfig(urls=urls, weights_store=str(store)),
            model_config=config,
            weights=self._weights,
            weight_rules=logical_rules(config),
            tokenizer=IdTokenizer(),
            config=EngineConfig.from_options(options),
        )
        self._stack.callback(engine.shutdown)
        return engine

    def embedded(self) -> Engine:
        """An engine in this process."""
        config = MODELS[self._model].config
        options = engine_options(_NUM_ROWS, self._workload.max_model_len)
        engine = Engine(
            model_config=config,
            weights=self._weights,
            weight_rules=logical_rules(config),
            tokenizer=IdTokenizer(),
            random_seed=0,
            **options,
        )
        self._stack.callback(engine.shutdown)
        return engine


def syncs(engine: RemoteEngine, model: str, num: int) -> list[Mapping[str, Any]]:
    """Seconds and bytes of updates, the first of all weights, the others of 1 % of them."""
    config, found = MODELS[model].config, []
    weights, rng = random_weights(model, 1), np.random.default_rng(0)
    for index in range(num):
        for x in weights.values() if index else ():
            flat = x.reshape(-1)
            flat[rng.integers(0, flat.size, max(1, flat.size // 100))] += np.float32(1e-3)
        began = time.perf_counter()
        engine.update_weights(weights, logical_rules(config))
        written = engine.last_written
        assert written is not None
        seconds = time.perf_counter() - began
        found.append({"seconds": seconds, "bytes": written.num_bytes, "all": written.whole_bytes})
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__, pairs=5).parse_args(argv)
    model = "tiny" if args.quick else "small"
    workload = make_workload("rl_longtail", MODELS[model].config.vocab_size, is_quick=args.quick)
    params = [
        SamplingParams(max_new_tokens=length, ignore_eos=True, seed=row)
        for row, length in enumerate(workload.output_lengths)
    ]
    with contextlib.ExitStack() as stack:
        fleets = Fleets(stack, model, workload)
        embedded = fleets.embedded()
        store, urls = fleets.workers("one", 1)
        engines: dict[str, Any] = {"embedded": embedded, "1 server": fleets.engine(store, urls)}
        store, urls = fleets.workers("slow", 1)
        network = SlowNetwork(urls[0], delay_s=_DELAY_S, loss=_LOSS)
        stack.callback(network.close)
        engines["1 server, slow network"] = fleets.engine(store, [network.url])
        store, urls = fleets.workers("two", 2)
        engines["2 servers"] = fleets.engine(store, urls)
        store, urls = fleets.workers("behind", 2)
        behind = stack.enter_context(router(urls))
        if behind is not None:
            engines["2 servers, sglang-router"] = fleets.engine(store, [behind])
        outputs: dict[str, list[list[int]]] = {}

        def generate(name: str) -> None:
            engine = engines[name]
            engine.flush_cache()
            made = engine.generate_requests(workload.requests, params)
            outputs[name] = [output.output_ids for output in made]

        runs: dict[str, Callable[[], Any]] = {
            name: functools.partial(generate, name) for name in engines
        }
        seconds = take_turns(runs, 2 if args.quick else args.pairs)
        assert all(each == outputs["embedded"] for each in outputs.values())
        table = speed_table({"rl_longtail": seconds}, "embedded")
        synced = syncs(engines["1 server, slow network"], model, 3 if args.quick else 6)
    rates = {
        name: float(workload.useful_tokens / np.median(each)) for name, each in seconds.items()
    }
    lines = [*table, "", "| run | tokens/s |", "|---|---:|"]
    lines += [f"| {name} | {rate:.0f} |" for name, rate in rates.items()]
    lines += [
        "",
        "| sync over the slow network | seconds | MB written | of |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {index + 1} | {each['seconds']:.2f} | {each['bytes'] / 1e6:.1f} "
        f"| {each['all'] / 1e6:.1f} |"
        for index, each in enumerate(synced)
    ]
    write_results(
        output_dir(args) / "fleet.md",
        "A fleet beside an engine in process",
        "benchmarks/throughput/fleet.py",
        lines,
        {"seconds": seconds, "tokens_per_s": rates, "syncs": synced},
        facts=[f"Model: {MODELS[model].in_words}", "All runs gave the same tokens"],
    )


if __name__ == "__main__":
    main()
