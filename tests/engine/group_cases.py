"""A group of engines on eight host devices: `python -m tests.engine.group_cases CASE...`.

They run in processes of their own, since JAX fixes the number of devices at start; see
test_group.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import operator
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from sgljax_engine import (
    Engine,
    EngineConfig,
    InvalidConfigError,
    InvalidRequestError,
    ModelConfig,
    OffloadError,
    SamplingParams,
    WeightSyncError,
    preview_engine,
)
from sgljax_engine.attention import pallas, tpu
from sgljax_engine.attention.base import Attention, AttentionOptions, BlockTables, NewTokens
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.cache.kv_pages import LayerKV, PageLayout
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.layers.target import Target
from sgljax_engine.model_config import KVShape
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.serving_weights import ServingWeights
from sgljax_engine.runner.warmup import warm_calls
from tests import inside
from tests.engine.filter_cases import Case, kept_in_float64
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.page_layouts import pack, unpack
from tests.geometry import SMALL, WIDE
from tests.threads import LIMIT_S, gate_steps, start, take_steps, wait_for

ONE = dataclasses.replace(TINY, num_layers=1)
PROMPTS = random_prompts(8, 1, 40)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def mesh_of(shape: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), axes, **options)


def make(mesh: Mesh | None, model: Any = ONE, **options: Any) -> Engine:
    weights = spread_weights(model)
    return Engine(model_config=model, weights=weights, mesh=mesh, **{**SMALL, **options})


def outputs(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.output_ids for output in engine.generate_requests(PROMPTS, params)]


def wait_until_waiting(engine: Engine, count: int) -> None:
    wait_for(lambda: engine.get_progress().num_waiting == count)


def check_idle(engine: Engine) -> None:
    """All pages of all pools are free after a flush."""
    engine.check_integrity()
    assert engine.flush_cache().success
    state = engine.get_internal_state()
    assert state.available_kv_tokens == state.total_kv_tokens
    assert state.running_batch_size == state.waiting_queue_size == 0
    versions = {each.weight_version for each in state.engines}
    assert versions <= {state.weight_version}


# ------------------------------------------------------------------ the cut


def kv_bytes_by_device(engine: Engine) -> dict[Any, int]:
    held: dict[Any, int] = {}
    for core in inside.cores(engine):
        for leaf in jax.tree.leaves(core.runner.kv_memory.kv):
            for shard in leaf.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def meshes() -> None:
    """Each device has its part of the KV cache, and tokens are those of one device."""
    check_meshes(mesh_of((2, 2), ("fsdp", "tp")))


def other_meshes() -> None:
    """Whatever the axes are called, their order, number and type."""
    explicit = {"axis_types": (AxisType.Explicit, AxisType.Explicit)}
    check_meshes(
        mesh_of((2, 2), ("data", "model")),
        mesh_of((2, 2), ("tp", "fsdp"), **explicit),
        mesh_of((4,), ("x",)),
    )


def check_meshes(*meshes: Mesh) -> None:
    with make(None) as one:
        want = one.generate_requests(PROMPTS, GREEDY)
        (whole,) = kv_bytes_by_device(one).values()
    for mesh in meshes:
        with make(mesh) as engine:
            got = engine.generate_requests(PROMPTS, GREEDY)
            assert [o.output_ids for o in got] == [o.output_ids for o in want], mesh
            for mine, ours in zip(want, got, strict=True):
                np.testing.assert_allclose(mine.logprobs, ours.logprobs, atol=1e-5)
            held = kv_bytes_by_device(engine)
            assert set(held) == set(mesh.devices.flat)
            assert max(held.values()) <= 1.05 * whole / mesh.size
            check_idle(engine)


def flops() -> None:
    """No device computes what another does: with the widths of Qwen3-0.6B, of which one layer."""
    model = dataclasses.replace(
        TINY,
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=1,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    whole = decode_flops(model, None)
    for shape, tp_size in (((8, 1), 1), ((2, 2), 2), ((1, 8), 8)):
        mesh = mesh_of(shape, ("data", "model"))
        share = decode_flops(model, mesh, tp_size=tp_size) / (whole / mesh.size)
        assert 0.99 < share < 1.05, (shape, share)


class KernelCase(NamedTuple):
    """Attention of three blocks over several devices, on each of which there is one kv head."""

    placement: Placement
    kv: KVShape
    q: np.ndarray
    new: tuple[np.ndarray, np.ndarray]
    pages: tuple[np.ndarray, np.ndarray]
    tables: BlockTables

    @classmethod
    def make(cls, head_dim: int = 128) -> KernelCase:
        """A case on four devices, each kv head on two of them."""
        model = dataclasses.replace(TINY, num_heads=8, num_kv_heads=2, head_dim=head_dim)
        case = cls.of_layer(model, 0, 4)
        assert case.placement.kv_copies(case.kv) == 2
        return case

    @classmethod
    def of_layer(cls, model: ModelConfig, layer: int, tp_size: int) -> KernelCase:
        """The case of one layer of a model."""
        (placement,) = place(model, mesh_of((1, tp_size), ("fsdp", "tp")), "float32").engines
        kv = model.kv_shape(layer)
        rng, heads = np.random.default_rng(0), (model.num_heads, kv.num_heads, kv.num_heads)
        q, k, v = (rng.normal(size=(3, 16, n, kv.head_dim)).astype(np.float32) for n in heads)
        pages = rng.normal(size=(2, 9, kv.num_heads, 16, kv.head_dim)).astype(np.float32)
        positions = np.asarray([0, 20, 32])[:, None] + np.arange(16)
        parts = np.arange(9).reshape(3, 3), positions, np.asarray([16, 30, 0])
        table, positions, kv_lens = (jnp.asarray(part, jnp.int32) for part in parts)
        tables = BlockTables(table, positions, kv_lens)
        return cls(placement, kv, q, (k, v), (pages[0], pages[1]), tables)

    def write_and_attend(self, attention: Attention, layer: LayerKV) -> tuple[Any, LayerKV]:
        """The output and the pages, of kernels that find the slots by themselves."""
        q, k, v = (jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in (self.q, *self.new))
        new = NewTokens(q, k, v)
        slots, options = np.zeros(len(new.q), np.int32), AttentionOptions(scale=0.1)
        call = jax.jit(attention.write_and_attend, static_argnums=4)
        out, layer = call(new, layer, self.tables, slots, options)
        return out.reshape(self.q.shape), layer

    def check_gpu_kernel(self) -> None:
        """The output of one device."""
        options = AttentionOptions(scale=0.1)
        several = pallas.gpu_attention(self.target("gpu"), XlaKernels(), interpret=True)
        attentions = PallasAttention(interpret=True), several
        want, got = (
            jax.jit(attention.attend, static_argnums=3)(self.q, layer, self.tables, options)
            for attention, layer in zip(
                attentions, (one_device(self.pages), self.sharded_pages()), strict=True
            )
        )
        assert not got.sharding.is_fully_replicated
        self.check(want, got)

    def target(self, platform: str) -> Target:
        return self.placement.target._replace(platform=platform, is_own_cpu=False)

    def sharded_pages(self, layout: PageLayout | None = None) -> LayerKV:
        sharding = self.placement.kv_sharding(self.kv)
        packed = self.pages if layout is None else [pack(layout, part) for part in self.pages]
        layer = LayerKV(*(jax.device_put(part, sharding) for part in packed))
        assert layer.k.sharding.shard_shape(layer.k.shape)[1] == 1
        return layer

    @staticmethod
    def check(want: Any, got: Any) -> None:
        for block, count in enumerate((16, 10)):
            np.testing.assert_allclose(want[block, :count], got[block, :count], atol=1e-6)


def one_device(pages: Iterable[np.ndarray]) -> LayerKV:
    """The pages of one layer on the first device."""
    return LayerKV(*map(jnp.asarray, pages))


def tpu_kernel() -> None:
    """Heads over four devices: the output and the pages of one."""
    for head_dim in (128, 64):
        case = KernelCase.make(head_dim)
        per_row = tpu.heads_per_row(head_dim)
        alone, shared = (PageLayout(2, head_dim, per_row, shards) for shards in (1, 2))
        sharded = tpu.tpu_attention(case.target("tpu"), (head_dim,), interpret=True)
        pages = one_device(pack(alone, part) for part in case.pages), case.sharded_pages(shared)
        want, one = case.write_and_attend(TpuAttention(interpret=True), pages[0])
        got, several = case.write_and_attend(sharded, pages[1])
        assert several.k.sharding.shard_shape(several.k.shape)[1] == 1
        for mine, ours in zip(one, several, strict=True):
            np.testing.assert_array_equal(
                unpack(alone, np.asarray(mine)), unpack(shared, np.asarray(ours))
            )
        case.check(want, got)


def gpu_kernel() -> None:
    """Heads over four devices: the output of one."""
    KernelCase.make().check_gpu_kernel()


def decode_flops(model: ModelConfig, mesh: Mesh | None, **options: Any) -> float:
    """Operations of a decode step of 64 rows in all, on each device, as XLA counts them."""
    plain = {"attention_backend": "xla", "linear_backend": "xla"}
    # no engine, only its shapes
    sizes = {"max_running_requests": 64, "num_kv_tokens": 64 * 128, "max_model_len": 128}
    options = {**sizes, **plain, **options}
    runner, memory = build_shapes(model, EngineConfig.from_options(options), "float32", mesh)
    num_engines = 1 if mesh is None else mesh.size // memory.tp_size
    assert memory.kv_tokens == 64 * 128 // num_engines
    call = next(
        call
        for call in warm_calls(runner)
        if call.name == "decode" and len(call.args[0].input_ids) == 64 // num_engines
    )
    compiled = runner.programs.compile_alone(call, runner.kv_memory.state(runner.weights))
    found = compiled.cost_analysis()
    assert found is not None
    return found["flops"]


def sizes() -> None:
    """`tp_size` and `data_parallel_size` share out the same devices otherwise."""
    mesh = mesh_of((8, 1), ("fsdp", "tp"))
    for options, count, size in (
        ({"tp_size": 2}, 4, 2),
        ({"data_parallel_size": 2}, 2, 4),
        ({"tp_size": 4, "data_parallel_size": 2}, 2, 4),
        ({"tp_size": "auto"}, 8, 1),
        ({"tensor_axes": ["fsdp"], "tp_size": 4}, 2, 4),
    ):
        seen = preview_engine(
            ONE, mesh=mesh, config=EngineConfig.from_options({**SMALL, **options})
        )
        assert (seen.num_engines, seen.tp_size) == (count, size), options
    with make(None, tp_size=2, data_parallel_size=2) as engine:
        found = [core.runner.kv_memory.kv.layers[0].k.devices() for core in inside.cores(engine)]
        assert found == [set(jax.devices()[:2]), set(jax.devices()[2:4])]
        memory = engine.get_internal_state().memory
        assert (memory.num_engines, memory.tp_size) == (2, 2)
    for options, message in (
        ({"tp_size": 3}, "tp_size 3 must share out the 8 devices of the mesh"),
        ({"tp_size": 2, "data_parallel_size": 2}, "tp_size 2 and data_parallel_size 2 must share"),
        ({"tp_size": "most"}, "tp_size must be 'auto', None or a count, got 'most'"),
        (
            {"num_kv_tokens": 1024, "max_model_len": 256},  # no engine
            "num_kv_tokens 1024 gives each of 8 engines a pool of 128 tokens",
        ),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            make(mesh, **options)


def auto() -> None:
    """ "auto" takes the smallest size that fits the devices' memory."""
    plan = importlib.import_module("sgljax_engine.runner.kv.parallel_fit")
    mesh = mesh_of((4, 1), ("fsdp", "tp"))
    config = EngineConfig.from_options({**SMALL, "tp_size": "auto"})
    cut = functools.partial(plan.fit_parallel, ONE, mesh=mesh, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:

        def give(num_bytes: int | None) -> None:
            def free_bytes(placement: Any, *_: int | None) -> int | None:
                return None if num_bytes is None else num_bytes * placement.mesh.size

            patch.setattr(plan, "engine_free_bytes", free_bytes)

        for num_bytes, size in ((500_000, 1), (300_000, 2), (200_000, 4)):
            give(num_bytes)
            assert cut(config=config).tp_size == size
            # Without "auto" the mesh's own size serves as long as it fits.
            plain = cut(config=EngineConfig.from_options({**SMALL}))
            assert plain.tp_size == (None if size == 1 else size)
        give(100_000)
        with pytest.raises(
            InvalidConfigError, match="finds no size that fits 4 devices: tp_size 1 needs"
        ):
            cut(config=config)
        give(None)
        with pytest.raises(InvalidConfigError, match="needs devices that report their memory"):
            cut(config=config)


# ------------------------------------------------------------------ requests


def routing() -> None:
    """Each prompt is prefilled once in all, and engines get about as many tokens."""
    prompts = random_prompts(8, 60, 100, seed=4)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, n=8)
    with make(mesh_of((2, 1), ("fsdp", "tp")), **WIDE) as engine:
        engine.generate_requests(prompts, params)
        state = engine.get_internal_state()
        # The last token of a prompt is an input of each sample's first decode step.
        assert state.counters.num_prefill_tokens <= sum(map(len, prompts))
        assert [each.counters.num_output_tokens for each in state.engines] == [4 * 8 * 8] * 2
        assert engine.get_progress().num_output_tokens == state.counters.num_output_tokens
        check_idle(engine)


