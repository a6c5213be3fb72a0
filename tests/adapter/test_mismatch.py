"""mismatch_report: quiet about rounding, loud about planted faults, and where they are."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import InvalidConfigError, InvalidRequestError
from sgljax_engine.runner import runner as runner_module
from tests import inside, tunix_families
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    MODEL,
    VOCAB_SIZE,
    new_rollout,
    rollout_config,
    text_of,
)
from tests.geometry import SMALL
from tunix_sgljax import MismatchReport, mismatch_report

PROMPTS = ref.make_prompts(VOCAB_SIZE, (9, 7, 5, 16, 11), seed=21)
NUM_TOKENS = 24
ROW = 3  # whose computation is spoilt
BFLOAT16 = {
    **ref.CONFIGS[MODEL],
    "num_layers": 1,
    "dtype": jnp.bfloat16,
    "param_dtype": jnp.bfloat16,
}


def config_of(**changes):
    fields = {"temperature": 0.9, "max_tokens_to_generate": NUM_TOKENS, "seed": 5}
    return rollout_config(**(fields | changes))


@ref.deprecations_ignored()
def report_of(rollout, model, prompts=PROMPTS, batch_size=None, **changes):
    texts = [text_of(ids) for ids in prompts]
    return mismatch_report(
        rollout, model, texts, rollout_config=config_of(**changes), batch_size=batch_size
    )


@pytest.fixture(scope="module")
def shared(model):
    """A rollout with bad token ids, so that no pad id is sampled."""
    made = new_rollout(model, sampling_params={"bad_token_ids": [ref.PAD_ID]})
    yield made
    made.close()


@pytest.fixture
def sound(shared):
    """The same with nothing in its cache; what a test breaks in it, it mends."""
    shared.engine.flush_cache()
    yield shared
    shared.engine.check_integrity()


@pytest.fixture
def runner(sound):
    """The runner of that rollout, for `monkeypatch` to break."""
    return inside.runner(sound.engine)


def request_of(requests):
    """The request of the row to spoil, among those of a dispatch."""
    wanted = PROMPTS[ROW].tolist()
    return next((r for r in requests if list(r.prompt_ids) == wanted), None)


def corrupted(kv, page):
    """Pages with other values in one of them, in the first layer."""
    first, *others = kv.layers
    return kv._replace(layers=(first._replace(v=first.v.at[page].add(0.5)), *others))


# ------------------------------------------------------------------ sound rollouts


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="sampled"),
        pytest.param({"temperature": 1.0, "top_k": 9, "top_p": 0.9}, id="filtered"),
    ],
)
def test_a_sound_rollout_is_within_the_tolerance(sound, model, sampling):
    report = report_of(sound, model, **sampling)
    assert report.is_within()
    assert report.rows_off() == {}
    assert report.overall.num_tokens == len(PROMPTS) * NUM_TOKENS
    assert (report.dtype, report.default_tolerance) == ("float32", 1e-4)
    assert not report.is_within(0.0)  # rounding is seen


@pytest.mark.slow
def test_bfloat16():
    model = ref.make_tunix_qwen3(BFLOAT16)
    rollout = new_rollout(model)
    report = report_of(rollout, model)
    rollout.close()
    assert report.dtype == "bfloat16"
    assert report.is_within(), str(report)
    assert report.overall.max_abs > 1e-3  # the tolerance is the other dtype's for a reason
    assert not report.is_within(1e-4)


def test_keys_of_8_bits_are_named(make_rollout, model):
    rollout = make_rollout(kv_cache_dtype="int8", config={"temperature": 0.9})
    report = report_of(rollout, model)
    assert (report.dtype, report.kv_dtype) == ("float32", "int8")
    assert report.to_dict()["kv_dtype"] == "int8"
    assert "float32 with keys and values in int8, logprobs_mode" in str(report)
    assert report.is_within(), str(report)
    assert not report.is_within(1e-4)


@pytest.mark.parametrize("batch_size", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rollout_that_matches_differs_by_nothing(make_rollout, model, other_model, batch_size):
    rollout = make_rollout(
        logprobs_mode="trainer_match", match_batch_size=batch_size, config={"temperature": 0.9}
    )
    report = report_of(rollout, model, batch_size=batch_size)
    assert report.overall.max_abs == 0.0
    assert report.is_within(0.0)
    assert set(report_of(rollout, other_model).rows_off()) == set(range(len(PROMPTS)))


def test_sequences_outside_the_bounds_of_a_mask_are_counted():
    means = np.array([0.0, 0.0015, 0.0025, -0.0005, -0.0011])
    spread = np.array([0.3, -0.3, 0.1, -0.1, 9.0])  # the last token is not compared
    is_compared = np.arange(5)[None] < np.full((5, 1), 4)
    sampler = np.full((5, 5), -2.0, np.float32)
    report = MismatchReport(
        tokens=np.ones((5, 5), np.int32),
        sampler=np.where(is_compared, sampler, 0),
        trainer=np.where(is_compared, sampler + means[:, None] + spread, 0).astype(np.float32),
        is_compared=is_compared,
        weight_versions=(0,),
        dtype="bfloat16",
        logprobs_mode="trainer_logprobs",
        temperature=1.0,
        pad_rows=(),
    )
    np.testing.assert_allclose(report.sequence_ratios, np.exp(means), rtol=1e-6)
    assert report.share_outside() == pytest.approx(2 / 5)
    assert report.share_outside(0.9, 1.1) == 0
    assert "0.998901 to 1.002503, 40.0% outside [0.999, 1.002]" in str(report)
    assert report.to_dict()["share_outside"] == report.share_outside()


# ------------------------------------------------------------------ planted faults


def test_a_corrupt_page_between_prefill_and_decode_is_found(sound, runner, model, monkeypatch):
    prefill, kv_memory = runner.prefill, runner.kv_memory

    def faulty(chunks, windows):
        prefill(chunks, windows)
        for chunk in chunks:
            if request_of([chunk.request]) and chunk.start == 0:
                kv_memory.kv = corrupted(kv_memory.kv, chunk.pages[1])

    monkeypatch.setattr(runner, "prefill", faulty)
    report = report_of(sound, model)
    assert report.rows_off() == {ROW: 0}
    assert report.worst.row == ROW


@pytest.mark.parametrize("earliest", [1, 10])
def test_a_page_that_goes_bad_later_is_found_there(sound, runner, model, earliest, monkeypatch):
    """In front of the first dispatch that begins behind so many tokens."""
    decode, kv_memory, positions = runner.decode, runner.kv_memory, []

    def faulty(output):
        request = request_of(output.decode)
        if request and len(request.output_ids) >= earliest and not positions:
            positions.append(len(request.output_ids))
            kv_memory.kv = corrupted(kv_memory.kv, request.pages[0])
        return decode(output)

    monkeypatch.setattr(runner, "decode", faulty)
    report = report_of(sound, model)
    (position,) = positions
    assert report.rows_off() == {ROW: position}
    assert (report.difference[ROW, :position] < 1e-4).all()


def test_a_corrupt_norm_scale_is_found_everywhere(sound, runner, model, monkeypatch):
    name = "model.layers.1.input_layernorm.weight"
    corrupt = {name: runner.weights[name].at[7].multiply(1.1)}
    monkeypatch.setattr(runner, "weights", {**runner.weights, **corrupt})
    report = report_of(sound, model)
    assert set(report.rows_off()) == set(range(len(PROMPTS)))
    assert max(report.rows_off().values()) <= 1
    assert report.overall.k3 > 0


def test_one_token_at_a_wrong_position_is_found(sound, model, monkeypatch):
    make = runner_module.build_prefill_batches
    at, size = 6, SMALL["page_size"]

    def faulty(chunks, **options):
        slots = [
            chunk.pages[at // size] * size + at % size
            for chunk in chunks
            if request_of([chunk.request]) and chunk.start <= at < chunk.start + chunk.num_tokens
        ]
        return [
            batch._replace(
                positions=batch.positions + np.isin(batch.slot_mapping, slots).astype(np.int32)
            )
            for batch in make(chunks, **options)
        ]

    monkeypatch.setattr(runner_module, "build_prefill_batches", faulty)
    report = report_of(sound, model)
    assert report.rows_off() == {ROW: 0}


def test_a_missed_update_is_found(sound, other_model):
    report = report_of(sound, other_model)
    assert report.rows_off() == dict.fromkeys(range(len(PROMPTS)), 0)
    assert not report.is_within()
    assert "BEYOND" in str(report)
    assert report.padding is None


@pytest.mark.slow
def test_padding_that_enters_the_trainers_result_is_told():
    """The sliding window of Tunix's Gemma 2 counts padding."""
    model = tunix_families.make("gemma2")
    rollout = new_rollout(model, sampling_params={"bad_token_ids": [ref.PAD_ID]})
    prompts = [
        np.resize(ids % 95 + 1, size) for ids, size in zip(PROMPTS, (16, 9, 5), strict=False)
    ]
    report = report_of(rollout, model, prompts)
    rollout.close()
    assert report.padding is not None
    row, with_padding, without, fault = report.padding
    assert row in (1, 2)
    assert without < report.default_tolerance < with_padding == report.difference[row].max()
    assert fault == ""
    assert f"row {row}: off by" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["padding"]["row"] == row


