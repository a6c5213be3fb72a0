"""Deterministic mode: the bits of tokens and log-probs, however requests are run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from sgljax_engine.attention import registry
from sgljax_engine.attention.xla import xla_tiles_attention
from sgljax_engine.builder import parts
from sgljax_engine.layers import kernels
from sgljax_engine.runner.compile import compiled
from sgljax_engine.runner.compile.widths import CANDIDATES
from tests import inside
from tests.engine.determinism_cases import (
    ALONE,
    MODEL,
    Asked,
    Interrupter,
    Way,
    differing,
    make_engine,
    requests,
    run,
    using,
)
from tests.engine.exactness_checks import check_bits
from tests.engine.models import MIXED_HEADS, SHARED_KEYS, spread_weights
from tests.geometry import WIDE, other, within

NUM_WAYS, NUM_PORTABLE_WAYS = 18, 2
"""Six of each geometry; one of two of them, since portable code takes long to compile."""

REQUESTS = requests(200, MODEL.vocab_size)
UNCHANGED = [each for each in REQUESTS if not each.params.changes_logits]
PLAIN = UNCHANGED[:40]
"""They need fewer programs."""


GEOMETRIES = (
    other(
        "many steps, and pages beside which the rows of decode attention fit",
        WIDE,
        num_kv_tokens=4096,
        max_running_requests=16,
        batch_buckets=(16,),
    ),
    other(
        "pages of one token, little more than the longest request, beside which no rows fit",
        page_size=1,
        num_kv_tokens=300,
        max_running_requests=5,
        batch_buckets=(5,),
    ),
    other(
        "sizes that divide one another nowhere, and pages for all",
        page_size=48,
        num_kv_tokens=9600,
        max_running_requests=70,
        batch_buckets=(70,),
        chunked_prefill_size=272,
        token_buckets=(272,),
        decode_steps=3,
    ),
)
"""The ways to run share a few, since compiling takes long."""


def draw_way(index: int) -> Way:
    """A random way to run the requests."""
    rng = np.random.default_rng(index)
    geometry = GEOMETRIES[index % len(GEOMETRIES)]
    options = within(
        geometry,
        max_running_requests=int(rng.integers(2, geometry["batch_buckets"][-1] + 1)),
        chunked_prefill_size=int(rng.integers(1, geometry["token_buckets"][-1] + 1)),
    )
    options["disable_radix_cache"] = bool(rng.random() < 0.3)
    return Way(
        options,
        order=rng.permutation(len(REQUESTS)).tolist(),
        splits=int(rng.integers(1, 5)),
        interrupt=Interrupter(index, spread_weights(MODEL)) if index % 4 else None,
    )


WAYS = [draw_way(index) for index in range(NUM_WAYS)]


@pytest.fixture(scope="module")
def backend(request):
    """JIT-compiled CPU kernels, or what is used where there is none: XLA's, and rows of keys."""
    with using(request.param) as name:
        yield name


def ways(backend: str, count: int, slow: tuple[int, ...]) -> list[Any]:
    """A backend with each way; most are of the soak."""
    tiers = [pytest.mark.slow if i in slow else pytest.mark.soak for i in range(count)]
    return [pytest.param(backend, index, marks=marks) for index, marks in enumerate(tiers)]


NATIVE = pytest.mark.parametrize("backend", ["native"], indirect=True)
PORTABLE = pytest.mark.parametrize("backend", ["portable"], indirect=True)


def asked_of(backend: str) -> list[Asked]:
    """Requests of all kinds; changed logits are no matter of the backend: one has them."""
    return REQUESTS if backend == "native" else UNCHANGED


@pytest.fixture(scope="module")
def alone(backend):
    """Each request by itself, one token a dispatch."""
    with make_engine(ALONE) as engine:
        return run(engine, asked_of(backend), Way({}))


@pytest.mark.parametrize(
    ("backend", "index"),
    [*ways("native", NUM_WAYS, slow=(0,)), *ways("portable", NUM_PORTABLE_WAYS, slow=())],
    indirect=["backend"],
)
def test_no_bit_differs(backend, alone, index):
    """Requests have their bits however they are batched, chunked, cached and interrupted."""
    way, asked = WAYS[index], asked_of(backend)
    assert way.order is not None
    way = way._replace(order=[i for i in way.order if i < len(asked)])
    with make_engine(way.options) as engine:
        check_bits(run(engine, asked, way), alone)
        if backend == "portable":  # Large pools are read in rows, small ones retract.
            kv_memory = inside.runner(engine).kv_memory
            assert bool(kv_memory.contiguous_kv) == (index == 0)
            assert index == 0 or engine.get_internal_state().counters.num_retractions
        if isinstance(way.interrupt, Interrupter):
            assert len(way.interrupt.counts) >= 3, "of the ways to interrupt"


