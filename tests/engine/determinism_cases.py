"""Requests of all kinds, run in many ways, and the bits that come out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import sgljax_cpu
from sgljax_engine import Engine, ModelConfig, RequestOutput, SamplingParams
from sgljax_engine.processing.input_processor import LogprobArgs
from tests import inside
from tests.engine.interrupts import wait_until
from tests.engine.models import TINY, spread_weights
from tests.geometry import other
from tests.threads import LIMIT_S, gate_steps, start

MODEL = dataclasses.replace(TINY, vocab_size=64, hidden_size=48, eos_token_ids=(5,))
"""One width of sampling tables, so that there are few programs to compile."""

ALONE = other(
    "each request by itself, one token a dispatch",
    page_size=16,
    num_kv_tokens=1024,
    max_running_requests=1,
    batch_buckets=(1,),
    decode_steps=1,
)


@contextlib.contextmanager
def using(backend: str) -> Iterator[str]:
    """With JIT-compiled CPU kernels ("native"), or with what is used without them ("portable")."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "portable":
            patch.setattr(sgljax_cpu, "unavailable", lambda: "this is a test of what else there is")
        elif sgljax_cpu.unavailable() is not None:
            pytest.skip(f"no JIT-compiled CPU kernels here: {sgljax_cpu.unavailable()}")
        yield backend


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    params: SamplingParams
    top_logprobs: int = 0


class Bits(NamedTuple):
    """What must not differ: tokens, their log-probs to the last bit, and why the request ended."""

    tokens: tuple[int, ...]
    logprobs: bytes
    scaled_logprobs: bytes
    processed_logprobs: bytes
    top_logprobs: str
    finish: str


