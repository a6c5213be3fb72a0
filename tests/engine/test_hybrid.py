"""Models with recurrent states: their slots, and answers that nothing on the way changes.

The answers are those of transformers (see tests/golden/hybrid_specs.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    Engine,
    EngineConfig,
    InvalidConfigError,
    LoraRule,
    SamplingParams,
    WeightRule,
    load_model_config,
    logical_rules,
)
from sgljax_engine.cache.layer_states import state_bytes
from sgljax_engine.config import DRAFTERS
from sgljax_engine.layers import delta_net, kernels
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.placement.submeshes import check_divides, place
from sgljax_engine.runner.kv.state_plan import plan_states
from tests.devices import run_python
from tests.engine.exactness_checks import check_golden_scores, golden_prompts
from tests.engine.interrupts import (
    assert_idle,
    results,
    settle,
    start_all,
    wait_until,
)
from tests.engine.models import HYBRID, logical_weights, random_prompts, spread_weights
from tests.engine.test_quantization import rounded, scores
from tests.geometry import SMALL
from tests.threads import gate_steps, running
from tests.tiers import tiered

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(
    path.parent.name
    for family in ("qwen3_next", "qwen3_5")
    for path in GOLDEN.glob(f"{family}*/golden.npz")
)
FAST = ("qwen3_5_ratio_two",)
SLOW = ("qwen3_next_grouped",)
"""With `FAST`, one of each class but for experts; the others are of the soak."""
PARAMS = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)
OPTIONS: dict[str, Any] = {**SMALL, "dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class InSlots(XlaKernels):
    """Steps states in their slots, as the kernel for TPUs does."""

    def steps_in_slots(self, states):
        return True

    def delta_step(self, states, heads, decay, rate, slots=None):
        assert slots is not None
        rows = jnp.take(states, slots, axis=0, mode="clip")
        rows = jnp.where(jnp.isneginf(decay)[..., None, None], 0.0, rows)
        new, out = delta_net.token_step(rows, heads, decay, rate)
        return states.at[slots].set(new, mode="drop"), out


def make_engine(folder: Path, **options: Any) -> Engine:
    return gate_steps(Engine(folder, **OPTIONS | options))


@pytest.fixture(scope="module", params=tiered(FOLDERS, FAST, SLOW))
def folder(request):
    return GOLDEN / request.param


@pytest.fixture(scope="module")
def golden(folder):
    return np.load(folder / "golden.npz")


@pytest.fixture(params=tiered(FOLDERS, FAST, ()))
def example(request):
    folder = GOLDEN / request.param
    return folder, np.load(folder / "golden.npz")


@pytest.fixture(scope="module")
def shared(folder):
    with make_engine(folder) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """With an empty cache; must be left awake and idle."""
    shared.flush_cache()
    yield shared
    settle(shared)


def check(golden, outputs):
    """The answers to the golden's prompts."""
    for i, output in enumerate(outputs):
        assert output.output_ids == golden[f"greedy_{i}"].tolist(), i
        np.testing.assert_allclose(output.logprobs, golden[f"greedy_logps_{i}"], atol=2e-4)


def test_there_are_three_shapes_of_each_class():
    names = [load_model_config(GOLDEN / name).architecture for name in FOLDERS]
    for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        assert names.count(name) >= 3


class TestAnswers:
    def test_alone(self, engine, golden):
        with running():
            outputs = [
                engine.generate_requests([prompt], PARAMS)[0] for prompt in golden_prompts(golden)
            ]
        check(golden, outputs)

    def test_scores(self, engine, golden):
        check_golden_scores(engine, golden)

    @pytest.mark.soak
    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_drafts(self, example, drafter):
        """Right and wrong ones; wrong ones leave no trace in the states."""
        folder, golden = example
        prompts, options = golden_prompts(golden), {"speculation": "always"}
        with make_engine(folder, **options, speculative_drafters=(drafter,)) as engine, running():
            for _ in range(2):
                check(golden, engine.generate_requests(prompts, PARAMS))
            params = dataclasses.replace(PARAMS, n=4)
            outputs = engine.generate_requests(prompts[-1:], params)
            counters = engine.get_internal_state().counters
        last = int(golden["num_prompts"]) - 1
        assert [each.output_ids for each in outputs] == [golden[f"greedy_{last}"].tolist()] * 4
        assert counters.num_draft_tokens > 0
        if drafter == "history":
            assert counters.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def small():
    """A folder for tests of what does not depend on shapes."""
    return GOLDEN / "qwen3_5_ratio_two"


