"""An hour of mixed load on a server: nothing grows, and no request is lost.

    python benchmarks/serving/soak.py                   # an hour
    python benchmarks/serving/soak.py --minutes 1

A client in another process keeps some requests open at all times and, between them, does what
clients and operators do: whole replies and streams of SGLang's and OpenAI's routes, clients that
leave half-way, aborts, pauses in every mode that keeps requests, sleeps with preserved state,
updates with the same weights, with a broken folder and with a folder that is not there. Since every
update brings the same weights, each reply must hold the tokens that the request gave before the
load; the report counts those that do not, and those that were never answered. Memory, threads and
file descriptors of the server's process are read every ten seconds, after its first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import psutil

from benchmarks.lib.reporting import ROOT, report_head, write_report
from benchmarks.serving.client import stream_all
from sgljax_engine import Engine
from tunix_sgljax.bench.environment import describe_environment

MODEL = ROOT / "tests/golden/qwen3_gqa_tied"
NUM_CLIENTS = 12
NUM_PROMPTS = 40
SAMPLE_S = 10.0
LIMIT_S = 300.0
OPERATOR_S = 1.0
"""Seconds between two deeds of the operator."""

CLIENT_S = 0.5
"""Seconds that a client thinks between two requests."""


def bodies() -> list[dict[str, Any]]:
    """Greedy requests of several lengths."""
    rng = random.Random(0)
    return [
        {
            "input_ids": [rng.randrange(5, 300) for _ in range(rng.randrange(3, 60))],
            "sampling_params": {
                "max_new_tokens": rng.randrange(10, 120),
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for _ in range(NUM_PROMPTS)
    ]


class Load:
    """The client's process.

    Attributes:
        counts: What was done, and what came of it.
    """

    def __init__(self, url: str, minutes: float, expected: list[list[int]]) -> None:
        """A client.

        Args:
            url: Of the server.
            minutes: How long.
            expected: Tokens of each of `bodies()`.
        """
        self.counts: collections.Counter[str] = collections.Counter()
        self._url = url
        self._end_s = time.monotonic() + 60 * minutes
        self._expected = expected
        self._bodies = bodies()

    async def run(self) -> None:
        """All clients and the operator."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=LIMIT_S, limits=limits
        ) as self._http:
            clients = (self._client(random.Random(seed)) for seed in range(NUM_CLIENTS))
            await asyncio.gather(self._operator(random.Random(99)), *clients)

    async def _client(self, rng: random.Random) -> None:
        ways = (self._whole, self._stream, self._openai, self._leave, self._abort)
        while time.monotonic() < self._end_s:
            place = rng.randrange(NUM_PROMPTS)
            way = rng.choice(ways)
            self.counts[way.__name__.strip("_")] += 1
            try:
                await way(place, rng)
            except Exception as error:
                self.counts["lost"] += 1
                print(f"lost: {way.__name__}: {error!r}", file=sys.stderr)
            await asyncio.sleep(CLIENT_S)

    def _check(self, place: int, ids: list[int], *, is_whole: bool = True) -> None:
        expected = self._expected[place]
        if ids != (expected if is_whole else expected[: len(ids)]):
            self.counts["wrong tokens"] += 1
        self.counts["answered"] += 1

    async def _whole(self, place: int, rng: random.Random) -> None:
        response = await self._http.post("/generate", json=self._bodies[place])
        response.raise_for_status()
        self._check(place, response.json()["output_ids"])

    async def _stream(self, place: int, rng: random.Random) -> None:
        (reply,) = await stream_all(self._url, [self._bodies[place]])
        self._check(place, reply["ids"])

    async def _openai(self, place: int, rng: random.Random) -> None:
        body = self._bodies[place]
        fields = {
            "prompt": body["input_ids"],
            "max_tokens": body["sampling_params"]["max_new_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = await self._http.post("/v1/completions", json=fields)
        response.raise_for_status()
        self._check(place, response.json()["choices"][0]["token_ids"])

    async def _leave(self, place: int, rng: random.Random) -> None:
        body = self._bodies[place] | {"stream": rng.random() < 0.5}
        reading = asyncio.ensure_future(self._http.post("/generate", json=body))
        await asyncio.wait({reading}, timeout=rng.random() * 0.2)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _abort(self, place: int, rng: random.Random) -> None:
        rid = f"abort-{rng.random()}"
        body = self._bodies[place] | {"rid": rid}
        reading = asyncio.ensure_future(self._http.post("/generate", json=body))
        await asyncio.wait({reading}, timeout=rng.random() * 0.2)
        (await self._http.post("/abort_request", json={"rid": rid})).raise_for_status()
        reply = (await reading).json()
        is_whole = reply["meta_info"]["finish_reason"]["type"] != "abort"
        self._check(place, reply["output_ids"], is_whole=is_whole)

    async def _operator(self, rng: random.Random) -> None:
        ways = (self._pause, self._sleep, self._update, self._bad_update, self._look)
        while time.monotonic() < self._end_s:
            way = rng.choice(ways)
            self.counts[way.__name__.strip("_").replace("_", " ")] += 1
            await way(rng)
            await asyncio.sleep(OPERATOR_S)

    async def _control(self, path: str, body: Any = None, status: int = 200) -> None:
        response = await self._http.post(path, json=body)
        if response.status_code != status:
            self.counts["control failed"] += 1
            print(f"{path}: {response.status_code} {response.text}", file=sys.stderr)

    async def _pause(self, rng: random.Random) -> None:
        await self._control("/pause_generation", {"mode": rng.choice(["retract", "in_place"])})
        await asyncio.sleep(rng.random() * 0.2)
        await self._control("/continue_generation")

    async def _sleep(self, rng: random.Random) -> None:
        await self._control(f"/sleep?level={rng.choice([1, 2])}&preserve_state=true")
        await asyncio.sleep(rng.random() * 0.2)
        await self._control("/wake_up")

    async def _update(self, rng: random.Random) -> None:
        body = {"model_path": "good", "mode": rng.choice(["retract", "in_place"])}
        await self._control("/update_weights_from_disk", body)

    async def _bad_update(self, rng: random.Random) -> None:
        folder = rng.choice(["broken", "missing"])
        await self._control("/update_weights_from_disk", {"model_path": folder}, status=400)

    async def _look(self, rng: random.Random) -> None:
        for path in ("/metrics", "/get_server_info", "/health", "/"):
            (await self._http.get(path)).raise_for_status()


def make_weights(root: Path) -> None:
    """A good and a broken copy of the model."""
    for name in ("good", "broken"):
        shutil.copytree(MODEL, root / name)
    (weights,) = (root / "broken").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])