def moves() -> None:
    """Requests that wait move to engines with free rows, and nothing is lost."""
    # However long a step takes here, it is of as many tokens.
    with make(mesh_of((2, 1), ("fsdp", "tp")), max_dispatch_s=math.inf) as engine:
        # In turn: one engine gets the long ones, and the other is done soon.
        prompts = [[5 + row] * 40 for row in range(24)]
        params = [
            SamplingParams(temperature=0, max_new_tokens=4 if row % 2 else 200, ignore_eos=True)
            for row in range(24)
        ]
        gate_steps(engine)
        call = start(functools.partial(engine.generate_requests, prompts, params))
        wait_until_waiting(engine, 24)
        second = engine.get_internal_state().engines[1]
        for _ in range(40):  # the long ones take more
            take_steps(engine, 1)
            second = engine.get_internal_state().engines[1]
            if second.counters.num_finished >= 12 and second.running_batch_size == 4:
                break
        assert second.counters.num_finished >= 12
        assert second.running_batch_size == 4  # of the long ones
        got = call.result(LIMIT_S)
        assert [len(o.output_ids) for o in got] == [200, 4] * 12
        states = engine.get_internal_state().engines
        assert sum(each.counters.num_finished for each in states) == 24
        assert sum(each.counters.num_requests for each in states) == 24
        check_idle(engine)


