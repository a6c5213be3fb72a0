"""Threads at random: requests, weight updates, pauses and sleeps, each token checked afterwards.

Every token names a weight version. With started requests retracted at each update, it is the one
that an engine of another backend, which nobody interrupts, gives greedily under these weights
behind the tokens before it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from typing import Any

import pytest

from sgljax_cpu import chain
from sgljax_engine import Engine, ModelConfig
from tests.engine import models
from tests.engine.interrupts import interrupt
from tests.geometry import RETRACTING, SMALL
from tests.threads import LIMIT_S, start

NUM_TOKENS = 20_000
NUM_WEIGHTS = 3
NUM_CLIENTS = 5
BACKENDS = ("native", "xla")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the engine is, and what happens to it.

    `is_rounded`: keys are rounded to 8 bits.
    """

    model: ModelConfig = models.TINY
    options: tuple[tuple[str, Any], ...] = ()
    operations: tuple[str, ...] = ("update", "pause", "sleep", "flush")
    adapters: tuple[str, ...] = ()
    is_rounded: bool = False

    def oracle(self, backend: str) -> str:
        """The backend whose tokens are right: the other one, but where rounding magnifies noise."""
        if self.is_rounded:
            return backend
        (other,) = set(BACKENDS) - {backend}
        return other


INT8 = ("kv_cache_dtype", "int8")
"""Two backends may round a number to neighbouring ones."""

