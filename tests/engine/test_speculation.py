"""Speculation with everything else that an engine does. The bits are in test_speculation_bits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

import sgljax_cpu
from sgljax_engine import (
    Engine,
    EngineConfig,
    InvalidConfigError,
    ModelConfig,
    RequestOutput,
    SamplingParams,
)
from sgljax_engine.speculation.drafters import Answer, HistoryDrafter
from sgljax_engine.speculation.texts import RequestText
from tests import inside
from tests.devices import run_python
from tests.engine import test_adapters, test_window_pages
from tests.engine.determinism_cases import using
from tests.engine.models import (
    GPT_OSS,
    LATENTS,
    NEW_FAMILIES,
    SHARED_KEYS,
    TINY,
    TINY_MOE,
    random_prompts,
    spread_weights,
    with_eos,
)
from tests.engine.stepping import SteppedEngine
from tests.geometry import SMALL, WIDE
from tests.threads import LIMIT_S

OPTIONS: dict[str, Any] = {
    **SMALL,
    "speculation": "always",
    "speculative_num_draft_tokens": 3,
}
PROMPTS = random_prompts(4, 5, 30)
PARAMS = [
    SamplingParams(temperature=t, max_new_tokens=24, seed=i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.7, 1.0, 1.3))
]


def make(model: ModelConfig = TINY, **options: Any) -> Engine:
    return Engine(model_config=model, weights=spread_weights(model), **OPTIONS | options)


def speculator_of(engine: Engine) -> Any:
    return inside.core(engine)._speculator


def history_of(engine: Engine) -> HistoryDrafter:
    return speculator_of(engine)._drafters["history"]


def tell(engine: Engine, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> None:
    """Makes these the only earlier answers."""
    history = history_of(engine)
    history.clear()
    answers = zip(prompts, drafts, strict=True)
    tails = [(RequestText(p).key, [*p[-8:], *draft]) for p, draft in answers]
    history.load({key: [Answer(0, np.asarray(tokens, np.int32))] for key, tokens in tails})


def facts(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What drafts must not change; of deterministic engines to the bit."""
    return [
        (o.output_ids, o.logprobs, o.scaled_logprobs, o.processed_logprobs, str(o.finish), o.text)
        for o in outputs
    ]


def counters_of(engine: Engine) -> Any:
    engine.check_integrity()
    return engine.get_internal_state().counters


native = pytest.mark.skipif(
    sgljax_cpu.unavailable() is not None, reason="no JIT-compiled CPU kernels"
)


# ---------------------------------------------------------------------- models and options


@pytest.mark.soak
@native
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (SHARED_KEYS, {}),
        (TINY_MOE, {"enable_return_routed_experts": True}),
        (GPT_OSS, {}),
        *((model, {}) for model in NEW_FAMILIES.values()),
        (LATENTS, {"enable_return_routed_experts": True}),
        (test_window_pages.MODEL, {}),
        (TINY, {"quantization": "int8", "disable_radix_cache": True}),
        (TINY, {"dtype": "bfloat16"}),
    ],
    ids=[
        *("shared keys", "experts", "sinks"),
        *NEW_FAMILIES,
        *("latents", "windows", "int8", "bfloat16"),
    ],
)
def test_models(model, options):
    long = dataclasses.replace(PARAMS[2], max_new_tokens=90, seed=9)
    prompts, params = [*PROMPTS, PROMPTS[0]], [*PARAMS, long]
    with make(model, **options, speculation="off") as engine:
        expected = engine.generate_requests(prompts, params)
        assert not expected[0].draft_sources
    with make(model, **options) as engine:
        assert facts(engine.generate_requests(prompts, params)) == facts(expected)
        found = engine.generate_requests(prompts, params)
        assert facts(found) == facts(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert len(ours.draft_sources) == len(ours.output_ids)
            np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)
        assert counters_of(engine).num_accepted_history > 100
        assert sum(map(bool, found[0].draft_sources)) >= len(found[0].output_ids) // 2
        assert engine.flush_cache().success