def ids() -> None:
    """An id is taken in the whole group, until its whole call is answered."""
    with make(mesh_of((2, 1), ("fsdp", "tp"))) as engine:
        engine.pause_generation()
        call = start(lambda: engine.generate(input_ids=[[1], [2]], rid=["a", "b"]))
        wait_until_waiting(engine, 2)
        for rid in ("a", "b"):
            with pytest.raises(InvalidRequestError, match=f"rid '{rid}' is the id of another"):
                engine.generate(input_ids=[3], rid=rid)
        assert engine.abort_request("b") == 1
        with pytest.raises(InvalidRequestError):
            engine.generate(input_ids=[3], rid="b")  # its call is not answered yet
        assert engine.abort_request("a") == 1
        assert [out["meta_info"]["finish_reason"]["type"] for out in call.result(LIMIT_S)] == [
            "abort",
            "abort",
        ]
        engine.continue_generation()
        assert engine.generate(input_ids=[3], rid="b")["output_ids"]
        check_idle(engine)


# ------------------------------------------------------------------ all or nothing


def _fault(engine: Engine, index: int, owner: Callable[[EngineCore], Any], name: str) -> None:
    """Lets a method of one engine fail once."""
    target = owner(inside.cores(engine)[index])
    real = getattr(target, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        setattr(target, name, real)
        raise RuntimeError("planted")

    setattr(target, name, fail)


@contextlib.contextmanager
def _refused_swap(engine: Engine, index: int) -> Iterator[None]:
    """One engine finds that it cannot take other weights."""
    refusing = inside.cores(engine)[index].serving

    def check(self: cmd.SwapWeights, serving: ServingWeights) -> None:
        if serving is refusing:
            raise RuntimeError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cmd.SwapWeights, "check", check)
        yield


