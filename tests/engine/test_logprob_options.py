"""return_logprob, logprob_start_len, top_logprobs_num and token_ids_logprob of `generate`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from sgljax_engine import Engine, EngineStepError, InvalidRequestError
from tests import inside
from tests.engine.interrupts import update_in_flight
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.engine.sampling_reference import forward, log_softmax
from tests.geometry import CHUNKED, SMALL
from tests.threads import LIMIT_S

WEIGHTS = spread_weights()
PROMPT = [5, 9, 33, 2, 60, 9]
ALL_LISTS = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [7, 0, 7]}
OUTPUT_KEYS = (
    "output_token_logprobs",
    "output_processed_logprobs",
    "output_scaled_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)


@pytest.fixture(scope="module")
def engine():
    with Engine(model_config=TINY, weights=WEIGHTS, **SMALL) as engine:
        yield engine


def generate(engine, prompt=PROMPT, fields=None, **arguments):
    params = {"max_new_tokens": 10, "temperature": 0.8, "seed": 4} | (fields or {})
    return engine.generate(input_ids=prompt, sampling_params=params, **arguments)


def raw_logprobs(weights, prompt, out):
    """[T, V]; entry t is about the token after token t of prompt and output."""
    return log_softmax(forward(weights, TINY, [*prompt, *out["output_ids"]]))


def check_lists(meta, side, tokens, raw, top_num, chosen_ids):
    """The lists of one side; `raw` [len(tokens), V], None for a token that has no log-prob."""
    entries = meta[f"{side}_token_logprobs"]
    assert [entry[1:] for entry in entries] == [(token, None) for token in tokens]
    tops = meta.get(f"{side}_top_logprobs", [None] * len(tokens))
    chosen = meta.get(f"{side}_token_ids_logprobs", [None] * len(tokens))
    assert len(tops) == len(chosen) == len(tokens)
    assert (f"{side}_top_logprobs" in meta) == (top_num > 0)
    assert (f"{side}_token_ids_logprobs" in meta) == bool(chosen_ids)
    for token, entry, top, others, row in zip(tokens, entries, tops, chosen, raw, strict=True):
        if row is None:
            assert (entry[0], top, others) == (None, None, None)
            continue
        assert entry[0] == pytest.approx(row[token], abs=1e-4)
        if top_num:
            best = np.argsort(-row)[:top_num]
            assert [(i, text) for _, i, text in top] == [(i, None) for i in best]
            np.testing.assert_allclose([value for value, _, _ in top], row[best], atol=1e-4)
        if chosen_ids:
            assert [i for _, i, _ in others] == chosen_ids
            np.testing.assert_allclose([v for v, _, _ in others], row[chosen_ids], atol=1e-4)


class TestShapes:
    def test_nothing_by_default(self, engine):
        assert not [key for key in generate(engine)["meta_info"] if "logprobs" in key]

    def test_return_logprob_alone(self, engine):
        out = generate(engine, return_logprob=True)
        keys = {key for key in out["meta_info"] if "logprobs" in key}
        assert keys == {
            *("output_token_logprobs", "output_processed_logprobs", "output_scaled_logprobs")
        }
        raw = raw_logprobs(WEIGHTS, PROMPT, out)[len(PROMPT) - 1 : -1]
        check_lists(out["meta_info"], "output", out["output_ids"], raw, 0, [])

    @pytest.mark.parametrize(
        ("top_num", "ids"),
        [
            (0, [127, 0, 127]),
            (9, [5] * 9),
            pytest.param(128, list(range(128)), marks=pytest.mark.soak),
        ],
    )
    def test_lists_match_float64(self, engine, top_num, ids):
        """Also the raw log-probs of adjusted and filtered rows are the model's own."""
        out = generate(
            engine,
            fields={"top_k": 5, "repetition_penalty": 1.5, "logit_bias": {3: 5.0}},
            return_logprob=True,
            top_logprobs_num=top_num,
            token_ids_logprob=ids,
        )
        raw = raw_logprobs(WEIGHTS, PROMPT, out)[len(PROMPT) - 1 : -1]
        check_lists(out["meta_info"], "output", out["output_ids"], raw, top_num, ids)

    @pytest.mark.parametrize("start", [0, 1, 4, 5])
    def test_prompt_from_a_position(self, engine, start):
        out = generate(engine, **ALL_LISTS, logprob_start_len=start)
        raw = [None, *raw_logprobs(WEIGHTS, PROMPT, out)]
        meta, size = out["meta_info"], len(PROMPT)
        check_lists(meta, "input", PROMPT[start:], raw[start:size], 3, [7, 0, 7])
        check_lists(meta, "output", out["output_ids"], raw[size:-1], 3, [7, 0, 7])

    def test_prompt_of_one_token(self, engine):
        out = generate(engine, prompt=[5], **ALL_LISTS, logprob_start_len=0)
        check_lists(out["meta_info"], "input", [5], [None], 3, [7, 0, 7])

    @pytest.mark.parametrize("start", [-1, None])
    def test_no_prompt(self, engine, start):
        meta = generate(engine, **ALL_LISTS, logprob_start_len=start)["meta_info"]
        assert not [key for key in meta if key.startswith("input")]

    def test_each_prompt_its_own(self, engine):
        """Rows that ask for little, much and nothing in one batch."""
        prompts = random_prompts(4, 5, 9, seed=4)
        outs = generate(
            engine,
            prompt=prompts,
            return_logprob=[True, True, False, True],
            logprob_start_len=[2, -1, None, 0],
            top_logprobs_num=[0, 9, None, 1],
            token_ids_logprob=[[1, 2], [], None, [5]],
        )
        settings = [(2, 0, [1, 2]), (-1, 9, []), None, (0, 1, [5])]
        for prompt, out, asked in zip(prompts, outs, settings, strict=True):
            meta = out["meta_info"]
            if asked is None:
                assert not [key for key in meta if "logprobs" in key]
                continue
            start, top_num, ids = asked
            raw = [None, *raw_logprobs(WEIGHTS, prompt, out)]
            size = len(prompt)
            check_lists(meta, "output", out["output_ids"], raw[size:-1], top_num, ids)
            assert ("input_token_logprobs" in meta) == (start >= 0)
            if start >= 0:
                check_lists(meta, "input", prompt[start:], raw[start:size], top_num, ids)

    def test_asking_changes_no_draw(self, engine):
        asked = generate(engine, **ALL_LISTS, logprob_start_len=0)
        assert generate(engine)["output_ids"] == asked["output_ids"]