@pytest.mark.soak
@native
def test_adapters_by_request():
    """Each request has its own; history of another adapter is only a draft."""
    options = {"max_loras": 2, "max_lora_rank": 4}
    found = {}
    for mode in ("off", "always"):
        with test_adapters.make_engine(**options, speculation=mode) as engine:
            for seed in (1, 2):
                engine.load_adapter(str(seed), *test_adapters.make_adapter(seed))
            found[mode] = [
                test_adapters.generate(engine, lora, PROMPTS, PARAMS)
                for lora in ([None, "1", "2", "1"], "2", "1", None)
            ]
            counters = counters_of(engine)
    assert found["always"] == found["off"]
    assert counters.num_drafted_history > counters.num_accepted_history > 0


@pytest.mark.soak
def test_a_group_of_engines():
    """They share drafters: an answer of one is history of all."""
    run_python("-W", "ignore", "-m", "tests.engine.speculation_group", num_devices=4)


# ---------------------------------------------------------------------- wrong drafts


@native
def test_drafts_that_mean_harm():
    """Always wrong, too long, beyond the stop token and the limit, of another vocabulary."""
    prompts = PROMPTS
    with make(speculation="off") as engine:
        truth = [o.output_ids for o in engine.generate_requests(prompts, PARAMS)]
    stops = [ids[10] for ids in truth]
    params = [
        dataclasses.replace(each, stop_token_ids=(stop,))
        for each, stop in zip(PARAMS, stops, strict=True)
    ]
    with make(speculation="off") as engine:
        expected = facts(engine.generate_requests(prompts, params))
    kinds = {
        "wrong": [[(token + 1) % TINY.vocab_size for token in ids] for ids in truth],
        "right, and on behind the stop token and the limit": [ids * 4 for ids in truth],
        "long": [ids[:3] + ids * 30 for ids in truth],
        "of another vocabulary": [[token + TINY.vocab_size for token in ids] for ids in truth],
        "huge and negative": [[2**31 - 1, -5, *ids] for ids in truth],
    }
    with make() as engine:
        for name, drafts in kinds.items():
            tell(engine, prompts, drafts)
            assert facts(engine.generate_requests(prompts, params)) == expected, name
            if name.startswith("right"):
                assert counters_of(engine).num_accepted_history > 20
        counters = counters_of(engine)
        assert counters.num_drafted_history > counters.num_accepted_history + 20


@native
def test_streams():
    """A piece for each dispatch, the first token by itself."""
    with make(speculation="off") as engine:
        (truth,) = engine.generate_requests(PROMPTS[:1], PARAMS[1])
    with make() as engine:
        engine.generate_requests(PROMPTS[:1], PARAMS[1])
        pieces = list(engine.generate(None, PARAMS[1], PROMPTS[0], stream=True))
        ids = [token for piece in pieces for token in piece["output_ids"]]
        assert ids == truth.output_ids
        assert len(pieces[0]["output_ids"]) == 1
        sources = [source for piece in pieces for source in piece["meta_info"]["draft_sources"]]
        assert len(sources) == len(ids)
        assert sum(map(bool, sources)) > 10


# ---------------------------------------------------------------------- distribution


@pytest.mark.soak
def test_frequencies():
    """In default mode without JIT-compiled kernels: drafts change no frequency.

    Drafts are the likeliest pairs of tokens, so that acceptance itself could favour them.
    """
    model = dataclasses.replace(TINY, vocab_size=8)
    prompt, count = [1, 2, 3], 3000
    params = [
        SamplingParams(temperature=1.0, max_new_tokens=2, seed=seed, ignore_eos=True)
        for seed in range(2 * count)
    ]
    found = {}
    for mode, seeds in (("off", params[:count]), ("always", params[count:])):
        with using("portable"), make(model, speculation=mode) as engine:
            outputs = engine.generate_requests([prompt] * count, seeds)
            found[mode] = Counter(tuple(o.output_ids) for o in outputs)
            counters = counters_of(engine)
    assert counters.num_accepted_tokens > count // 10
    pairs = [pair for pair, number in found["off"].items() if number >= 10]
    table = [[found[mode][pair] for pair in pairs] for mode in ("off", "always")]
    assert len(pairs) > 10
    result: Any = stats.chi2_contingency(table)
    assert result.pvalue > 1e-3
    rest = [count - sum(row) for row in table]
    assert abs(rest[0] - rest[1]) < 6 * np.sqrt(max(rest) + 1)


