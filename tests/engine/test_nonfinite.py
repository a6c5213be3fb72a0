"""Logits that are NaN or infinite: who has them fails, by name, and nobody else.

At most one token overflows here, the trap: what reads it has NaN in all its logits. Without the
trap the model is the same, so its answers say which requests must fail, and at which token.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    EngineStepError,
    ModelConfig,
    NonFiniteLogitsError,
    RequestOutput,
    SamplingParams,
)
from sgljax_engine.sampling.sampler import Sampled, sample
from tests.engine.determinism_cases import using
from tests.engine.interrupts import assert_idle
from tests.engine.models import HYBRID, TINY, TINY_MOE, random_prompts, spread_weights
from tests.engine.sampler_cases import SAMPLERS, patched
from tests.engine.test_sampler import batch
from tests.geometry import CHUNKED, SMALL
from tests.threads import LIMIT_S
from tests.tiers import tiered

TRAP = 77
"""The token that overflows."""


def trapped(model: ModelConfig = TINY, *, is_armed: bool = True) -> dict[str, np.ndarray]:
    """Finite weights. The MLP of the first layer overflows for the trap, and for nothing else.

    Channel 0 is the trap's own: no other embedding has it, and attention adds nothing to it.
    """
    weights = spread_weights(model)
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 0.0
            weight[TRAP] = 0.0
            weight[TRAP, 0] = 1.0
        if name.startswith("model.layers.0."):
            if name.endswith(("o_proj.weight", "out_proj.weight")):
                weight[0] = 0.0
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                weight[:, 0] = 1e20 if is_armed else 0.0
    return weights


def make(weights: dict[str, np.ndarray], model: ModelConfig = TINY, **options: Any) -> Engine:
    return Engine(model_config=model, weights=weights, **{**SMALL, **options})


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Any]:
    """The `RequestOutput` or the error of each prompt, each with a call of its own."""

    async def ask() -> list[Any]:
        calls = (
            engine.async_generate_requests([ids], each)
            for ids, each in zip(prompts, params, strict=True)
        )
        found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), LIMIT_S)
        return [each if isinstance(each, BaseException) else each[0] for each in found]

    return asyncio.run(ask())


def num_failed(engine: Engine) -> int:
    return engine.get_internal_state().counters.num_nonfinite_requests


def failure_at(prompt: Sequence[int], output: RequestOutput) -> int | None:
    """The output token that cannot be drawn, if the output is one without the trap."""
    if TRAP in prompt:
        return 0
    if TRAP in output.output_ids[:-1]:
        return output.output_ids.index(TRAP) + 1
    return None


def check(
    model: ModelConfig,
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    **options,
) -> None:
    """Who reads the trap fails there; all others have the tokens that they have without it."""
    with make(trapped(model, is_armed=False), model, **options) as engine:
        plain = answers(engine, prompts, params)
        assert num_failed(engine) == 0
    expected = [failure_at(*each) for each in zip(prompts, plain, strict=True)]
    count = sum(at is not None for at in expected)
    assert 0 < count < len(prompts)
    assert {at == 0 for at in expected if at is not None} == {True, False}
    with make(trapped(model), model, **options) as engine:
        for turn in range(2):  # the second time with all that the first has left behind
            found = answers(engine, prompts, params)
            for at, without, output in zip(expected, plain, found, strict=True):
                if at is None:
                    assert isinstance(output, RequestOutput), output
                    assert output.output_ids == without.output_ids
                    assert np.isfinite(output.logprobs).all()
                else:
                    assert isinstance(output, NonFiniteLogitsError), (at, output)
                    assert f"at output token {at}:" in str(output)
            assert num_failed(engine) == (turn + 1) * count
        counters = engine.get_internal_state().counters
        assert counters.num_failed_steps == 0
        assert counters.num_finished == counters.num_requests == 2 * len(prompts)
        assert_idle(engine)


def some_params(count: int) -> list[SamplingParams]:
    """Greedy and drawn, with every filter, and with settings that change logits."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 90},
        {"temperature": 1.5, "top_p": 0.99},
        {"temperature": 1.5, "min_p": 0.001},
        {"temperature": 1.5, "repetition_penalty": 1.1},
    ]
    return [
        SamplingParams(max_new_tokens=30, seed=i, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(count)
    ]


def some_prompts(count: int) -> list[list[int]]:
    """Every fifth has the trap."""
    prompts = [[i if i != TRAP else 1 for i in ids] for ids in random_prompts(count, 3, 30, seed=3)]
    for index in range(0, count, 5):
        prompts[index][len(prompts[index]) // 2] = TRAP
    return prompts


PROMPTS, PARAMS = some_prompts(24), some_params(24)


class TestGenerate:
    @pytest.mark.parametrize("backend", tiered(["native", "portable"], ["native"], []))
    def test_who_reads_the_trap_fails(self, backend):
        with using(backend):
            check(TINY, PARAMS, PROMPTS)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "options"),
        [
            pytest.param(TINY, CHUNKED, id="chunks"),
            pytest.param(HYBRID, {}, id="hybrid", marks=pytest.mark.soak),
            pytest.param(TINY_MOE, {}, id="experts", marks=pytest.mark.soak),
        ],
    )
    def test_in_every_kind_of_step(self, model, options):
        check(model, PARAMS, PROMPTS, **options)

    @pytest.mark.soak
    @pytest.mark.parametrize("backend", ["native", "portable"])
    @pytest.mark.parametrize("model", [TINY, HYBRID, TINY_MOE])
    def test_drafts(self, model, backend):
        with using(backend):
            check(model, PARAMS, PROMPTS, speculation="always")


@pytest.fixture(scope="module")
def engine():
    with make(trapped()) as engine:
        yield engine