def watch(end: threading.Event, samples: list[dict[str, float]]) -> None:
    """Reads what the process holds, until the end."""
    process, start_s = psutil.Process(), time.monotonic()
    while not end.wait(SAMPLE_S):
        samples.append(
            {
                "s": time.monotonic() - start_s,
                "rss_mib": process.memory_info().rss / 2**20,
                "threads": process.num_threads(),
                "fds": process.num_fds(),
                "jax_arrays": len(jax.live_arrays()),
            }
        )


def growth(samples: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Medians of the second and the last tenth of the samples."""
    values = [sample[name] for sample in samples]
    tenth = max(1, len(values) // 10)
    return float(np.median(values[tenth : 2 * tenth])), float(np.median(values[-tenth:]))


def main() -> None:
    """Runs server and client, and writes the report."""
    parser = argparse.ArgumentParser(description="An hour of mixed load.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/soak.md")
    args = parser.parse_args()
    if args.client:
        load = Load(args.client, args.minutes, json.load(sys.stdin))
        asyncio.run(load.run())
        json.dump(load.counts, sys.stdout)
        return
    samples: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as root,
        Engine(MODEL, page_size=8, max_running_requests=16, num_kv_tokens=1600) as engine,
    ):
        make_weights(Path(root))
        wanted = bodies()
        expected = [engine.generate(**body)["output_ids"] for body in wanted]
        engine.warmup()
        server = engine.serve(port=0, weights_root=root)
        end = threading.Event()
        watcher = threading.Thread(target=watch, args=(end, samples))
        watcher.start()
        command = [sys.executable, __file__, "--client", server.url, "--minutes", str(args.minutes)]
        done = subprocess.run(
            command, input=json.dumps(expected), stdout=subprocess.PIPE, text=True, check=True
        )
        end.set()
        watcher.join()
        server.stop()
        engine.flush_cache()
        state = engine.get_internal_state()
        engine.check_integrity()
    counts = json.loads(done.stdout)
    free = state.available_kv_tokens == state.total_kv_tokens
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head(
            "A server under mixed load",
            f"benchmarks/serving/soak.py --minutes {args.minutes:g}",
            environment,
            f"Model: {MODEL.name} of the tests, {NUM_CLIENTS} clients and an operator",
        ),
        f"Requests answered: {counts.get('answered', 0)}; lost: {counts.get('lost', 0)}; wrong "
        f"tokens: {counts.get('wrong tokens', 0)}; control calls that failed: "
        f"{counts.get('control failed', 0)}. All pages free at the end: {'yes' if free else 'NO'}.",
        "",
        "| | second tenth | last tenth | change |",
        "|---|---:|---:|---:|",
    ]
    for name in ("rss_mib", "threads", "fds", "jax_arrays"):
        before, after = growth(samples, name)
        lines.append(
            f"| {name} | {before:.0f} | {after:.0f} | {100 * (after / before - 1):+.1f} % |"
        )
    lines += ["", "| done | times |", "|---|---:|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(counts.items())]
    write_report(args.output, lines, environment, {"counts": counts, "samples": samples})


if __name__ == "__main__":
    main()
