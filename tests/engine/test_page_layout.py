"""Pages whose rows hold several heads, as attention on TPUs wants them."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import Engine, SamplingParams
from sgljax_engine.attention import tpu
from sgljax_engine.cache.kv_pages import PageLayout, kv_bytes_per_token
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.page_layouts import pack, unpack
from tests.geometry import SMALL

LAYOUTS = {
    "one head a row": PageLayout(4, 64),
    "two": PageLayout(4, 64, 2),
    "two, one left over": PageLayout(3, 64, 2),
    "two, on two devices": PageLayout(6, 64, 2, num_shards=2),
    "more than there are": PageLayout(2, 16, 8, num_shards=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_packing_and_unpacking(layout):
    shape = (5, layout.num_kv_heads, 4, layout.head_dim)
    pages = np.random.default_rng(0).integers(1, 1 << 16, shape).astype(np.uint16)
    packed = pack(layout, pages)
    assert packed.shape == (5, layout.num_rows, 4, layout.row_size)
    np.testing.assert_array_equal(unpack(layout, packed), pages)
    assert np.count_nonzero(packed) == pages.size  # the rest is zero


def test_where_heads_are():
    """Three heads on each of two devices, two in a row."""
    layout = LAYOUTS["two, on two devices"]
    pages = np.arange(6)[None, :, None, None] + np.ones((1, 6, 2, 64), np.int64)
    rows = pack(layout, pages)[0, :, 0]
    assert rows[:, [0, 64]].tolist() == [[1, 2], [3, 0], [4, 5], [6, 0]]


def test_bytes_count_what_is_stored():
    assert [kv_bytes_per_token([layout], jnp.dtype("bfloat16")) for layout in LAYOUTS.values()] == [
        2 * 2 * 4 * 64,
        2 * 2 * 4 * 64,
        2 * 2 * 4 * 64,
        2 * 2 * 8 * 64,
        2 * 2 * 16 * 16,
    ]


@pytest.mark.soak
def test_packed_pages_sleep(monkeypatch):
    model = dataclasses.replace(TINY, num_layers=1)
    assert tpu.heads_per_row(model.head_dim) == 8
    monkeypatch.setattr(tpu, "tpu_problem", lambda *_: None)
    interpreted = functools.partial(tpu.tpu_attention, interpret=True)
    monkeypatch.setattr(tpu, "tpu_attention", interpreted)
    prompts = random_prompts(3, 20, 30, seed=4)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)

    def generate(engine: Engine) -> tuple[list[list[int]], list[int]]:
        outputs = engine.generate_requests(prompts, params)
        return [out.output_ids for out in outputs], [out.num_cached_tokens for out in outputs]

    weights = spread_weights(model)
    with Engine(model_config=model, weights=weights, attention_backend="tpu", **SMALL) as engine:
        expected, cached = generate(engine)
        scores = engine.score(prompts)
        assert cached == [0, 0, 0]
        again, kept = generate(engine)
        assert again == expected
        assert min(kept) >= 16
        engine.sleep(level=1, preserve_state=True)
        engine.wake_up()
        assert generate(engine) == (expected, kept)
    with Engine(model_config=model, weights=weights, attention_backend="xla", **SMALL) as engine:
        for some, others in zip(engine.score(prompts), scores, strict=True):
            np.testing.assert_allclose(some, others, atol=1e-4)  # a score's own pages are packed
