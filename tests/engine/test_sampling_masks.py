"""Sampling masks: the tokens that each token was drawn from, against a sort in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu import chain
from sgljax_engine import Engine, InvalidRequestError, SamplingParams
from sgljax_engine.errors import NonFiniteLogitsError
from sgljax_engine.runner.batches.sampling import mask_batch
from sgljax_engine.sampling.filters import KEEP_ALL
from sgljax_engine.sampling.sampler import Sampled, SamplingBatch, sample
from sgljax_engine.sampling_params import MAX_SAMPLING_MASK
from tests import inside
from tests.devices import run_python
from tests.engine import models
from tests.engine.filter_cases import Case, kept_in_float64, random_cases
from tests.engine.sampler_cases import SAMPLERS
from tests.geometry import CHUNKED, RETRACTING
from tests.tiers import tiered

SMALL_MASK = 64
VOCABULARIES = (40, 1024, 9216)


@functools.partial(jax.jit, static_argnames=("sampler", "num_shards"))
def draw(
    logits: jax.Array, rows: SamplingBatch, masks: Any, sampler: str, num_shards: int = 1
) -> Sampled:
    return sample(
        logits,
        rows,
        jnp.int32(0),
        num_shards=num_shards,
        sampler=SAMPLERS[sampler],
        masks=masks,
    )


def bounded(case: Case) -> tuple[Case, np.ndarray]:
    """The case as rows that report masks have it, and how many tokens each mask holds."""
    top_k = np.minimum(case.top_k, MAX_SAMPLING_MASK)
    most = np.where(top_k <= SMALL_MASK, SMALL_MASK, MAX_SAMPLING_MASK).astype(np.int32)
    return case._replace(top_k=top_k), most


def expected_mask(case: Case, row: int, most: int) -> set[int]:
    """What float64 keeps, without the ties at its end if it is more than a mask holds."""
    mask, logits = kept_in_float64(case, row).mask & np.isfinite(case.logits[row]), case.logits[row]
    if np.count_nonzero(mask) > most:
        mask = mask & (logits > logits[mask].min())
    return set(np.flatnonzero(mask).tolist())


def check(case: Case, sampler: str, num_shards: int = 1) -> int:
    """Compares masks, and log-probs with log softmax over them; returns the number of rows."""
    case, most = bounded(case)
    drawn = draw(jnp.asarray(case.logits), case.rows(), mask_batch(most), sampler, num_shards)
    out = jax.device_get(drawn)
    for row, (token, logprob, ids) in enumerate(
        zip(out.token, out.processed_logprob, out.mask, strict=True)
    ):
        size = np.count_nonzero(ids >= 0)
        assert (ids[:size] >= 0).all(), "a hole"
        kept = ids[:size].tolist()
        assert len(set(kept)) == size
        expected = expected_mask(case, row, most[row])
        assert set(kept) == expected, (row, len(kept), len(expected))
        if not expected:
            assert np.isnan(out.logprob[row]), "more likeliest tokens than a mask holds"
            continue
        assert token in expected
        logits = case.logits[row].astype(np.float64) / case.temperature[row]
        assert abs(logits[token] - np.logaddexp.reduce(logits[kept]) - logprob) < 3e-5
    return len(most)


@pytest.fixture(params=tiered(SAMPLERS, ["native"]))
def sampler(request):
    if request.param == "native" and chain.unavailable() is not None:
        pytest.skip(f"no JIT-compiled CPU kernels here: {chain.unavailable()}")
    return request.param


@pytest.mark.parametrize(
    ("count", "vocabularies"),
    [(288, VOCABULARIES), pytest.param(10_000, (50_257, *VOCABULARIES), marks=pytest.mark.soak)],
)
def test_masks_are_what_float64_keeps(sampler, count, vocabularies):
    cases = random_cases(3, count, vocabularies)
    assert sum(check(case, sampler) for case in cases) >= count


def test_a_wrong_mask_is_found(sampler):
    """The check can fail: at another temperature another nucleus is kept."""
    rng, size = np.random.default_rng(1), 16
    flat = Case(
        rng.normal(0, 1, (size, 1024)).astype(np.float32),
        np.ones(size),
        np.full(size, MAX_SAMPLING_MASK),
        np.full(size, 0.9),
        np.zeros(size),
    )
    most = np.full(size, MAX_SAMPLING_MASK, np.int32)
    other = flat._replace(temperature=flat.temperature * 1.05)
    out = draw(jnp.asarray(flat.logits), other.rows(), mask_batch(most), sampler)
    for row, ids in enumerate(np.asarray(out.mask)):
        assert set(ids[ids >= 0].tolist()) != expected_mask(flat, row, MAX_SAMPLING_MASK)


def test_rows_without_masks_keep_their_bits(sampler):
    """A row's draw does not depend on whether others report masks, nor on their width."""
    case = next(random_cases(5, 32, (1024,)))
    few = np.where(np.arange(32) < 4, SMALL_MASK, KEEP_ALL).astype(np.int32)
    many = np.where(np.arange(32) < 2, MAX_SAMPLING_MASK, few).astype(np.int32)
    top_k = np.where(few < KEEP_ALL, np.minimum(case.top_k, SMALL_MASK), case.top_k)
    case = case._replace(top_k=top_k)
    plain = jax.device_get(draw(jnp.asarray(case.logits), case.rows(), None, sampler))
    for most in (few, many):
        out = jax.device_get(draw(jnp.asarray(case.logits), case.rows(), mask_batch(most), sampler))
        for name in ("token", "logprob", "scaled_logprob", "processed_logprob"):
            np.testing.assert_array_equal(getattr(out, name)[4:], getattr(plain, name)[4:])