# ------------------------------------------------------------------ the report


def handmade(difference, is_compared=None, **changes):
    trainer = np.full(np.shape(difference), -1.0, np.float32)
    compared = np.ones(trainer.shape, bool) if is_compared is None else is_compared
    fields = {
        "tokens": np.arange(trainer.size, dtype=np.int32).reshape(trainer.shape),
        "sampler": trainer + np.asarray(difference, np.float32),
        "trainer": trainer,
        "is_compared": compared,
        "weight_versions": (0, 2),
        "dtype": "float32",
        "logprobs_mode": "trainer_logprobs",
        "temperature": 1.0,
        "pad_rows": (),
    }
    return MismatchReport(**(fields | changes))


def test_statistics():
    gaps = np.array([[0.0, 0.5, 0.0], [-0.25, 0.0, 9.0]])
    compared = np.array([[True, True, True], [True, True, False]])
    report = handmade(gaps, compared)
    all_tokens, kept = report.overall, gaps[compared]
    assert all_tokens.num_tokens == 5
    assert all_tokens.max_abs == 0.5
    assert all_tokens.mean_abs == pytest.approx(0.15)
    assert all_tokens.k1 == pytest.approx(kept.mean())
    assert all_tokens.k3 == pytest.approx((np.exp(-kept) - 1 + kept).mean())
    assert all_tokens.ratio_quantiles[[0, 2, 4]] == pytest.approx([np.exp(-0.5), 1, np.exp(0.25)])
    assert report.worst == (0, 1, 1, -0.5, -1.0)
    assert report.rows_off() == {0: 1, 1: 0}
    assert report.rows_off(0.3) == {0: 1}
    assert report.is_within(0.5)


