"""500 streams at once while weights change under them: every token is accounted for."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.client import stream_all
from sgljax_engine import Engine, logical_rules
from tests.engine.models import TINY, logical_weights, random_prompts
from tests.geometry import WIDE, other
from tests.server.served import serving
from tests.threads import LIMIT_S, start

NUM_STREAMS = 500
UPDATE_S = 0.5


@pytest.mark.soak
def test_500_streams_with_two_updates_a_second():
    weights = [logical_weights(seed=seed) for seed in (0, 1)]
    rules = logical_rules(TINY)
    rng = np.random.default_rng(0)
    bodies: list[Any] = [
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": int(count), "seed": index, "ignore_eos": True},
            "return_logprob": True,
        }
        for index, (ids, count) in enumerate(
            zip(random_prompts(NUM_STREAMS, 4, 60), rng.integers(20, 80, NUM_STREAMS), strict=True)
        )
    ]
    with Engine(
        model_config=TINY,
        weights=weights[0],
        weight_rules=rules,
        **other("pages that are too few for a crowd", WIDE, num_kv_tokens=3000),
    ) as engine:
        engine.warmup()
        with serving(engine) as served:
            done = threading.Event()

            def update() -> int:
                for version in itertools.count(1):
                    if done.wait(UPDATE_S):
                        return version - 1
                    mode = "retract"
                    assert engine.update_weights(weights[version % 2], rules, mode=mode) == version
                raise AssertionError

            updates = start(update)
            try:
                replies = asyncio.run(stream_all(served.url, bodies))
            finally:
                done.set()
            num_updates = updates.result(LIMIT_S)
        state = engine.get_internal_state()
        assert state.available_kv_tokens == state.total_kv_tokens
        assert state.running_batch_size == state.waiting_queue_size == 0
        engine.check_integrity()
        assert num_updates > 0

        versions = [reply["versions"] for reply in replies]
        for body, reply in zip(bodies, replies, strict=True):
            count = body["sampling_params"]["max_new_tokens"]
            assert reply["finish_reason"] == {"type": "length", "length": count}
            assert [len(reply[name]) for name in ("ids", "logprobs", "versions")] == [count] * 3
            assert reply["versions"] == sorted(reply["versions"])
        assert {v for each in versions for v in each} <= set(range(num_updates + 1))
        assert any(len(set(each)) > 1 for each in versions), "no update met a running request"

        # A token's log-prob is that of the weights of its version, given all tokens before it.
        sequences = [b["input_ids"] + r["ids"] for b, r in zip(bodies, replies, strict=True)]
        starts = [len(body["input_ids"]) for body in bodies]
        scores = []
        for each in weights:
            engine.update_weights(each, rules)
            scores.append(engine.score(sequences, start_lens=starts))
    for index, reply in enumerate(replies):
        parity = np.array(reply["versions"]) % 2
        expected = np.where(parity, scores[1][index], scores[0][index])
        np.testing.assert_allclose(reply["logprobs"], expected, atol=2e-4)
