"""Each gate of exactness finds the fault that it is there for.

The gates are the checks of `exactness_checks.py`, which other modules call; a fault goes into a
function of the engine's, or into its weights. `test_sampling_filters.py` has those of the
samplers' kept sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sgljax_engine import Engine, WeightSyncError
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.cache.radix import RadixCache
from sgljax_engine.runner import results
from sgljax_engine.weights import apply
from tests import inside
from tests.engine import exactness_checks
from tests.engine.determinism_cases import MODEL, Way, make_engine, requests, run
from tests.engine.models import TINY, spread_weights
from tests.geometry import SMALL

FOLDER = Path(__file__).parents[1] / "golden/qwen3_gqa_tied"
GOLDEN = np.load(FOLDER / "golden.npz")
ASKED = [each for each in requests(40, MODEL.vocab_size) if not each.params.changes_logits][:6]
NORM, PROJECTION = "model.norm.weight", "model.layers.1.self_attn.o_proj.weight"
LOWEST, HIGH_EXPONENT, SIGN = 0, 25, 31


@pytest.fixture(scope="module")
def tiny():
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def golden():
    with Engine(FOLDER, dtype="float32", **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def deterministic():
    """With the bits of requests that it ran without a fault."""
    with make_engine(SMALL) as engine:
        yield engine, run(engine, ASKED, Way({}))


@contextlib.contextmanager
def flipped(engine: Engine, name: str, bit: int, at: int = 7) -> Iterator[None]:
    """One bit of one number of a weight is another one."""
    runner = inside.runner(engine)
    before = runner.weights
    runner.swap_weights({**before, name: with_bit(before[name], bit, at)})
    try:
        yield
    finally:
        runner.swap_weights(before)
        engine.flush_cache()


def with_bit(weight: jax.Array, bit: int, at: int) -> jax.Array:
    numbers = np.array(weight)
    assert numbers.dtype == np.float32
    numbers.view(np.uint32).reshape(-1)[at] ^= np.uint32(1 << bit)
    return jax.device_put(numbers, weight.sharding)


def faulty_rows(monkeypatch: pytest.MonkeyPatch, fault: Callable[[list[Any]], list[Any]]) -> None:
    """What a dispatch's rows are taken for, from now on."""
    real = results.row_outputs
    monkeypatch.setattr(results, "row_outputs", lambda *args: fault(real(*args)))


class TestOneBitOfAWeight:
    @pytest.mark.parametrize("bit", [LOWEST, SIGN])
    @pytest.mark.parametrize("name", [NORM, PROJECTION, "model.embed_tokens.weight"])
    def test_checksums(self, tiny, name, bit):
        weights, checksums = spread_weights(), tiny.get_weights_checksum()
        exactness_checks.check_weights(tiny, weights, checksums)
        with flipped(tiny, name, bit):
            assert tiny.find_differing_weights(weights) == [name]
            with pytest.raises(AssertionError):
                exactness_checks.check_weights(tiny, weights, checksums)
            assert tiny.get_weights_checksum() != checksums
        exactness_checks.check_weights(tiny, weights, checksums)

    def test_verified_update(self, tiny, monkeypatch):
        real = apply._make

        def faulty(*args):
            made = real(*args)
            return {**made, PROJECTION: with_bit(made[PROJECTION], LOWEST, at=100)}

        version = tiny.get_internal_state().weight_version
        monkeypatch.setattr(apply, "_make", faulty)
        with pytest.raises(WeightSyncError, match=rf"differ from the source's: \['{PROJECTION}'\]"):
            tiny.update_weights(spread_weights(seed=1), verify=True)
        assert tiny.get_internal_state().weight_version == version

    def test_goldens(self, golden):
        with flipped(golden, NORM, HIGH_EXPONENT):
            with pytest.raises(AssertionError):
                exactness_checks.check_golden(golden, GOLDEN)
            with pytest.raises(AssertionError):
                exactness_checks.check_golden_scores(golden, GOLDEN)
        exactness_checks.check_golden(golden, GOLDEN)

    def test_bits(self, deterministic):
        engine, expected = deterministic
        with flipped(engine, NORM, LOWEST), pytest.raises(AssertionError):
            exactness_checks.check_bits(run(engine, ASKED, Way({})), expected)
        exactness_checks.check_bits(run(engine, ASKED, Way({})), expected)