# ---------------------------------------------------------------------- the policy


class TestPolicy:
    """Steps of an engine without a thread, with seconds that are given."""

    def run(self, seconds: float, **changes: Any) -> list[int]:
        """Tokens of a row in a step of each dispatch, if one with drafts takes `seconds`."""
        engine = SteppedEngine(TINY, **OPTIONS | {"speculation": "auto"})
        speculator, planned, now = engine.core._speculator, [], [0.0]
        assert speculator is not None
        speculator._clock = lambda: now[0]
        plan, learn = speculator.plan, speculator.learn

        def noted(requests: Any, num_steps: int) -> Any:
            found = plan(requests, num_steps)
            planned.append(1 if found is None else found.row_tokens)
            return found

        def late(plan: Any, result: Any) -> None:
            now[0] += result.num_steps * (1.0 if planned[-1] == 1 else seconds)
            learn(plan, result)

        speculator.plan, speculator.learn = noted, late
        params = dataclasses.replace(PARAMS[2], max_new_tokens=90, **changes)
        for _ in range(8):
            futures = engine.add(PROMPTS[:2], params)
            engine.finish()
            assert [len(future.result(LIMIT_S).output_ids) for future in futures] == [90, 90]
        return planned

    def test_useless_drafts_end(self):
        """Random tokens: the program without drafts takes over, and drafts are tried again."""
        planned = self.run(1.9, temperature=2.0, seed=None)
        assert set(planned) == {1, 4}
        assert planned.count(4) < len(planned) / 4

    def test_right_drafts_go_on(self):
        assert set(self.run(1.9)[-5:]) == {4}

    def test_right_drafts_that_cost_too_much(self):
        assert self.run(5.0).count(4) < 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "on"}, "speculation must be one of"),
        ({"speculative_drafters": ()}, "speculative_drafters must be"),
        ({"speculative_drafters": ("eagle",)}, "speculative_drafters must be"),
        ({"speculative_num_draft_tokens": 0}, "speculative_num_draft_tokens"),
        ({"speculative_num_draft_tokens": 64}, "speculative_num_draft_tokens must be at most 63"),
        ({"speculative_history_bytes": -1}, "speculative_history_bytes"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(InvalidConfigError, match=message):
        make(**options)


def test_false_is_off():
    """As YAML reads a bare off."""
    assert EngineConfig.from_options({"speculation": False}).speculation.speculation == "off"


def test_large_batches_have_no_drafts():
    """None of the programs: speculation is as if it were off."""
    with make(**WIDE) as engine:
        assert speculator_of(engine) is None
        engine.generate_requests(PROMPTS, PARAMS)
        assert counters_of(engine).num_verify_steps == 0


# ---------------------------------------------------------------------- what is seen


@native
def test_what_is_counted():
    with make(with_eos(TINY, 5)) as engine:
        engine.start_recording()
        engine.generate_requests(PROMPTS, PARAMS)
        outputs = engine.generate_requests(PROMPTS, PARAMS)
        counters, progress = counters_of(engine), engine.get_progress()
        recording = engine.stop_recording()
    accepted = sum(map(bool, outputs[0].draft_sources))
    assert 0 < accepted <= counters.num_accepted_tokens <= counters.num_draft_tokens
    assert counters.num_verified_tokens <= counters.num_output_tokens
    assert progress.num_accepted_tokens == counters.num_accepted_tokens
    assert 1 < counters.acceptance_length <= 4
    decodes: list[Any] = [event.args for event in recording.events if event.name == "decode"]
    assert sum(args.get("accepted", 0) for args in decodes) == counters.num_accepted_tokens
    meta = outputs[0].to_dict()["meta_info"]
    assert meta["spec_accept_token_num"] == accepted
    assert len(meta["draft_sources"]) == len(outputs[0].output_ids)