class TestLengths:
    """No list is ever longer or shorter than the output."""

    def check(self, out):
        for key in OUTPUT_KEYS:
            assert len(out["meta_info"][key]) == len(out["output_ids"]), key
        ids = [entry[1] for entry in out["meta_info"]["output_token_logprobs"]]
        assert ids == out["output_ids"]

    def test_cut_at_a_stop_token(self, engine):
        plain = generate(engine)["output_ids"]
        out = generate(engine, fields={"stop_token_ids": [plain[5]]}, **ALL_LISTS)
        self.check(out)
        assert len(out["output_ids"]) <= 6

    def join(self, pieces, has_input=True):
        """One output of a stream's pieces; each piece's lists fit its own tokens."""
        whole = {"text": "", "output_ids": [], "meta_info": {key: [] for key in OUTPUT_KEYS}}
        for number, piece in enumerate(pieces):
            self.check(piece)
            whole["text"] += piece["text"]
            whole["output_ids"] += piece["output_ids"]
            assert ("input_token_logprobs" in piece["meta_info"]) == (has_input and number == 0)
            for key in OUTPUT_KEYS:
                whole["meta_info"][key] += piece["meta_info"][key]
        return whole

    def test_streamed(self, engine):
        whole = generate(engine, fields={"max_new_tokens": 30}, **ALL_LISTS, logprob_start_len=2)
        stream = generate(
            engine, fields={"max_new_tokens": 30}, **ALL_LISTS, logprob_start_len=2, stream=True
        )
        joined = self.join(stream)
        assert joined["output_ids"] == whole["output_ids"]
        for key in OUTPUT_KEYS:
            assert joined["meta_info"][key] == whole["meta_info"][key]

    def test_resumed_after_a_weight_update(self, engine):
        """Tokens from before the update keep the old weights' log-probs, the rest have the new."""
        new = spread_weights(seed=1)
        started = threading.Event()
        pieces = []

        def follow(stream):
            for piece in stream:
                pieces.append(piece)
                started.set()

        stream = generate(engine, fields={"max_new_tokens": 240}, **ALL_LISTS, stream=True)
        thread = threading.Thread(target=follow, args=(stream,))
        thread.start()
        try:
            assert started.wait(LIMIT_S)
            update_in_flight(engine, new)
            thread.join(LIMIT_S)
        finally:
            engine.update_weights(WEIGHTS)
        out = self.join(pieces, has_input=False)
        self.check(out)
        assert len(out["output_ids"]) == 240
        got = np.array([entry[0] for entry in out["meta_info"]["output_token_logprobs"]])
        ids = out["output_ids"]
        where = np.arange(len(PROMPT) - 1, len(PROMPT) + 239), ids
        old_raw, new_raw = (raw_logprobs(w, PROMPT, out)[where] for w in (WEIGHTS, new))
        is_old, is_new = abs(got - old_raw) < 2e-3, abs(got - new_raw) < 2e-3
        border = int(np.argmin(is_old))
        assert 0 < border < 240, "the update must come in the middle"
        assert is_old[:border].all()
        assert is_new[border:].all()