@pytest.mark.soak
@NATIVE
@pytest.mark.usefixtures("backend")
def test_every_width_from_1_to_64():
    """Requests of 1 to 64 tokens, which end one after the other: each batch has its own width."""
    asked = [
        each._replace(
            prompt=each.prompt[:20],
            params=dataclasses.replace(each.params, max_new_tokens=index + 1, ignore_eos=True),
            top_logprobs=0,
        )
        for index, each in enumerate(UNCHANGED)
    ][:64]
    with make_engine(ALONE) as engine:
        expected = run(engine, asked, Way({}))
    options = other(
        "a program for each number of rows",
        WIDE,
        batch_buckets=tuple(range(1, 65)),
        decode_steps=1,
    )
    with make_engine(options) as engine:
        check_bits(run(engine, asked, Way({})), expected)
        assert engine.get_internal_state().num_compiles >= 64


@pytest.mark.soak
@NATIVE
def test_the_requests_differ(alone):
    """Else they would agree for the wrong reason."""
    assert len({bits.tokens for bits in alone}) > 100
    assert sum(len(bits.tokens) for bits in alone) > 3000


@pytest.mark.soak
@NATIVE
@pytest.mark.usefixtures("backend")
def test_a_head_dim_that_rows_do_not_take():
    """Then attention is portable, and the option must ask for it. Decode reads pages."""
    model = dataclasses.replace(MODEL, head_dim=20)
    interrupt = Interrupter(0, spread_weights(model))
    way = WAYS[2]._replace(order=range(len(PLAIN))[::-1], interrupt=interrupt)
    asked = {"enable_deterministic_sampling": True}
    with make_engine(ALONE | asked, model) as engine:
        expected = run(engine, PLAIN, Way({}))
        assert inside.runner(engine).kv_memory.contiguous_kv == ()
    with make_engine({**way.options, **asked}, model) as engine:
        check_bits(run(engine, PLAIN, way), expected)


@pytest.mark.parametrize(
    ("backend", "model", "index"),
    [
        pytest.param("native", MODEL, 1, id="plain"),
        pytest.param("native", MIXED_HEADS, 1, id="mixed heads", marks=pytest.mark.soak),
        pytest.param("native", SHARED_KEYS, 1, id="shared keys", marks=pytest.mark.soak),
        pytest.param("portable", MODEL, 3, id="portable", marks=pytest.mark.soak),
    ],
    indirect=["backend"],
)
def test_a_few_requests(backend, model, index):
    """Interrupted and retracted, or read in rows; layers with heads of two sizes, shared keys."""
    interrupt = Interrupter(index, spread_weights(model))
    way = WAYS[index]._replace(order=range(len(PLAIN))[::-1], interrupt=interrupt)
    with make_engine(ALONE, model) as engine:
        expected = run(engine, PLAIN, Way({}))
    with make_engine(way.options, model) as engine:
        check_bits(run(engine, PLAIN, way), expected)
        if backend == "portable":
            assert inside.runner(engine).kv_memory.contiguous_kv
        else:
            assert engine.get_internal_state().counters.num_retractions
    assert len({bits.tokens for bits in expected}) > len(PLAIN) // 2
    assert len(interrupt.counts) >= 3, "of the ways to interrupt"


@pytest.mark.usefixtures("backend")
class TestControl:
    """The comparison finds what is not deterministic."""

    def differing(self, way: Way = WAYS[0], **options: Any) -> int:
        found = []
        for each in (Way(ALONE), way):
            plain = each._replace(order=None, options={**each.options, **options}, interrupt=None)
            with make_engine(plain.options) as engine:
                found.append(run(engine, PLAIN, plain))
        return len(differing(*found))

    @pytest.mark.soak
    @PORTABLE
    def test_default_mode(self):
        assert self.differing(enable_deterministic_sampling=False) > 10

    @pytest.mark.soak
    @PORTABLE
    def test_widths_that_disagree(self, monkeypatch):
        """One is made to round otherwise, which `agreeing_widths` would find out."""
        real = kernels.linear

        def linear(x, weight, layout):
            out = real(x, weight, layout)
            is_wide = x.shape[layout.token_axis] == CANDIDATES[-1]
            return out * np.float32(1 + 2**-23) if is_wide else out

        monkeypatch.setattr(kernels, "linear", linear)
        monkeypatch.setattr(parts, "agreeing_widths", lambda *_: CANDIDATES)
        # Programs apart from those of equal engines, which do not have the fault.
        monkeypatch.setattr(compiled, "_jitted", functools.cache(compiled._jitted.__wrapped__))
        assert self.differing() > 10

    @pytest.mark.soak
    @PORTABLE
    def test_attention_in_no_particular_order(self, monkeypatch):
        """Requests that lose their pages are prefilled as far as they were decoded."""
        monkeypatch.setattr(registry, "ordered_backend", lambda _: xla_tiles_attention)
        assert self.differing(WAYS[1]) > 10
