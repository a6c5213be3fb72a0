"""What an engine that is interrupted has to answer.

`History` knows which weights each version had; `References` are engines that nobody interrupts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sgljax_engine import Engine, ModelConfig, SamplingParams
from tests.engine.interrupt_calls import Call, Result
from tests.engine.models import TINY, spread_weights
from tests.geometry import RETRACTING, SMALL

MODEL = TINY
WEIGHTS = [spread_weights(MODEL, seed) for seed in range(3)]
NUM_WEIGHTS = len(WEIGHTS)
OPTIONS: dict[str, Any] = {
    **RETRACTING,
    "forbid_compile": True,
}


def use(model: ModelConfig, **options: Any) -> None:
    """Makes engines of another model, and with other options. Before any is made."""
    global MODEL
    MODEL = model
    WEIGHTS[:] = [spread_weights(model, seed) for seed in range(NUM_WEIGHTS)]
    OPTIONS.update(options)


ADAPTERS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {}
"""Pairs and rules by name, for machines with adapters."""


class Swap(NamedTuple):
    """What a version began with.

    Attributes:
        weights: Their number.
        mode: What became of requests.
        lora: Names the adapter if that alone was swapped.
        has_old: Whether it surely took the place of weights; else "wait" may have had nothing to
            wait for, since no request finishes without weights.
    """

    weights: int
    mode: str
    lora: str | None = None
    has_old: bool = True

    def concerns(self, call: Call) -> bool:
        """Whether it ends requests, or waits for them, if its mode does."""
        return self.mode == "wait" or self.lora in (None, call.lora)


class History:
    """Which weights each version had, and how it came."""

    def __init__(self, weights: int) -> None:
        self.swaps = {0: Swap(weights, "retract")}

    def pieces(self, call: Call, result: Result) -> list[tuple[int, int, int]]:
        """(first token, end, weights) of those parts that uninterrupted engines can predict.

        A retracted request goes on as if its tokens so far had been its prompt. One that went on
        over keys and values of other weights cannot be predicted until it is retracted.
        """
        pieces: list[tuple[int, int, int]] = []
        for version in sorted(set(result.versions)):
            begin = result.versions.index(version)
            end = begin + result.versions.count(version)
            if self._is_dirty(call, version):
                continue
            weights = self.swaps[version].weights
            if pieces and pieces[-1][1:] == (begin, weights):
                pieces[-1] = (pieces[-1][0], end, weights)
            else:
                pieces.append((begin, end, weights))
        return pieces

    def _is_dirty(self, call: Call, version: int) -> bool:
        is_dirty = False
        for v in range(call.version + 1, version + 1):
            if not self.swaps[v].concerns(call):
                continue
            if self.swaps[v].mode != "in_place":
                is_dirty = False
            elif v in call.dirty and self.swaps[v].weights != self.swaps[v - 1].weights:
                is_dirty = True
        return is_dirty


class References:
    """Greedy continuations under each set of weights, from engines that are not interrupted."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._known: dict[tuple[int, str | None, tuple[int, ...]], list[int]] = {}

    def check(self, asked: list[tuple[int, str | None, list[int], list[int]]]) -> None:
        """Each is (weights, adapter, tokens, what has to follow them)."""
        for weights, lora in sorted({each[:2] for each in asked}, key=str):
            queries = [
                (tuple(tokens), found)
                for *which, tokens, found in asked
                if which == [weights, lora]
            ]
            new: dict[tuple[int, ...], int] = {}
            for tokens, found in queries:
                if len(found) > len(self._of(weights, lora, tokens)):
                    new[tokens] = max(len(found), new.get(tokens, 0))
            if new:
                self._generate(weights, lora, new)
            for tokens, found in queries:
                expected = self._of(weights, lora, tokens)[: len(found)]
                assert found == expected, f"weights {weights}, {lora}, behind {tokens}"

    def forget(self) -> None:
        """Lets go of the answers."""
        self._known.clear()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()

    def _of(self, weights: int, lora: str | None, tokens: tuple[int, ...]) -> list[int]:
        return self._known.get((weights, lora, tokens), [])

    def _generate(
        self, weights: int, lora: str | None, lengths: dict[tuple[int, ...], int]
    ) -> None:
        params = [SamplingParams(temperature=0, max_new_tokens=n) for n in lengths.values()]
        prompts = [list(tokens) for tokens in lengths]
        outs = self._engine(weights).generate_requests(prompts, params, lora)
        for tokens, out in zip(lengths, outs, strict=True):
            self._known[weights, lora, tokens] = out.output_ids

    def _engine(self, weights: int) -> Engine:
        if weights not in self._engines:
            self._engines[weights] = engine = Engine(
                model_config=MODEL,
                weights=WEIGHTS[weights],
                disable_radix_cache=True,
                **SMALL,
                max_loras=len(ADAPTERS),
                max_lora_rank=OPTIONS.get("max_lora_rank", 4),
            )
            for name, adapter in ADAPTERS.items():
                engine.load_adapter(name, *adapter)
        return self._engines[weights]