def faults() -> None:
    """A failure on one submesh at any stage leaves all engines with the old weights, awake."""
    new = spread_weights(ONE, seed=5)
    serving, runner = operator.attrgetter("serving"), operator.attrgetter("runner")
    kv = operator.attrgetter("runner.kv_memory")
    with make(mesh_of((4, 1), ("fsdp", "tp"))) as engine:
        want = outputs(engine)
        sums = engine.get_weights_checksum()

        def serves_old(version: int = 0) -> None:
            assert not engine.is_sleeping()
            assert {core.serving.version for core in inside.cores(engine)} == {version}
            assert engine.get_weights_checksum() == sums
            assert outputs(engine) == want
            check_idle(engine)

        for index in (0, 3):
            with _refused_swap(engine, index), pytest.raises(RuntimeError, match="planted"):
                engine.update_weights(new)
            serves_old()
            _fault(engine, index, serving, "with_adapters")
            with pytest.raises(RuntimeError, match="planted"):
                engine.update_weights(new)
            serves_old()
            staged = engine.stage_weights(new)
            with _refused_swap(engine, index), pytest.raises(RuntimeError, match="planted"):
                engine.publish_weights(staged)
            assert staged.state == "staged"
            serves_old()
            assert engine.discard_weights(staged)
            for owner, name in ((runner, "weights_to_host"), (kv, "save_pages")):
                outputs(engine)
                _fault(engine, index, owner, name)
                with pytest.raises(OffloadError):
                    engine.sleep(1, preserve_state=True)
                serves_old()
            for owner, name in ((runner, "weights_from_host"), (kv, "allocate")):
                engine.sleep(1)
                _fault(engine, index, owner, name)
                with pytest.raises(OffloadError):
                    engine.wake_up()
                assert all(core.sleep_manager.asleep for core in inside.cores(engine))
                assert all(core.sleep_manager.keeps_weights for core in inside.cores(engine))
                engine.wake_up()
                serves_old()
        bad = dict(new) | {name: np.full_like(x, np.nan) for name, x in list(new.items())[:1]}
        for call in (engine.update_weights, engine.stage_weights):
            with pytest.raises(WeightSyncError):
                call(bad)
        serves_old()
        staged = engine.stage_weights(new)
        assert engine.publish_weights(staged) == 1
        assert engine.publish_weights(staged) == 1
        assert outputs(engine) != want
        for mode in ("retract", "in_place", "wait", "abort"):
            engine.update_weights(spread_weights(ONE), mode=mode)
        serves_old(5)
        engine.update_weights(spread_weights(ONE), donate=True)
        serves_old(6)
        staged = engine.stage_weights(new)
        inside.cores(engine)[2].runner.weight_version = 9  # this engine alone refuses
        with pytest.raises(InvalidRequestError, match="above the serving version 9, got 9"):
            engine.publish_weights(staged, version=9)
        inside.cores(engine)[2].runner.weight_version = 6
        serves_old(6)
        assert engine.publish_weights(staged, version=9) == 9
        assert {core.serving.version for core in inside.cores(engine)} == {9}
        assert outputs(engine) != want