def requests(count: int, vocab_size: int, max_len: int = 210, seed: int = 0) -> list[Asked]:
    """Greedy and seeded requests with settings of every kind; half of them share prefixes."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(low, high + 1)).tolist()

    prefixes = [tokens(5, 90) for _ in range(6)]
    made = []
    for index in range(count):
        prompt = tokens(1, 150)
        if index % 2:
            prompt = (prefixes[rng.integers(6)] + tokens(0, 60))[:150]
        num_new = int(rng.integers(1, min(60, max_len - len(prompt)) + 1))
        setting = _settings(index, vocab_size, num_new, rng)
        params = SamplingParams(max_new_tokens=num_new, seed=int(rng.integers(1 << 40)), **setting)
        # Of some that change logits too, so that there are fewer programs.
        made.append(Asked(prompt, params, top_logprobs=4 if index % 18 in (8, 11) else 0))
    return made


def _settings(
    index: int, vocab_size: int, num_new: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Every third request is greedy, the others have several temperatures."""
    settings: dict[str, Any] = {"temperature": float((0, 0.6, 1.0, 0, 1.0, 1.7)[index % 6])}
    ids = rng.permutation(vocab_size).tolist()
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": int(rng.integers(1, vocab_size))},
        {"top_p": 0.8, "ignore_eos": True},
        {"min_p": 0.02, "top_p": 0.97, "top_k": 40},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logit_bias": {ids[0]: 2.5, ids[1]: -1.5}, "bad_token_ids": tuple(ids[2:5])},
        {"stop_token_ids": tuple(ids[:2]), "min_new_tokens": min(4, num_new)},
        {},
        {"allowed_token_ids": tuple(ids[: vocab_size // 2])},
    )
    return settings | kinds[index // 2 % len(kinds)]


def bits_of(out: RequestOutput) -> Bits:
    """The bits of a finished request."""
    named = out.logprobs, out.scaled_logprobs, out.processed_logprobs
    raw, scaled, processed = (np.asarray(each, np.float32).tobytes() for each in named)
    top = repr(out.extra_logprobs)
    return Bits(tuple(out.output_ids), raw, scaled, processed, top, str(out.finish))


class Way(NamedTuple):
    """A way to run requests.

    Attributes:
        options: Of the engine.
        order: Of arrival; None is the order that they have.
        splits: Calls that run at the same time, each with a part of the requests.
        interrupt: Called again and again with the engine while they run.
    """

    options: Mapping[str, Any]
    order: Sequence[int] | None = None
    splits: int = 1
    interrupt: Callable[[Engine], None] | None = None


def make_engine(
    options: Mapping[str, Any],
    model: ModelConfig = MODEL,
    weights: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine; with JIT-compiled kernels it is deterministic."""
    return Engine(
        model_config=model,
        weights=spread_weights(model) if weights is None else weights,
        **options,
    )


def run(engine: Engine, asked: Sequence[Asked], way: Way) -> list[Bits]:
    """The bits of each request."""
    order = range(len(asked)) if way.order is None else way.order
    parts = [order[i :: way.splits] for i in range(way.splits)]
    if way.interrupt is not None:
        gate_steps(engine)
    goal = engine.get_internal_state().counters.num_requests + len(asked)
    calls = [start(lambda part=part: ask(engine, [asked[i] for i in part])) for part in parts]
    # An engine that has given its weights up refuses whoever comes late.
    wait_until(
        engine,
        lambda state: state.counters.num_requests >= goal or any(call.done() for call in calls),
    )
    while way.interrupt is not None and not all(call.done() for call in calls):
        way.interrupt(engine)
    bits: dict[int, Bits] = {}
    for part, call in zip(parts, calls, strict=True):
        bits |= zip(part, call.result(LIMIT_S), strict=True)
    engine.check_integrity()
    return [bits[i] for i in range(len(asked))]


def ask(engine: Engine, asked: Sequence[Asked]) -> list[Bits]:
    """All of them in one call."""
    logprobs = LogprobArgs(
        return_logprob=True, top_logprobs_num=[each.top_logprobs for each in asked]
    )
    params, prompts = [each.params for each in asked], [each.prompt for each in asked]
    made = inside.make_requests(engine, None, params, prompts, logprobs, False)
    return [bits_of(out) for out in inside.callers(engine).generate(made)]


def differing(some: Sequence[Bits], others: Sequence[Bits]) -> list[tuple[int, list[str]]]:
    """Which requests differ, and in what."""
    return [
        (i, [name for name in Bits._fields if getattr(a, name) != getattr(b, name)])
        for i, (a, b) in enumerate(zip(some, others, strict=True))
        if a != b
    ]


class Interrupter:
    """Interrupts an engine that works, at random, again and again, in all ways by turns."""

    def __init__(self, seed: int, weights: Mapping[str, Any] | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._weights = weights
        self._kinds = ["retract", "in_place", "sleep"] + ["update"] * (weights is not None)
        self._next: list[str] = []
        self.counts: dict[str, int] = {}

    def __call__(self, engine: Engine) -> None:
        """Waits for a few tokens, or for the end, and interrupts."""
        num = engine.get_internal_state().counters.num_output_tokens
        more = int(self._rng.integers(20, 400))

        def is_due(state: Any) -> bool:
            is_idle = state.running_batch_size + state.waiting_queue_size == 0
            return is_idle or state.counters.num_output_tokens >= num + more

        wait_until(engine, is_due)
        self._next = self._next or self._rng.permutation(self._kinds).tolist()
        kind = self._next.pop()
        self.counts[kind] = self.counts.get(kind, 0) + 1
        getattr(self, f"_{kind}")(engine)

    def _retract(self, engine: Engine) -> None:
        engine.pause_generation("retract")
        if self._rng.random() < 0.3:
            engine.flush_cache()
        engine.continue_generation()

    def _in_place(self, engine: Engine) -> None:
        engine.pause_generation("in_place")
        engine.continue_generation()

    def _sleep(self, engine: Engine) -> None:
        level, preserve = int(self._rng.integers(1, 3)), bool(self._rng.integers(2))
        if self._weights is None:
            level = 1
        engine.sleep(level, preserve)
        engine.wake_up()
        if level == 2 and not preserve:
            engine.update_weights(self._weights)

    def _update(self, engine: Engine) -> None:
        mode = "in_place" if self._rng.integers(2) else "retract"
        engine.update_weights(self._weights, mode=mode)