def test_nothing_that_is_no_number_is_within():
    report = handmade([[0.0, np.nan], [0.0, 0.0]])
    assert not report.is_within(1e9)
    assert report.rows_off(1e9) == {0: 1}
    assert report.worst[:2] == (0, 1)


def test_pad_ids_are_left_out_and_told(make_rollout, model):
    rollout = make_rollout(sampling_params={"logit_bias": {ref.PAD_ID: 6.0}})
    report = report_of(rollout, model)
    assert report.pad_rows
    assert not report.is_compared[report.tokens == ref.PAD_ID].any()
    # What comes before the first one is sound in any case.
    for row, position in report.rows_off().items():
        assert row in report.pad_rows
        assert position > int((report.tokens[row] == ref.PAD_ID).argmax())
    assert "pad id sampled" in str(report)


def test_forms():
    rng = np.random.default_rng(0)
    gaps = rng.normal(0, 1e-6, (150, 200))
    gaps[7, 30:] = 1e-2
    report = handmade(gaps)
    text = str(report)
    assert "30000 tokens of 150 rows" in text
    assert "row 7 from position 30" in text
    assert "weight versions 0, 2" in text
    content = json.loads(json.dumps(report.to_dict()))
    assert content["rows_off"] == {"7": 30}


def test_an_empty_report_can_be_shown():
    report = handmade(np.zeros((2, 3)), np.zeros((2, 3), bool))
    assert report.is_within()
    assert "0 tokens" in str(report)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("mode", "extra", "sampling", "match"),
    [
        ("raw_logprobs", {}, {"temperature": 0.9}, r"raw_logprobs.*temperature=0\.9"),
        ("processed_logprobs", {}, {"temperature": 0.0}, r"processed_logprobs.*temperature=0"),
        ("processed_logprobs", {}, {"top_k": 5}, r"processed_logprobs.*top_k=5"),
        ("processed_logprobs", {}, {"top_p": 0.5}, r"processed_logprobs.*top_p=0\.5"),
        ("processed_logprobs", {"min_p": 0.1}, {}, r"processed_logprobs.*min_p=0\.1"),
        ("processed_logprobs", {"presence_penalty": 0.1}, {}, r"processed.*penalised"),
    ],
)
def test_what_no_trainer_computes_is_refused(make_rollout, model, mode, extra, sampling, match):
    rollout = make_rollout(logprobs_mode=mode, sampling_params=extra)
    with pytest.raises(InvalidConfigError, match=match):
        report_of(rollout, model, **sampling)


@pytest.mark.parametrize(
    ("mode", "temperature"),
    [("raw_logprobs", 1.0), pytest.param("processed_logprobs", 0.7, marks=pytest.mark.slow)],
)
def test_what_is_the_same_is_compared(make_rollout, model, mode, temperature):
    rollout = make_rollout(logprobs_mode=mode)
    report = report_of(rollout, model, PROMPTS[:2], temperature=temperature)
    first_pads = (report.tokens == ref.PAD_ID).argmax(axis=1)
    assert set(report.rows_off()) <= set(np.flatnonzero(first_pads).tolist())
    assert report.logprobs_mode == mode


def test_bad_batch_sizes_are_refused(make_rollout, model):
    with pytest.raises(InvalidRequestError, match=r"batch_size.*got 0"):
        report_of(make_rollout(), model, batch_size=0)