def scores() -> None:
    with make(None) as one, make(mesh_of((4, 1), ("fsdp", "tp"))) as engine:
        for sequences in (PROMPTS, PROMPTS[:1], PROMPTS[:2]):
            for a, b in zip(one.score(sequences), engine.score(sequences), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
        assert engine.warmup() > 0
        assert engine.warmup() == 0


def masks() -> None:
    """Sampling masks on meshes, with drafts and without, are what float64 keeps."""
    filters: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.05, "top_k": 40},
        {"top_k": 30, "top_p": 0.9},
    ]
    params = [
        SamplingParams(
            seed=seed, max_new_tokens=12, ignore_eos=True, return_sampling_mask=True, **settings
        )
        for seed, settings in enumerate(2 * filters)
    ]
    drafting = {"speculation": "always", "speculative_num_draft_tokens": 3}
    found = []
    for mesh in (None, mesh_of((4, 1), ("fsdp", "tp")), mesh_of((2, 2), ("fsdp", "tp"))):
        for options in ({}, drafting) if mesh is not None else ({},):
            with make(mesh, **options) as engine:
                if options:
                    engine.generate(input_ids=PROMPTS, sampling_params=params)  # drafts, next time
                outs = engine.generate(
                    input_ids=PROMPTS,
                    sampling_params=params,
                    return_logprob=True,
                    top_logprobs_num=ONE.vocab_size,
                )
                num_accepted = [core.counters.num_accepted_history for core in inside.cores(engine)]
                assert (sum(num_accepted) > 20) == bool(options), num_accepted
            found.append([check_masks(*pair) for pair in zip(params, outs, strict=True)])
    one, group, drafted_group, tensor, drafted_tensor = found
    assert one == group == drafted_group
    assert tensor == drafted_tensor