class TestStalePrefix:
    @pytest.fixture(scope="class")
    @staticmethod
    def reference():
        with Engine(
            model_config=TINY, weights=spread_weights(), disable_radix_cache=True, **SMALL
        ) as engine:
            yield engine

    def test_of_older_weights(self, monkeypatch):
        """Cached pages outlive an update, and say so to no one."""
        prompt, weights = list(range(50)), spread_weights(seed=1)
        with (
            Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine,
            Engine(model_config=TINY, weights=weights, **SMALL) as fresh,
        ):
            monkeypatch.setattr(PagePool, "reset_cache", lambda self, adapter=None: 0)
            with pytest.raises(AssertionError):
                exactness_checks.check_update_leaves_no_prefix(engine, fresh, weights, prompt)
            # Its tokens alone would tell.
            outputs = [
                exactness_checks._greedy(each, prompt).output_ids for each in (engine, fresh)
            ]
            assert outputs[0] != outputs[1]

    def test_of_another_prompt(self, tiny, reference, monkeypatch):
        """The lookup takes a first token for another one."""
        tiny.flush_cache()
        other, prompt = [3, *range(40)], [4, *range(40)]
        exactness_checks.check_reuse_changes_nothing(tiny, reference, other)
        real = RadixCache.find

        def faulty(self, tokens, *args):
            def mistaken(start, end):
                return [3, *tokens(1, end)] if start == 0 else tokens(start, end)

            return real(self, mistaken, *args)

        monkeypatch.setattr(RadixCache, "find", faulty)
        with pytest.raises(AssertionError):
            exactness_checks.check_reuse_changes_nothing(tiny, reference, prompt)
        monkeypatch.undo()
        tiny.flush_cache()
        exactness_checks.check_reuse_changes_nothing(tiny, reference, prompt)


def swapped(rows: list[Any]) -> list[Any]:
    """The first two have each other's tokens, where neither ends: a request ends as it would."""
    if len(rows) < 2 or rows[0].stopped or rows[1].stopped:
        return rows
    if len(rows[0].token_ids) != len(rows[1].token_ids):
        return rows
    return [rows[1], rows[0], *rows[2:]]


class TestTwoRowsSwapped:
    @pytest.fixture(autouse=True)
    def fault(self, monkeypatch):
        faulty_rows(monkeypatch, swapped)

    def test_goldens(self, golden):
        with pytest.raises(AssertionError):
            exactness_checks.check_golden(golden, GOLDEN)

    def test_bits(self, deterministic):
        engine, expected = deterministic
        with pytest.raises(AssertionError):
            exactness_checks.check_bits(run(engine, ASKED, Way({})), expected)

    def test_scores(self, tiny):
        with pytest.raises(AssertionError):
            exactness_checks.check_scaled_logprobs(tiny, 0.7)


class TestLogprobOfAnotherTemperature:
    @pytest.fixture(autouse=True)
    def fault(self, monkeypatch):
        """That of temperature 1, as if the request had none."""
        faulty_rows(
            monkeypatch,
            lambda rows: [row._replace(scaled_logprobs=row.logprobs) for row in rows],
        )

    def test_scores(self, tiny):
        exactness_checks.check_scaled_logprobs(tiny, 1.0)
        for temperature in (0.7, 0.999):
            with pytest.raises(AssertionError):
                exactness_checks.check_scaled_logprobs(tiny, temperature)

    def test_bits(self, deterministic):
        engine, expected = deterministic
        with pytest.raises(AssertionError):
            exactness_checks.check_bits(run(engine, ASKED, Way({})), expected)