CLEAN, TRAPPED = PROMPTS[1], PROMPTS[0]


class TestCalls:
    """What a caller sees."""

    def test_one_of_several_prompts(self, engine):
        with pytest.raises(NonFiniteLogitsError, match=r"at output token 0: .* version 0$"):
            engine.generate_requests([CLEAN, TRAPPED], PARAMS[0])
        assert issubclass(NonFiniteLogitsError, EngineStepError)

    def test_a_stream_ends_with_the_error(self, engine):
        """After the tokens that are right."""
        params = {"temperature": 0, "max_new_tokens": 9, "allowed_token_ids": [TRAP]}
        pieces = engine.generate(input_ids=CLEAN, sampling_params=params, stream=True)
        assert next(pieces)["output_ids"] == [TRAP]
        with pytest.raises(NonFiniteLogitsError, match="at output token 1:"):
            next(pieces)

    def test_only_prefills(self, engine):
        params = {"max_new_tokens": 0}
        with pytest.raises(NonFiniteLogitsError):
            engine.generate(input_ids=TRAPPED, sampling_params=params)
        assert engine.generate(input_ids=CLEAN, sampling_params=params)["output_ids"] == []

    @pytest.mark.parametrize("start", [0, 2])
    def test_log_probs_of_a_prompt(self, engine, start):
        before = num_failed(engine)
        params = {"temperature": 0, "max_new_tokens": 2}
        options = {"return_logprob": True, "logprob_start_len": start, "sampling_params": params}
        prompt = [5, 6, 7, TRAP, 8, 9]
        with pytest.raises(NonFiniteLogitsError, match=r"for token \d of its prompt"):
            engine.generate(input_ids=prompt, **options)
        assert num_failed(engine) == before + 1
        output = engine.generate(input_ids=prompt[:3], **options)
        assert len(output["output_ids"]) == 2

    def test_score(self, engine):
        before = num_failed(engine)
        sound = [[5, 6, 7, 8], [6] * 16 + [TRAP]]  # a trap that nothing follows, nobody reads
        scores = engine.score(sound)
        assert all(np.isfinite(each).all() for each in scores)
        found = r"^sequences\[1\] cannot be scored: the logits for its token \d+ are NaN or inf"
        with pytest.raises(NonFiniteLogitsError, match=found):
            engine.score([sound[0], [5, 6, TRAP, 7, 8], [TRAP, 3]])
        assert num_failed(engine) == before + 2
        for one, other in zip(scores, engine.score(sound), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_leaves_nothing_in_the_prefix_cache(self, engine):
        """Else what a device got wrong once stays wrong until the weights change."""
        engine.flush_cache()
        with pytest.raises(NonFiniteLogitsError):
            engine.generate_requests([TRAPPED * 3], PARAMS[0])
        assert engine.get_internal_state().cached_kv_tokens == 0


# ---------------------------------------------------------------------- the samplers


@pytest.fixture(scope="module", params=tiered(SAMPLERS, ["native"]))
def backend(request):
    yield from patched(sys.modules[__name__], request.param)


def odd_logits(count: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of logits; most have a few entries that are not finite, at random places."""
    logits = rng.normal(0, 4, (count, vocab)).astype(np.float32)
    values = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    for row in logits:
        kind = rng.integers(6)
        if kind < 4:
            places = rng.choice(vocab, rng.choice([1, 3, vocab // 2]), replace=False)
            row[places] = values[rng.integers(4)]
        elif kind == 4 and rng.random() < 0.5:
            row[:] = rng.choice(values)
    return logits


def has_distribution(rows: np.ndarray) -> np.ndarray:
    """Whether softmax in float64 gives probabilities: what transformers and vLLM draw from."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(rows.astype(np.float64) - rows.max(-1, keepdims=True))
        return np.isfinite(weights / weights.sum(-1, keepdims=True)).all(-1)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("vocab", tiered([128, 5000], [128], []))
def test_the_log_prob_is_nan_where_nothing_can_be_drawn(vocab):
    """With every filter, and wherever the numbers that are not finite lie."""
    rng = np.random.default_rng(vocab)
    count = 96
    settings: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 3.0], count),
        "top_k": rng.choice([1, 20, vocab], count),
        "top_p": rng.choice([0.3, 0.99, 1.0], count),
        "min_p": rng.choice([0.0, 0.05], count),
    }
    zero = jnp.zeros((), jnp.int32)
    draw = jax.jit(lambda x, rows: sample(x, rows, zero))
    draw_adjusted = jax.jit(lambda x, y, rows: sample(x, rows, zero, y))
    for _ in range(4):
        logits, edits = odd_logits(count, vocab, rng), odd_logits(count, vocab, rng)
        rows = batch(count, vocab, **settings)
        compare(draw(logits, rows), logits, logits)
        edited = np.where(np.isneginf(edits), edits, logits)
        edited[rng.random(count) < 0.2] = -np.inf
        compare(draw_adjusted(logits, edited, rows), logits, edited)


def compare(sampled: Sampled, logits: np.ndarray, choices: np.ndarray) -> None:
    token = np.asarray(sampled.token)
    assert ((token >= 0) & (token < logits.shape[1])).all()
    sound = has_distribution(logits) & has_distribution(choices)
    assert 0.2 < sound.mean() < 0.8
    np.testing.assert_array_equal(~np.isnan(np.asarray(sampled.logprob)), sound)
    drawn = np.take_along_axis(choices, token[:, None], 1)[:, 0]
    for found in (drawn, sampled.logprob, sampled.scaled_logprob, sampled.processed_logprob):
        assert np.isfinite(np.asarray(found)[sound]).all()