def check_masks(params: SamplingParams, out: dict[str, Any]) -> list[set[int]]:
    """The masks of an output, which are those of its raw log-probs in float64."""
    meta = out["meta_info"]
    masks = [set(mask) for mask in meta["output_token_sampling_mask"]]
    raw = np.full((len(masks), ONE.vocab_size), -np.inf, np.float32)
    for row, entries in zip(raw, meta["output_top_logprobs"], strict=True):
        row[[token for _, token, _ in entries]] = [logprob for logprob, _, _ in entries]
    top_k = params.top_k if params.top_k and params.top_k > 0 else ONE.vocab_size
    settings = (params.temperature, top_k, params.top_p, params.min_p)
    case = Case(raw, *(np.full(len(masks), value) for value in settings))
    kept = [set(np.flatnonzero(kept_in_float64(case, row).mask)) for row in range(len(masks))]
    assert masks == kept, params
    assert all(token in mask for token, mask in zip(out["output_ids"], masks, strict=True))
    return masks


def checkpoints() -> None:
    """Requests of a group continue in groups of other sizes."""
    with tempfile.TemporaryDirectory() as folder:
        check_checkpoints(folder)


def check_checkpoints(folder: str) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    meshes = [None, mesh_of((2, 1), ("fsdp", "tp")), mesh_of((4, 1), ("fsdp", "tp"))]
    engines = [make(mesh) for mesh in meshes]
    want = sorted(tuple(o.output_ids) for o in engines[0].generate_requests(PROMPTS, params))
    for source, target in ((1, 2), (2, 0), (0, 1)):
        saved, restored = engines[source], engines[target]
        saved.flush_cache()
        restored.flush_cache()
        gate_steps(saved)
        call = start(functools.partial(saved.generate_requests, PROMPTS, params))
        wait_until_waiting(saved, len(PROMPTS))
        take_steps(saved, 4)
        saved.pause_generation("in_place")
        path = f"{folder}/{source}"
        saved.save_checkpoint(path)
        futures = restored.restore_checkpoint(path)
        got = sorted(tuple(f.result(LIMIT_S).output_ids) for f in futures.values())
        assert got == want
        saved.continue_generation()
        call.result(LIMIT_S)
        check_idle(restored)
    for engine in engines:
        engine.shutdown()


if __name__ == "__main__":
    logging.getLogger("sgljax_engine").setLevel(logging.ERROR)
    assert len(jax.devices()) == 8
    for case in sys.argv[1:]:
        globals()[case]()
