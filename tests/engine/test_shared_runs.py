"""Keys that neighbouring rows share are read once for them, on GPUs and TPUs; interpreted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sgljax_engine import Engine, SamplingParams
from sgljax_engine.attention import tpu
from sgljax_engine.attention.base import Attention, NewTokens, Prologue
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.kernels.runs import SharedRuns, find_runs
from sgljax_engine.kernels.tpu import paged_attention as tpu_kernel
from sgljax_engine.layers import fused
from sgljax_engine.runner import runner
from sgljax_engine.runner.programs.attend import slots_at
from tests.devices import run_python
from tests.engine import gpu_interpreted
from tests.engine.gpu_interpreted import FUSED, INVARIANT, PLAIN
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.paged_cases import OPTIONS, RaggedCase, ragged_case
from tests.geometry import SMALL

QUICK_COMPILE = "interpreted kernels of GPUs and TPUs, which no user compiles for CPUs"

ON_TPU = TpuAttention(interpret=True)
PAGE = 16
LENGTHS, PREFIXES = zip(
    # Rows of a prompt of 20 pages,
    *((330, 0), (331, 20), (420, 20), (321, 20)),
    # rows of another prompt, some of which have only its first pages, and rows on their own.
    *((300, 0), (310, 18), (290, 13), (17, 0), (1, 0), (330, 0)),
    strict=True,
)
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}


def runs_of(case: RaggedCase, size: int = 16, min_keys: int = 128) -> SharedRuns:
    """The runs by the keys that are there before each row's newest token."""
    keys = jnp.maximum(case.tables.kv_lens - 1, 0)
    return find_runs(case.tables.page_table, keys, PAGE, jnp.int32(min_keys), size)


def with_runs(case: RaggedCase) -> RaggedCase:
    return case._replace(tables=case.tables._replace(runs=runs_of(case)))


def make_case(sizes: tuple[int, int, int], dtype: str = "float32") -> RaggedCase:
    """Rows of (num_heads, num_kv_heads, head_dim); the last is unused."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    options: dict[str, Any] = dict(zip(names, sizes, strict=True))
    return ragged_case(
        LENGTHS, page_size=PAGE, num_queries=1, dtype=dtype, prefixes=PREFIXES, **options
    )


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Several chunks and splits even for short contexts."""
    monkeypatch.setattr(tpu_kernel, "_MAX_CHUNK_TOKENS", 64)
    module = "sgljax_engine.kernels.gpu.paged_attention"
    monkeypatch.setattr(f"{module}._INVARIANT_SPLIT_KEYS", 128)