KINDS = {
    "updates, pauses, sleeps": Kind(),
    "adapters": Kind(
        options=(("max_loras", 2), ("max_lora_rank", 4)),
        operations=("update", "pause", "adapter", "flush"),
        adapters=("one", "two"),
    ),
    "drafts": Kind(options=(("speculation", "always"),)),
    "hybrid": Kind(models.HYBRID),
    "experts": Kind(models.TINY_MOE),
    "sinks": Kind(models.GPT_OSS),
    **{name: Kind(model) for name, model in models.NEW_FAMILIES.items()},
    "adapters, drafts beside sinks": Kind(
        models.GPT_OSS,
        (("max_loras", 1), ("max_lora_rank", 4), ("speculation", "always")),
        ("update", "pause", "sleep", "adapter", "flush"),
        ("one",),
    ),
    "latents": Kind(models.LATENTS),
    "8-bit keys": Kind(options=(INT8,), is_rounded=True),
    "8-bit keys, hybrid": Kind(models.HYBRID, (INT8,), is_rounded=True),
    "8-bit keys, adapters, drafts beside sinks": Kind(
        models.GPT_OSS,
        (("max_loras", 1), ("max_lora_rank", 4), ("speculation", "always"), INT8),
        ("update", "pause", "sleep", "adapter", "flush"),
        ("one",),
        is_rounded=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A finished request."""

    prompt: tuple[int, ...]
    ids: list[int]
    versions: list[int]
    lora: str | None


class Chaos:
    """An engine under clients that generate and one thread that interrupts them."""

    def __init__(self, kind: Kind, backend: str, seed: int, num_tokens: int = NUM_TOKENS) -> None:
        self.kind, self.random, self.wanted = kind, random.Random(seed), num_tokens
        self.weights = [models.spread_weights(kind.model, n) for n in range(NUM_WEIGHTS)]
        self.engine = make(kind, backend, self.weights[0], **RETRACTING)
        for name in kind.adapters:
            self.engine.load_adapter(name, *models.output_adapter(0, kind.model))
        serving: tuple[int, dict[str, int]] = (0, dict.fromkeys(kind.adapters, 0))
        # Weights and pairs of each version.
        self.sets: dict[int, tuple[int, dict[str, int]]] = {self.engine.weight_version: serving}
        self.answers: list[Answer] = []
        self.num_pieces = self.num_tokens = 0
        self.changed = threading.Condition()
        self.counts = dict.fromkeys(kind.operations, 0)
        families = models.random_prompts(4, 40, 40, seed)
        self.prompts = [
            family[: self.random.randint(1, 40)] for family in families for _ in range(8)
        ]

    def client(self, seed: int) -> None:
        """Generates until there are enough tokens."""
        rng = random.Random(seed)
        while self.num_tokens < self.wanted:
            prompt = [
                *rng.choice(self.prompts),
                *(rng.randrange(100) for _ in range(rng.randrange(3))),
            ]
            lora = rng.choice((None, *self.kind.adapters))
            params = {"temperature": 0, "max_new_tokens": rng.randint(1, 40), "ignore_eos": True}
            ids: list[int] = []
            versions: list[int] = []
            pieces = self.engine.generate(
                input_ids=prompt, sampling_params=params, stream=True, lora=lora
            )
            for piece in pieces:
                ids += piece["output_ids"]
                versions += piece["meta_info"]["token_weight_versions"]
                with self.changed:
                    self.num_pieces += 1
                    self.changed.notify_all()
            assert len(ids) == params["max_new_tokens"]
            with self.changed:
                self.answers.append(Answer(tuple(prompt), ids, versions, lora))
                self.num_tokens += len(ids)
                self.changed.notify_all()

    def interrupt(self) -> None:
        """One operation after another, each after some pieces of streams."""
        ((weights, adapters),) = self.sets.values()
        while self.num_tokens < self.wanted:
            operation = self.random.choice(self.kind.operations)
            self.counts[operation] += 1
            if operation == "update":
                weights = self.random.randrange(NUM_WEIGHTS)
                mode = self.random.choice(("retract", "wait"))
                version = self.engine.update_weights(self.weights[weights], mode=mode)
                self.sets[version] = weights, dict(adapters)
            elif operation == "adapter":
                name, number = self.random.choice(self.kind.adapters), self.random.randrange(3)
                version = self.engine.load_adapter(
                    name, *models.output_adapter(number, self.kind.model)
                )
                adapters = {**adapters, name: number}
                self.sets[version] = weights, adapters
            else:
                interrupt(self.engine, operation, self.random)
            self.wait_for_pieces(self.random.randint(1, 12))

    def wait_for_pieces(self, count: int) -> None:
        """Waits until streams have gone on, or enough is done."""
        with self.changed:
            goal = self.num_pieces + count
            reached = self.changed.wait_for(
                lambda: self.num_pieces >= goal or self.num_tokens >= self.wanted, LIMIT_S
            )
        assert reached, "nothing goes on"

    def run(self) -> None:
        """Runs all threads to their end."""
        with self.engine:
            threads = [start(lambda seed=seed: self.client(seed)) for seed in range(NUM_CLIENTS)]
            threads.append(start(self.interrupt))
            for thread in threads:
                thread.result(2 * LIMIT_S)
            self.engine.check_integrity()

    def check(self, backend: str) -> int:
        """Compares all tokens with engines of a backend; returns how many there were."""
        wanted: dict[tuple[int, str | None, int], dict[tuple[int, ...], list[int]]] = {}
        for answer in self.answers:
            begin = 0
            for version, group in itertools.groupby(answer.versions):
                end = begin + len(list(group))
                weights, adapters = self.sets[version]
                number = adapters.get(answer.lora or "", 0)
                tokens = (*answer.prompt, *answer.ids[:begin])
                asked = wanted.setdefault((weights, answer.lora, number), {})
                if len(asked.get(tokens, [])) < end - begin:
                    asked[tokens] = answer.ids[begin:end]
                begin = end
        for weights in range(NUM_WEIGHTS):
            with make(self.kind, backend, self.weights[weights], **SMALL) as engine:
                for (which, lora, number), asked in wanted.items():
                    if which != weights:
                        continue
                    if lora is not None:
                        engine.load_adapter(lora, *models.output_adapter(number, self.kind.model))
                    outs = engine.generate(
                        input_ids=list(map(list, asked)),
                        sampling_params=[
                            {"temperature": 0, "max_new_tokens": len(ids), "ignore_eos": True}
                            for ids in asked.values()
                        ],
                        lora=lora,
                    )
                    found = [out["output_ids"] for out in outs]
                    assert found == list(asked.values()), (weights, lora, number)
        return sum(len(answer.ids) for answer in self.answers)


def make(kind: Kind, backend: str, weights: dict[str, Any], **geometry: Any) -> Engine:
    """An engine of one backend."""
    options = dict(kind.options)
    if backend == "xla":
        options |= {"linear_backend": "xla", "attention_backend": "xla"}
    return Engine(model_config=kind.model, weights=weights, **geometry, **options)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KINDS)
def test_each_token_is_its_versions(name, backend, record_property):
    if chain.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {chain.unavailable()}")
    chaos = Chaos(KINDS[name], backend, seed=7)
    chaos.run()
    assert chaos.check(KINDS[name].oracle(backend)) >= NUM_TOKENS
    assert all(chaos.counts.values()), "each operation"
    assert len({version for answer in chaos.answers for version in answer.versions}) > 3
    found = f"{chaos.num_tokens:,} tokens, {chaos.counts}"
    record_property("soak", f"{name}, {backend}: {found}")


@pytest.mark.slow
def test_a_wrong_token_is_found():
    """The check can fail: for a token of other weights."""
    chaos = Chaos(KINDS["updates, pauses, sleeps"], "native", seed=1)
    prompt = models.random_prompts(1, 8, 8)[0]
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    with chaos.engine as engine:
        ids = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
    chaos.sets[1] = 1, {}
    chaos.answers = [Answer(tuple(prompt), ids, [0] * 6, None)]
    assert chaos.check("native") == 6
    chaos.answers = [Answer(tuple(prompt), ids, [0, 0, 0, 1, 1, 1], None)]
    with pytest.raises(AssertionError):
        chaos.check("native")