class TestRefusals:
    CASES = (
        ({"return_logprob": 1}, "return_logprob must be True or False, got 1"),
        ({"top_logprobs_num": 2}, "top_logprobs_num=2.* need return_logprob=True"),
        ({"logprob_start_len": 0}, "logprob_start_len=0.* need return_logprob=True"),
        ({"token_ids_logprob": [1]}, r"token_ids_logprob=\[1\] need return_logprob=True"),
        (
            {"return_logprob": True, "logprob_start_len": 6},
            "logprob_start_len must be below the prompt's 6 tokens, got 6",
        ),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len must be >= -1"),
        ({"return_logprob": True, "top_logprobs_num": 129}, "between 0 and 128, got 129"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "between 0 and 128, got -1"),
        ({"return_logprob": True, "top_logprobs_num": 1.5}, "top_logprobs_num must be an integer"),
        ({"return_logprob": True, "token_ids_logprob": [128]}, r"in \[0, 128\), got 128"),
        ({"return_logprob": True, "token_ids_logprob": [0] * 1025}, "at most 1024 ids, got 1025"),
        ({"return_logprob": True, "token_ids_logprob": 5}, "list of integers"),
        ({"return_logprob": [True, True]}, "return_logprob must be one for all .*1 prompts, got 2"),
        ({"return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob .*got 2"),
    )

    @pytest.mark.parametrize(("arguments", "message"), CASES)
    def test_is_refused(self, engine, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            generate(engine, **arguments)

    def test_score_takes_the_temperatures_of_sampling(self, engine):
        for good in (1, 0.5, np.float32(0.5)):
            assert len(engine.score([[1, 2]], temperature=good)[0]) == 1
        for bad in (0, 0.0, -1.0, True, float("nan"), float("inf"), "1"):
            with pytest.raises(InvalidRequestError, match="temperature"):
                engine.score([[1, 2]], temperature=bad)


class TestScoring:
    def test_samples_of_a_prompt_are_scored_once(self, engine, monkeypatch):
        scorer, calls = inside.runner(engine).scorer, []
        real = scorer.score_prompt
        monkeypatch.setattr(scorer, "score_prompt", lambda r: calls.append(r.rid) or real(r))
        outs = generate(engine, fields={"n": 6}, return_logprob=True, logprob_start_len=0)
        assert len(calls) == 1
        lists = [out["meta_info"]["input_token_logprobs"] for out in outs]
        assert lists == lists[:1] * 6

    def test_a_prompt_that_cannot_be_scored_fails_alone(self, engine, monkeypatch):
        def fail(request):
            raise MemoryError("no room to score")

        monkeypatch.setattr(inside.runner(engine).scorer, "score_prompt", fail)
        mate = generate(engine, stream=True)
        for stream in (False, True):
            with pytest.raises(EngineStepError, match=r"scoring the prompt .*no room to score"):
                list(
                    generate(
                        engine, [1, 2], return_logprob=True, logprob_start_len=0, stream=stream
                    )
                )
        assert sum(len(piece["output_ids"]) for piece in mate) == 10
        state = engine.get_internal_state()
        assert state.counters.num_failed_steps == 0
        assert state.running_batch_size == 0
        engine.check_integrity()

    def test_an_update_before_the_first_token_scores_again(self, monkeypatch):
        """Prompt log-probs are of the weights that the output began with."""
        prompt, other = random_prompts(1, 60, 60)[0], spread_weights(seed=9)
        with Engine(model_config=TINY, weights=WEIGHTS, **CHUNKED) as chunked:
            runner, commands = (
                inside.runner(chunked),
                inside.tasks(chunked),
            )
            updates: list[threading.Thread] = []
            real = runner.prefill

            def prefill(chunks, windows):
                if not updates:  # between the first chunk of the prompt and the second
                    updates.append(threading.Thread(target=chunked.update_weights, args=(other,)))
                    updates[0].start()
                    while commands.empty():
                        time.sleep(0.001)
                real(chunks, windows)

            monkeypatch.setattr(runner, "prefill", prefill)
            out = generate(chunked, prompt, return_logprob=True, logprob_start_len=0)
            updates[0].join(timeout=LIMIT_S)
        expected = log_softmax(forward(other, TINY, prompt))
        got = [entry[0] for entry in out["meta_info"]["input_token_logprobs"][1:]]
        wanted = [expected[index, token] for index, token in enumerate(prompt[1:])]
        assert got == pytest.approx(wanted, abs=1e-4)