@pytest.fixture(scope="module")
def scarce(small):
    with make_engine(small, num_state_slots=2) as engine:
        yield engine


class TestSlots:
    def test_no_more_requests_run_than_there_are_slots(self, scarce, small):
        golden = np.load(small / "golden.npz")
        with running():
            check(golden, scarce.generate_requests(golden_prompts(golden), PARAMS))
        counters = scarce.get_internal_state().counters
        assert counters.max_decode_batch == 2
        assert counters.num_retractions == 0
        assert_idle(scarce)

    def test_an_aborted_request_gives_its_slot_back(self, scarce, small):
        prompts = golden_prompts(np.load(small / "golden.npz"))[:2]
        calls = start_all(scarce, prompts, PARAMS)
        assert scarce.get_internal_state().free_state_slots == 0
        scarce.abort_request(abort_all=True)
        ends = [output.finish for output in results(calls)]
        assert [end and end.type for end in ends] == ["abort"] * 2
        wait_until(scarce, lambda state: state.free_state_slots == 2)
        assert scarce.flush_cache().success
        assert scarce.release_kv_cache() > 0
        golden = np.load(small / "golden.npz")
        with running():  # in memory that was allocated anew
            check(golden, scarce.generate_requests(golden_prompts(golden), PARAMS))

    def test_they_are_in_the_report(self, scarce, small):
        memory = scarce.get_internal_state().memory
        config = load_model_config(small)
        net = config.linear_attention
        assert net is not None
        per_slot = (
            4
            * sum(net.layers)
            * (
                (net.conv_size - 1) * net.num_channels
                + net.num_value_heads * net.key_dim * net.value_dim
            )
        )
        assert state_bytes(net) == per_slot
        assert memory.state_slots == 2
        # Of the eight rows that may decode together too.
        assert memory.state_bytes == (2 + 8) * per_slot

    def test_after_warmup_nothing_is_compiled(self, small):
        golden = np.load(small / "golden.npz")
        with make_engine(small, forbid_compile=True) as engine, running():
            engine.warmup()
            check(golden, engine.generate_requests(golden_prompts(golden), PARAMS))

    def test_a_limited_memory_holds_fewer(self, small):
        config = load_model_config(small)
        net = config.linear_attention
        found = {}
        for free_bytes in (None, 4 << 20, 1 << 20, 1 << 18):
            options = {"max_running_requests": 64, "mem_fraction_static": 0.5}  # no engine
            engine_config = EngineConfig.from_options(options)
            placement = place(config, None, "float32").engines[0]
            found[free_bytes] = plan_states(config, engine_config, placement, free_bytes)
        assert found[None].num_slots == 128
        for free_bytes, pool in found.items():
            if free_bytes is not None:
                assert free_bytes // 8 < pool.num_bytes <= free_bytes // 4
        assert len({pool.num_slots for pool in found.values()}) == 4
        with pytest.raises(InvalidConfigError, match="recurrent state of one request"):
            plan_states(config, engine_config, placement, state_bytes(net))

    def test_a_slot_count_for_a_model_without_states(self):
        with pytest.raises(InvalidConfigError, match="num_state_slots must be None"):
            Engine(GOLDEN / "llama_tied", **OPTIONS, num_state_slots=2)


@pytest.mark.soak
def test_int8_has_the_numbers_of_the_rounded_weights():
    weights = spread_weights(HYBRID)
    small, tokens = scores(HYBRID, weights, quantization="int8")
    expected, expected_tokens = scores(HYBRID, rounded(HYBRID, weights))
    assert tokens == expected_tokens
    np.testing.assert_allclose(small, expected, atol=2e-4)
    plain, _ = scores(HYBRID, weights)
    assert np.abs(plain - expected).max() > 0.01