def test_masks_do_not_depend_on_their_size_beside_them(sampler):
    """Small masks, ties among them, are searched for alone, or with large ones of other rows."""
    num_small = 0
    for case in random_cases(7, 96, (9216,)):
        case = case._replace(top_k=np.minimum(case.top_k, MAX_SAMPLING_MASK))
        most = np.full(len(case.logits), MAX_SAMPLING_MASK, np.int32)
        together = draw(jnp.asarray(case.logits), case.rows(), mask_batch(most), sampler)
        masks = np.asarray(together.mask)
        is_small = np.count_nonzero(masks >= 0, axis=1) <= SMALL_MASK
        most[~is_small] = KEEP_ALL
        alone = draw(jnp.asarray(case.logits), case.rows(), mask_batch(most), sampler)
        np.testing.assert_array_equal(np.asarray(alone.mask)[is_small], masks[is_small])
        num_small += is_small.sum()
    assert 20 < num_small < 80


@pytest.mark.slow
def test_parts_of_the_vocabulary():
    for case in random_cases(6, 64, (1024, 5120)):
        check(case, "xla", num_shards=8)


_ON_DEVICES = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import jax.numpy as jnp
from tests.engine import test_sampling_masks as tests
mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
place = lambda logits: jax.device_put(logits, NamedSharding(mesh, P(None, "tp")))
tests.jnp = type("Placed", (), {"asarray": staticmethod(place), "int32": jnp.int32})
print(sum(tests.check(case, "xla", 8) for case in tests.random_cases(8, 96, (1024, 151_936))))
"""


@pytest.mark.soak
def test_devices_that_share_the_vocabulary():
    assert run_python("-c", _ON_DEVICES, num_devices=8).stdout.split()[-1] == "96"


# ---------------------------------------------------------------------- engines


def make(**options: Any) -> Engine:
    given = {"model_config": models.TINY, "weights": models.spread_weights(), **CHUNKED, **options}
    return Engine(**given)


@pytest.fixture(scope="module")
def engine():
    with make() as engine:
        yield engine


REQUESTS = (
    {"top_k": 5},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.05, "top_k": 40},
    {"temperature": 0.0},
    {"top_k": 7, "bad_token_ids": (3, 4, 5), "repetition_penalty": 1.3},
    {},
)


def generate(engine: Engine, **more: Any) -> list[dict[str, Any]]:
    params = [
        {"max_new_tokens": 12, "seed": index, "ignore_eos": True, **each, **more}
        for index, each in enumerate(REQUESTS)
    ]
    prompts = models.random_prompts(len(params), 5, 30, seed=2)
    return engine.generate(
        input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=128
    )


def masks_of(out: dict[str, Any]) -> list[list[int]]:
    masks = out["meta_info"]["output_token_sampling_mask"]
    assert len(masks) == len(out["output_ids"])
    return masks


class TestRequests:
    def test_masks(self, engine):
        """Log softmax of raw log-probs over a mask is the processed log-prob, without a table."""
        outs = generate(engine, return_sampling_mask=True)
        for settings, out in zip(REQUESTS, outs, strict=True):
            meta, masks = out["meta_info"], masks_of(out)
            processed = [entry[0] for entry in meta["output_processed_logprobs"]]
            assert meta["output_token_sampling_logprobs"] == processed
            for place, (token, mask) in enumerate(zip(out["output_ids"], masks, strict=True)):
                assert token in mask
                assert not {3, 4, 5} & set(mask) or "bad_token_ids" not in settings
                assert len(mask) <= settings.get("top_k", MAX_SAMPLING_MASK)
                if settings.get("temperature") == 0.0:
                    assert mask == [token]
                elif "bad_token_ids" not in settings:
                    raw = {t: p for p, t, _ in meta["output_top_logprobs"][place]}
                    assert mask == sorted(raw, key=raw.__getitem__, reverse=True)[: len(mask)]
                    scaled = np.array([raw[t] for t in mask]) / settings.get("temperature", 1.0)
                    expected = scaled[mask.index(token)] - np.logaddexp.reduce(scaled)
                    assert abs(expected - processed[place]) < 1e-4


def test_reporting_changes_no_token(engine):
    """The tiny vocabulary fits into a mask, so top_k is what it was."""
    plain, reported = generate(engine), generate(engine, return_sampling_mask=True)
    for before, after in zip(plain, reported, strict=True):
        assert before["output_ids"] == after["output_ids"]
        assert "output_token_sampling_mask" not in before["meta_info"]


@pytest.mark.parametrize("speculation", ["off", "always"])
def test_masks_survive_retraction_and_drafts(engine, speculation):
    expected = list(map(masks_of, generate(engine, return_sampling_mask=True)))
    with make(**RETRACTING, speculation=speculation) as other:
        for _ in range(2):  # what was sampled first is drafted the second time
            outs = generate(other, return_sampling_mask=True)
            assert list(map(masks_of, outs)) == expected
        num_accepted = inside.core(other).counters.num_accepted_history
        assert (num_accepted > 20) == (speculation == "always")


def test_pieces_of_a_stream_have_their_masks(engine):
    [expected, *_] = generate(engine, return_sampling_mask=True)
    params = {"max_new_tokens": 12, "seed": 0, "ignore_eos": True, "top_k": 5}
    prompt = models.random_prompts(len(REQUESTS), 5, 30, seed=2)[0]
    params |= {"return_sampling_mask": True}
    pieces = list(engine.generate(input_ids=prompt, sampling_params=params, stream=True))
    assert len(pieces) > 2
    assert [mask for piece in pieces for mask in masks_of(piece)] == masks_of(expected)


def test_more_likeliest_tokens_than_a_mask_holds_are_an_error():
    assert models.TINY.vocab_size > SMALL_MASK
    weights = {name: np.zeros_like(array) for name, array in models.spread_weights().items()}
    with Engine(model_config=models.TINY, weights=weights, **CHUNKED) as engine:
        params = SamplingParams(top_k=3, max_new_tokens=2, return_sampling_mask=True)
        with pytest.raises(NonFiniteLogitsError):
            engine.generate(input_ids=[1, 2], sampling_params=params)


def test_limits_have_names():
    with pytest.raises(InvalidRequestError, match=r"top_k must be at most 512 .* got 513"):
        SamplingParams(top_k=513, return_sampling_mask=True)
    with pytest.raises(InvalidRequestError, match="return_sampling_mask must be True or False"):
        SamplingParams(return_sampling_mask=1)  # type: ignore[arg-type]