class TestFindingThem:
    def found(self, case, **options):
        members, num_keys, _, begins, _ = runs_of(case, **options)
        runs = [
            ([int(row) for row in rows if row < len(begins)], int(keys))
            for rows, keys in zip(members, num_keys, strict=True)
        ]
        return [run for run in runs if run != ([], 0)], begins.tolist()

    def test_whole_pages_that_all_have(self):
        """The last row of the first run has one token more than the pages that it shares."""
        runs, begins = self.found(make_case((1, 1, 16)))
        assert runs == [([0, 1, 2, 3], 320), ([4, 5, 6], 208)]
        assert begins == [320] * 4 + [208] * 3 + [0] * 4

    def test_long_ones_are_cut_and_there_is_room_for_a_few(self):
        runs, begins = self.found(make_case((1, 1, 16)), size=2)
        assert runs == [([0, 1], 320), ([2, 3], 320)]
        assert begins == [320] * 4 + [0] * 7

    def test_short_prefixes_are_none(self):
        assert self.found(make_case((1, 1, 16)), min_keys=321) == ([], [0] * 11)

    def test_samples_are_together_though_questions_begin_alike(self):
        """Two questions with six samples each, behind the same eight pages."""
        table = np.zeros((12, 40), np.int32)
        for row in range(12):
            own = np.arange(9) + 100 * row + 500
            table[row] = [*range(1, 9), *(np.arange(23) + 50 * (row // 6) + 100), *own]
        keys = jnp.full(12, 600)
        members, num_keys, places, begins, _ = find_runs(
            jnp.asarray(table), keys, PAGE, jnp.int32(128), 16
        )
        assert num_keys.tolist() == [31 * PAGE, 31 * PAGE, 0]
        assert members[1].tolist() == [*range(6, 12), *[12] * 6]
        assert places.tolist() == [*range(6), *range(12, 18)]
        assert begins.tolist() == [31 * PAGE] * 12


@pytest.mark.parametrize(
    ("attention", "sizes", "dtype", "options"),
    [
        (PLAIN, (4, 2, 32), "float32", "default"),
        (PLAIN, (8, 1, 64), "bfloat16", "capped"),
        (INVARIANT, (4, 2, 32), "float32", "capped"),
        (ON_TPU, (4, 2, 128), "float32", "capped"),
        pytest.param(ON_TPU, (4, 2, 128), "float32", "all", marks=pytest.mark.slow),
        pytest.param(ON_TPU, (8, 1, 128), "bfloat16", "default", marks=pytest.mark.slow),
        pytest.param(ON_TPU, (6, 3, 64), "float32", "default", marks=pytest.mark.slow),
        pytest.param(PLAIN, (4, 2, 32), "float32", "all", marks=pytest.mark.slow),
        pytest.param(PLAIN, (40, 2, 16), "bfloat16", "default", marks=pytest.mark.slow),
    ],
)
def test_values(attention, sizes, dtype, options):
    """With sinks, which count once; before and after rows of the runs have ended."""
    case = with_runs(make_case(sizes, dtype))
    wanted = OPTIONS["default"]._replace(logit_softcap=2.0)
    wanted = {**OPTIONS, "capped": wanted}[options]
    sinks = np.linspace(-1, 1, sizes[0], dtype=np.float32)
    call = jax.jit(lambda *args: attention.attend(*args[:3], wanted, args[3]))
    queries = jnp.asarray(case.queries, dtype)
    out = np.asarray(call(queries, case.layer, case.tables, sinks), np.float32)
    case.check(out, wanted, TOLERANCES[dtype], sinks)

    lens = case.tables.kv_lens.at[jnp.array([0, 2, 4, 5, 6])].set(0)
    tables = case.tables._replace(kv_lens=lens)
    left = np.asarray(call(queries, case.layer, tables, sinks), np.float32)
    goes_on = np.asarray(lens) > 0
    np.testing.assert_allclose(left[goes_on], out[goes_on], atol=1e-6)
    assert np.isfinite(left).all()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((4, 2, 32), "bfloat16"),
        pytest.param((8, 1, 64), "float32", marks=pytest.mark.slow),
        pytest.param((40, 2, 16), "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_invariant_kernel_has_the_bits_that_it_has_without(sizes, dtype):
    case, options = make_case(sizes, dtype), OPTIONS["default"]
    sinks = np.linspace(-1, 1, sizes[0], dtype=np.float32)
    alone = case.run(INVARIANT.attend, options, sinks)
    shared = with_runs(case).run(INVARIANT.attend, options, sinks)
    np.testing.assert_array_equal(shared, alone)


@pytest.mark.parametrize(
    ("attention", "head_dim", "dtype"),
    [
        (PLAIN, 32, "float32"),
        pytest.param(ON_TPU, 128, "float32", marks=pytest.mark.slow),
        pytest.param(PLAIN, 32, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_blocks_with_drafts(attention, head_dim, dtype):
    """Five of the 16 queries of a block may be used."""
    case = ragged_case(
        (400, 350, 430, 340, 320, 330, 310, 50, 16, 350),
        page_size=PAGE,
        num_heads=4,
        num_kv_heads=2,
        num_queries=16,
        head_dim=head_dim,
        dtype=dtype,
        prefixes=(0, 20, 20, 20, 0, 18, 13, 0, 0, 0),
    )
    starts = jnp.maximum(case.tables.positions[:, 0], 0)
    runs = find_runs(case.tables.page_table, starts, PAGE, jnp.int32(64), 4, 5)
    assert runs.num_keys.tolist() == [320, 208]
    sinks, options = np.linspace(-1, 1, 4, dtype=np.float32), OPTIONS["default"]
    shared = case._replace(tables=case.tables._replace(runs=runs))
    found, wanted = (each.run(attention.attend, options, sinks)[:-1, :5] for each in (shared, case))
    np.testing.assert_allclose(found, wanted, atol=TOLERANCES[dtype])


def write_and_attend(attention: Attention, case: RaggedCase, *, has_sinks: bool) -> list[Any]:
    """Outputs and pages, with keys that are normed and rotated if that is left to the attention."""
    rng, tables = np.random.default_rng(1), case.tables
    num_rows, _, num_heads, head_dim = case.queries.shape
    num_kv_heads = case.layer.k.shape[1]

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k, v = (draw(num_rows, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))
    new = NewTokens(q, k, v)
    if has_sinks:
        new = new._replace(sinks=draw(num_heads))
    if attention.takes_projections:
        angles = draw(num_rows, 1, head_dim // 2)
        norms = draw(head_dim), draw(head_dim), 1e-6
        new = new._replace(prologue=Prologue(jnp.sin(angles), jnp.cos(angles), *norms))
    slots = slots_at(tables.page_table, tables.positions[:, 0], tables.kv_lens > 0, PAGE)
    call = jax.jit(  # what norms add is static
        lambda layer, tables: attention.write_and_attend(
            new, layer, tables, slots, OPTIONS["default"]
        )
    )
    out, layer = call(case.layer, tables)
    return [np.asarray(out)[:-1], *map(np.asarray, layer)]


@pytest.mark.parametrize(
    ("attention", "sizes", "has_sinks"),
    [
        (FUSED, (4, 2, 32), True),
        (ON_TPU, (4, 2, 128), False),
        pytest.param(FUSED, (8, 1, 16), False, marks=pytest.mark.slow),
        pytest.param(ON_TPU, (4, 2, 128), True, marks=pytest.mark.slow),
    ],
)
def test_kernels_that_write_keys(attention, sizes, has_sinks):
    case = make_case(sizes)
    alone = write_and_attend(attention, case, has_sinks=has_sinks)
    shared = write_and_attend(attention, with_runs(case), has_sinks=has_sinks)
    np.testing.assert_allclose(shared[0], alone[0], atol=1e-5)
    for found, wanted in zip(shared[1:], alone[1:], strict=True):
        np.testing.assert_array_equal(found, wanted)


def samples_of_a_prompt(monkeypatch, backend: str, **more: Any) -> dict[bool, list[Any]]:
    """Greedy tokens and log-probs of eight samples, with shared keys and without."""
    options: dict[str, Any] = {"attention_backend": "tpu"}
    if backend == "tpu":
        monkeypatch.setattr(tpu, "tpu_problem", lambda *_: None)
        make = tpu.tpu_attention
        monkeypatch.setattr(tpu, "tpu_attention", lambda *args: make(*args, interpret=True))
    else:
        products = fused.FusedProducts(interpret=True) if backend == "fused" else None
        gpu_interpreted.use_gpu_kernels(monkeypatch, products)
        options = gpu_interpreted.OPTIONS
    (prompt,) = random_prompts(1, 150, 151)
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    order, is_shared, found = runner.decode_order, [], {}

    def watch(requests: Any, page_size: int) -> tuple[list[int], bool]:
        rows, shares = order(requests, page_size)
        is_shared.append(shares)
        return rows, shares and is_allowed

    monkeypatch.setattr(runner, "decode_order", watch)
    for is_allowed in (True, False):
        with Engine(
            model_config=TINY, weights=spread_weights(), **SMALL, **options, **more
        ) as engine:
            outputs = engine.generate_requests([prompt] * 8, params)
        found[is_allowed] = [(each.output_ids, each.logprobs) for each in outputs]
    assert any(is_shared)
    return found


@pytest.mark.parametrize(
    "backend",
    [
        "fused",
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("tpu", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {"speculation": "always", "speculative_num_draft_tokens": 3}, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "drafts"],
)
def test_an_engine_answers_as_without(monkeypatch, backend, more):
    found = samples_of_a_prompt(monkeypatch, backend, **more)
    for (tokens, logprobs), (wanted, others) in zip(found[True], found[False], strict=True):
        assert tokens == wanted
        np.testing.assert_allclose(logprobs, others, atol=1e-5)


@pytest.mark.slow
def test_heads_over_two_devices():
    run_python("-W", "ignore", "-m", "tests.engine.test_shared_runs", num_devices=2)


def on_two_devices() -> None:
    """Each device shares the keys of its heads."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("tp",))
    case, options = with_runs(make_case((4, 2, 128))), OPTIONS["default"]
    sinks = jnp.linspace(-1, 1, 4)
    made = (PallasAttention, TpuAttention)
    for attention in (make(mesh=mesh.abstract_mesh, interpret=True) for make in made):
        heads, pages, place = P(None, None, "tp"), P(None, "tp"), jax.sharding.NamedSharding
        layer = jax.device_put(case.layer, place(mesh, pages))
        queries = jax.device_put(jnp.asarray(case.queries), place(mesh, heads))
        with jax.set_mesh(mesh):
            out = jax.jit(attention.attend, static_argnums=3)(
                queries, layer, case.tables, options, sinks
            )
        assert out.sharding.shard_shape(out.shape)[2] == 2
        case.check(np.asarray(out), options, 2e-5, np.asarray(sinks))


if __name__ == "__main__":
    on_two_devices()
