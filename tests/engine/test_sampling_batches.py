"""What a request draws depends on its seed and settings, and on nothing else in the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sgljax_engine import CompileForbiddenError, Engine, SamplingParams
from tests.compilation import recorded_programs
from tests.engine.models import TINY, random_prompts, spread_weights, with_eos
from tests.geometry import CHUNKED, SMALL, WIDE

EOS = 17
MODEL = with_eos(TINY, EOS)
WEIGHTS = spread_weights()
FULL = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.005,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={5: 1.0, 6: -1.0, EOS: 3.0},
    bad_token_ids=(56, 57),
    min_new_tokens=20,
    max_new_tokens=40,
)


def make_engine(**given: Any) -> Engine:
    return Engine(model_config=MODEL, weights=WEIGHTS, **{**SMALL, **given})


def seeded_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Full-table and plain requests, some of them with equal prompts."""
    prompts = random_prompts(12, 2, 40, seed=3)
    prompts[3] = prompts[4] = prompts[5]
    plain = SamplingParams(temperature=1.0, max_new_tokens=40)
    kinds = [
        FULL,
        plain,
        dataclasses.replace(plain, repetition_penalty=1.3, temperature=0.0),
        dataclasses.replace(FULL, allowed_token_ids=tuple(range(20, 90)), logit_bias=None),
    ]
    return prompts, [dataclasses.replace(kinds[i % 4], seed=100 + i) for i in range(12)]


@pytest.fixture(scope="module")
def alone():
    """Each request alone in an engine that decodes one step a dispatch."""
    with make_engine(max_dispatch_s=1e-9, disable_radix_cache=True) as engine:
        engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 9})  # a step's time
        before = engine.get_internal_state().counters.num_dispatches
        outs = [
            engine.generate_requests([prompt], params)[0]
            for prompt, params in zip(*seeded_requests(), strict=True)
        ]
        num_dispatches = engine.get_internal_state().counters.num_dispatches - before
    assert num_dispatches >= sum(len(out.output_ids) for out in outs), "one step in each"
    return outs


def assert_same(outs, expected):
    for out, each in zip(outs, expected, strict=True):
        assert out.output_ids == each.output_ids
        assert out.finish == each.finish
        for name in ("logprobs", "scaled_logprobs", "processed_logprobs"):
            values = getattr(out, name)
            assert len(values) == len(out.output_ids)
            np.testing.assert_allclose(values, getattr(each, name), atol=2e-4)


class TestCompany:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            pytest.param(WIDE, marks=pytest.mark.soak),
            pytest.param({**CHUNKED, "disable_radix_cache": True}, marks=pytest.mark.soak),
        ],
        ids=["small", "wide", "chunked"],
    )
    def test_output_does_not_depend_on_company_or_configuration(self, alone, options):
        """Also one step a dispatch against many: penalties go on across their border."""
        with make_engine(**options) as engine:
            prompts, params = seeded_requests()
            assert_same(engine.generate_requests(prompts, params), alone)
            # In another order, with strangers.
            strangers = random_prompts(4, 1, 30, seed=9)
            outs = engine.generate_requests(
                [*strangers, *prompts[::-1]],
                [*[SamplingParams(max_new_tokens=30)] * 4, *params[::-1]],
            )
            assert_same(outs[:3:-1], alone)

    def test_the_settings_matter(self, alone):
        """Guards the tests above: without its options a request draws something else."""
        with make_engine() as engine:
            prompts, params = seeded_requests()
            plain = [
                SamplingParams(temperature=p.temperature, seed=p.seed, max_new_tokens=40)
                for p in params
            ]
            outs = engine.generate_requests(prompts, plain)
        same = [out.output_ids == each.output_ids for out, each in zip(outs, alone, strict=True)]
        assert same == [False, True, False, False] * 3


class TestCompilation:
    def test_after_warmup_with_the_table_nothing_compiles(self):
        with make_engine(forbid_compile=True) as engine:
            # Prefill, copies, pages out and in, decode without a table and with one of 64 or 128.
            assert engine.warmup(include_table=True) == 4 + 1 + 2
            assert engine.warmup(include_table=True) == 0
            with recorded_programs() as lowered:
                outs = engine.generate_requests(*seeded_requests())
            assert not lowered
            assert all(out.num_cache_misses == 0 for out in outs)

    @pytest.mark.parametrize(
        ("request_of", "match"),
        [
            ({"sampling_params": FULL}, "include_table"),
            ({"return_logprob": True, "logprob_start_len": 0}, "include_score"),
            ({"return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num"),
        ],
    )
    def test_what_was_not_warmed_up_is_refused_and_harms_nobody(self, request_of, match):
        with make_engine(forbid_compile=True) as engine:
            engine.warmup()
            mate = engine.generate(
                input_ids=[7],
                sampling_params={"max_new_tokens": 40, "ignore_eos": True},
                stream=True,
            )
            with pytest.raises(CompileForbiddenError, match=match):
                engine.generate(input_ids=[1], **request_of)
            assert sum(len(piece["output_ids"]) for piece in mate) == 40
            assert engine.get_internal_state().counters.num_failed_steps == 0
