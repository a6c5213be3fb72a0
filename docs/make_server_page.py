"""Makes the picture of the server's page, docs/images/server_page.png, in three minutes.

    python docs/make_server_page.py
    python docs/make_server_page.py --output /tmp/x.png --scheme dark --width 360

Steps of a training as its server sees them: a wave of samples, new weights, and the next wave. One
wave is paused, and between two the engine sleeps.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgljax_engine import Engine, ModelConfig, RopeConfig
from tests.engine.models import spread_weights
from tests.server.browser import Browser

IMAGE = Path(__file__).parent / "images" / "server_page.png"
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=1024,
)
PROMPT_TOKENS = 32
WAVE_S = 18.0
"""Seconds that a wave takes, more or less."""


class Rollouts:
    """Sends waves of samples to a server."""

    def __init__(self, url: str, threads: concurrent.futures.Executor) -> None:
        """Sends nothing yet."""
        self._url = url
        self._threads = threads
        self._random = random.Random(0)

    def start(self, num_samples: int) -> list[concurrent.futures.Future[None]]:
        """Sends a wave, of lengths as different as those of real answers."""
        lengths = [min(1, self._random.lognormvariate(-1.3, 0.4)) for _ in range(num_samples)]
        most = MODEL.context_length - PROMPT_TOKENS
        return [self._threads.submit(self._send, int(most * part)) for part in lengths]

    def _send(self, num_tokens: int) -> None:
        body = {
            "input_ids": [self._random.randrange(MODEL.vocab_size) for _ in range(PROMPT_TOKENS)],
            "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
        }
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{self._url}/generate", data, headers)
        ) as reply:
            reply.read()


def train(
    browser: Browser, engine: Engine, weights: Any, url: str, args: argparse.Namespace
) -> None:
    """Takes steps of a training, and the picture in the middle of the last."""
    engine.warmup()
    with concurrent.futures.ThreadPoolExecutor(1024) as threads:
        rollouts = Rollouts(url, threads)
        started_s = time.perf_counter()
        concurrent.futures.wait(rollouts.start(64))
        num_samples = int(64 * WAVE_S / (time.perf_counter() - started_s))
        browser.open(
            url,
            viewport={"width": args.width, "height": 400},
            colorScheme=args.scheme,
            deviceScaleFactor=1.5,
        )
        for step in range(8):
            wave = rollouts.start(num_samples)
            if step == 2:
                concurrent.futures.wait(wave, WAVE_S / 4)
                browser.click("#pause")
                time.sleep(11)
                browser.click("#continue")
            if step == 7:
                concurrent.futures.wait(wave, WAVE_S / 3)
                browser.screenshot(args.output, fullPage=True)
                assert browser.problems() == []
                return
            concurrent.futures.wait(wave)
            if step == 4:
                engine.sleep()
                time.sleep(14)
                engine.wake_up()
            engine.update_weights(weights)
            time.sleep(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the picture."""
    parser = argparse.ArgumentParser(description="Make the picture of the server's page.")
    parser.add_argument("--output", type=Path, default=IMAGE, help="default: %(default)s")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=880, help="in CSS pixels")
    args = parser.parse_args(argv)
    weights = spread_weights(MODEL)
    with (
        Browser() as browser,
        Engine(model_config=MODEL, weights=weights, max_running_requests=16) as engine,
        engine.serve(port=0, model_name="qwen3-policy") as server,
    ):
        train(browser, engine, weights, server.url, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