@pytest.mark.soak
class TestAdapters:
    """Pairs of every kind of projection, kept apart, against the same added to the weights."""

    @pytest.fixture(scope="class")
    @classmethod
    def outputs(cls):
        weights = logical_weights(HYBRID)
        rules: list[WeightRule] = list(logical_rules(HYBRID))
        rng, pairs = np.random.default_rng(5), {}
        for name, spec in get_model(HYBRID.architecture).param_specs(HYBRID).items():
            projection = name.removesuffix(".weight")
            if spec.kind is not ParamKind.LINEAR:
                continue
            num_in, num_out = spec.shape
            pairs[f"{projection}.a"] = rng.normal(0, 0.3, (num_in, 4)).astype(np.float32)
            pairs[f"{projection}.b"] = rng.normal(0, 0.3, (4, num_out)).astype(np.float32)
            rules.append(LoraRule(name, f"{projection}.a", f"{projection}.b", 0.5))
        assert any("in_proj_a" in name for name in pairs)
        prompts, params = random_prompts(4, 3, 30), dataclasses.replace(PARAMS, max_new_tokens=16)
        options: dict[str, Any] = {**OPTIONS, "model_config": HYBRID, "weights": weights}
        options["weight_rules"] = logical_rules(HYBRID)
        found = {}
        with Engine(**options, max_loras=1, max_lora_rank=4) as engine:
            engine.load_adapter("one", pairs, rules)
            for lora in ("one", None):
                found[lora] = engine.generate_requests(prompts, params, lora)
                # The second time from the cache, where the adapter has prefixes of its own.
                again = engine.generate_requests(prompts, params, lora)
                assert [each.output_ids for each in again] == [
                    each.output_ids for each in found[lora]
                ]
        with Engine(**options) as engine:
            found["base"] = engine.generate_requests(prompts, params)
            engine.update_weights(weights | pairs, rules)
            found["merged"] = engine.generate_requests(prompts, params)
        return found

    @pytest.mark.parametrize(("lora", "whole"), [("one", "merged"), (None, "base")])
    def test_they_are_as_if_merged(self, outputs, lora, whole):
        for found, expected in zip(outputs[lora], outputs[whole], strict=True):
            assert found.output_ids == expected.output_ids
            np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-4)

    def test_they_change_answers(self, outputs):
        assert [each.output_ids for each in outputs["base"]] != [
            each.output_ids for each in outputs["merged"]
        ]


@pytest.mark.parametrize(
    ("name", "tp_size", "named"),
    [
        ("qwen3_5_ratio_two", 4, "linear_attention.num_key_heads"),
        ("qwen3_next_grouped", 8, "linear_attention.num_key_heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(name, tp_size, named):
    with pytest.raises(InvalidConfigError, match=rf"{named} must be a multiple .* \({tp_size}\)"):
        check_divides(load_model_config(GOLDEN / name), tp_size)


@pytest.mark.soak
@pytest.mark.parametrize("case", ["grouped", "ungrouped"])
def test_on_two_devices(case):
    run_python("-W", "ignore", "-m", "tests.engine.hybrid_cases", case, num_devices=2)


def test_random_weights(small):
    """Every parameter has a value, and the decays are those of a net that forgets."""
    config = load_model_config(small)
    assert config.linear_attention is not None
    with Engine(model_config=config, **OPTIONS) as engine:
        (output,) = engine.generate_requests([[5, 6, 7]], PARAMS)
    assert len(output.output_ids) == 64
    specs = get_model(config.architecture).param_specs(config)
    assert any(name.endswith("linear_attn.A_log") for name in specs)


@pytest.mark.soak
def test_interrupt_machine():
    """Runs the machine that models without states have, with few slots for states."""
    run_python("-W", "ignore", "-m", "tests.engine.hybrid_machine", 500, 60, num_devices=1)


def test_states_stepped_in_their_slots_give_the_same(monkeypatch):
    """Rows that end and begin within dispatches, the latter with one token in a slot just freed."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, size).tolist() for size in (5, 30, 17, 1, 1, 40, 23, 31, 1)]
    params = [dataclasses.replace(PARAMS, max_new_tokens=3 + 5 * i) for i in range(len(prompts))]
    found, traced = [], []
    step = InSlots.delta_step
    monkeypatch.setattr(
        InSlots, "delta_step", lambda self, *args: traced.append(1) or step(self, *args)
    )
    for backend in (XlaKernels, InSlots):
        monkeypatch.setattr(kernels, "XlaKernels", backend)
        with make_engine(GOLDEN / FAST[0], linear_backend="xla", num_state_slots=4) as engine:
            found.append(engine.generate_requests(prompts, params))
            assert_idle(engine)
    assert traced
    for plain, in_slots in zip(*found, strict=True):
        assert plain.output_ids == in_slots.output_ids
        np.testing.assert_allclose(plain.logprobs, in_slots.logprobs, atol=1e-5)
