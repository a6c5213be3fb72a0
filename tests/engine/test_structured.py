"""Structured output: texts of random grammars, under interruptions, against jsonschema and re.

llguidance's own reading of the tokenizer, which the engine does not use, says of each token whether
it was allowed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import random
import threading
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import pytest
from transformers import AutoTokenizer

from sgljax_engine import Engine, InvalidRequestError, SamplingParams, StructuredOutputError
from sgljax_engine.errors import CompileForbiddenError
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.guides import Guides
from sgljax_engine.processing.vocabulary import grammar_of
from sgljax_engine.structured_outputs import checked_outputs
from tests.adapter.helpers import EndingTokenizer
from tests.devices import run_python
from tests.engine import models, small_tokenizers
from tests.engine.grammar_cases import GrammarCase, random_case
from tests.engine.interrupts import interrupt
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import RETRACTING, SMALL
from tests.threads import LIMIT_S, start

EOS = (1, 4)
FOLDER = GOLDEN / "qwen3_gqa_tied"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
MODEL = dataclasses.replace(models.TINY, vocab_size=320, eos_token_ids=EOS)
"""With random weights: only the grammar makes sense of what it says."""

NUM_CLIENTS = 6
NUM_WEIGHTS = 3
MAX_TOKENS = 72
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def weights(seed: int) -> dict[str, Any]:
    return models.spread_weights(MODEL, seed)


def make(**options: Any) -> Engine:
    given = {"model_config": MODEL, "weights": weights(0), "tokenizer": TOKENIZER, **SMALL}
    return Engine(**{**given, **options})


@pytest.fixture(scope="module")
def engine():
    with make() as engine:
        yield engine


class Judge:
    """Says whether an output follows its grammar."""

    def __init__(self) -> None:
        self._tokens = llguidance.hf.from_tokenizer(TOKENIZER, eos_token=list(EOS))

    def allowed(self, case: GrammarCase, ids: list[int]) -> list[set[int]]:
        """The tokens that are allowed at each place; fails at one that is not."""
        grammar = grammar_of(checked_outputs(case.outputs) or {})
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        sets = []
        for token in ids:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            sets.append(set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()))
            assert token in sets[-1], (case, ids)
            assert matcher.consume_token(token)
        return sets

    def check(self, case: GrammarCase, out: dict[str, Any]) -> None:
        """Fails unless each token was allowed, and a finished text is one of the grammar's."""
        self.allowed(case, out["output_ids"])
        if out["meta_info"]["finish_reason"]["type"] == "stop":
            case.check(TOKENIZER.decode([t for t in out["output_ids"] if t not in EOS]))
        else:
            assert len(out["output_ids"]) == MAX_TOKENS


class Interrupted:
    """Clients that ask for structured outputs, and a thread that interrupts them."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.engine, self.left = engine, collections.deque(range(count))
        self.outputs: list[tuple[GrammarCase, dict[str, Any]]] = []
        self.changed = threading.Condition()
        self.num_pieces = self.num_running = 0
        self.operations: collections.Counter[str] = collections.Counter()

    def client(self) -> None:
        """Asks for one after another; half of them stream."""
        while True:
            try:
                number = self.left.popleft()
            except IndexError:
                break
            case = random_case(number)
            params = {
                "temperature": (0.0, 0.8, 1.5)[number % 3],
                "max_new_tokens": MAX_TOKENS,
                "seed": number,
                "structured_outputs": case.outputs,
            }
            prompt = f"{number % 7} cases of {number}"
            ids: list[int] = []
            meta: dict[str, Any] = {}
            for piece in self.engine.generate(prompt, params, stream=True):
                ids += piece["output_ids"]
                meta = piece["meta_info"]
                with self.changed:
                    self.num_pieces += 1
                    self.changed.notify_all()
            with self.changed:
                self.outputs.append((case, {"output_ids": ids, "meta_info": meta}))
        with self.changed:
            self.num_running -= 1
            self.changed.notify_all()

    def interrupt(self) -> None:
        """Pauses, retracts, updates, sleeps, flushes."""
        rng = random.Random(3)
        while self.wait_for_pieces(rng.randint(2, 15)):
            name = rng.choice(("pause", "update", "sleep", "flush"))
            self.operations[name] += 1
            if name == "update":
                self.engine.update_weights(weights(rng.randrange(NUM_WEIGHTS)), mode="retract")
            else:
                interrupt(self.engine, name, rng)

    def wait_for_pieces(self, count: int) -> bool:
        """Waits until streams have gone on; False when they are over."""
        with self.changed:
            goal = self.num_pieces + count
            reached = self.changed.wait_for(
                lambda: self.num_pieces >= goal or not self.num_running, LIMIT_S
            )
            assert reached, "nothing goes on"
            return self.num_running > 0

    def run(self) -> None:
        """Runs all threads to their end."""
        self.num_running = NUM_CLIENTS
        threads = [start(self.client) for _ in range(NUM_CLIENTS)]
        threads.append(start(self.interrupt))
        for thread in threads:
            thread.result(4 * LIMIT_S)
        self.engine.check_integrity()


def test_a_wrong_token_is_found(engine):
    """The judge can fail: for tokens of another grammar, and a text that ends too early."""
    digits, letters = GrammarCase("regex", "[0-9]{4}"), GrammarCase("regex", "[a-z]{4}")
    params = {"max_new_tokens": MAX_TOKENS, "structured_outputs": digits.outputs}
    out = engine.generate("hello", params)
    Judge().check(digits, out)
    with pytest.raises(AssertionError):
        Judge().check(letters, out)
    with pytest.raises(AssertionError):
        Judge().check(digits, out | {"output_ids": [*out["output_ids"][:-2], EOS[0]]})


# ------------------------------------------------------------------ tokens and log-probs


CASES = [random_case(seed) for seed in range(8)]
SETTINGS = [
    {
        "seed": index,
        "max_new_tokens": 40,
        "temperature": 1.2,
        "structured_outputs": case.outputs,
        "return_sampling_mask": True,
    }
    for index, case in enumerate(CASES)
]


def generate(engine: Engine, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompts = [f"case {index}" for index in range(len(settings))]
    return engine.generate(prompts, settings, return_logprob=True)


@pytest.fixture(scope="module")
def expected(engine):
    return generate(engine, SETTINGS)


def test_a_token_is_drawn_from_what_is_allowed(expected):
    """The sampling mask is the grammar's; the vocabulary is smaller than a mask."""
    judge = Judge()
    for case, out in zip(CASES, expected, strict=True):
        masks = out["meta_info"]["output_token_sampling_mask"]
        assert list(map(set, masks)) == judge.allowed(case, out["output_ids"])


@pytest.mark.parametrize("options", [{"speculation": "always"}, {**RETRACTING}])
def test_neither_drafts_nor_retractions_change_a_token(expected, options):
    with make(**options) as other:
        found = generate(other, SETTINGS)
        assert [out["output_ids"] for out in found] == [out["output_ids"] for out in expected]
        if "speculation" in options:
            counters = other.get_internal_state().counters
            assert counters.num_accepted_siblings > 10, "what a grammar forces is drafted"


def test_neighbours_keep_their_bits(engine):
    free = [{"seed": n, "max_new_tokens": 30, "ignore_eos": True} for n in range(4)]
    alone = generate(engine, free)
    mixed = generate(engine, [*free, *SETTINGS[:4]])[:4]
    for before, after in zip(alone, mixed, strict=True):
        assert before["output_ids"] == after["output_ids"]
        name = "output_processed_logprobs"
        assert before["meta_info"][name] == after["meta_info"][name]


def test_samples_and_other_settings(engine):
    """n samples are guided each for itself; biases and penalties count as without a grammar."""
    params = {
        "n": 6,
        "seed": 5,
        "max_new_tokens": MAX_TOKENS,
        "structured_outputs": {"regex": "[ab]{6}"},
        "logit_bias": {TOKENIZER.encode("b")[0]: -100.0},
        "repetition_penalty": 1.1,
    }
    texts = [out["text"] for out in engine.generate("x", params)]
    assert texts == ["a" * 6] * 6
    params |= {"logit_bias": None, "structured_outputs": {"choice": ["one", "two", "three"]}}
    assert len({out["text"] for out in engine.generate("x", params)}) > 1


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_grammar(expected, tmp_path):
    """Its guides are made anew from the tokens so far."""
    rids = [f"r{number}" for number in range(len(SETTINGS))]
    with make() as first:
        streams = [
            first.generate(f"case {n}", params, rid=rid, stream=True)
            for n, (rid, params) in enumerate(zip(rids, SETTINGS, strict=True))
        ]
        pieces = [next(stream) for stream in streams]
        first.save_checkpoint(tmp_path)
    assert any(not piece["meta_info"]["finish_reason"] for piece in pieces)
    with make() as second:
        futures = second.restore_checkpoint(tmp_path)
        for rid, before in zip(rids, expected, strict=True):
            if rid in futures:
                assert futures[rid].result(LIMIT_S).output_ids == before["output_ids"]
        assert len(futures) > 2


# ------------------------------------------------------------------ thoughts


TAGS = ("<think>", "</think>")
OPEN, CLOSE = (TOKENIZER.encode(tag, add_special_tokens=False) for tag in TAGS)


def parts_of(ids: list[int]) -> tuple[list[int], str]:
    """The tokens of thoughts and the text behind them."""
    text = TOKENIZER.decode(ids)
    assert TAGS[1] in text
    thoughts, _, answer = text.partition(TAGS[1])
    del thoughts
    size = next(n for n in range(len(ids) + 1) if TAGS[1] in TOKENIZER.decode(ids[:n]))
    return ids[: size - len(CLOSE)], answer


class TestGrammars:
    @pytest.mark.parametrize(
        ("count", "speculation"),
        [
            (60, "off"),
            pytest.param(60, "always", marks=pytest.mark.slow),
            pytest.param(5_000, "off", marks=pytest.mark.soak),
            pytest.param(5_000, "always", marks=pytest.mark.soak),
        ],
    )
    def test_outputs_follow_their_grammars(self, count, speculation, record_property):
        with make(**RETRACTING, speculation=speculation) as engine:
            run = Interrupted(engine, count)
            run.run()
        judge, kinds = Judge(), collections.Counter()
        for case, out in run.outputs:
            judge.check(case, out)
            kinds[case.kind, out["meta_info"]["finish_reason"]["type"]] += 1
        assert len(run.outputs) == count
        finished = sum(n for (_, reason), n in kinds.items() if reason == "stop")
        assert finished > count / 2
        record_property("soak", f"{speculation}: {finished} of {count}, {dict(run.operations)}")

    @pytest.mark.parametrize("most", [0, 1, 5, 12])
    @pytest.mark.parametrize("outputs", [None, {"json": SCHEMA}])
    def test_thoughts_are_bounded(self, engine, most, outputs):
        """The prompt opened them."""
        params = {
            "max_new_tokens": MAX_TOKENS,
            "n": 4,
            "seed": 11,
            "reasoning_tags": ("", TAGS[1]),
            "max_thinking_tokens": most,
            "structured_outputs": outputs,
            "skip_special_tokens": False,
            "bad_token_ids": () if outputs else EOS,
        }
        for out in engine.generate("<think>", params):
            thoughts, answer = parts_of(out["output_ids"])
            assert len(thoughts) <= most
            if outputs and out["meta_info"]["finish_reason"]["type"] == "stop":
                GrammarCase("json", SCHEMA).check(answer.partition("<|")[0].strip())


@pytest.mark.parametrize(
    "tokenizer", [TOKENIZER, small_tokenizers.sentencepiece(), small_tokenizers.byte_level()]
)
@pytest.mark.parametrize("thoughts", ["ab", "a < b", "a </thin b", ""])
def test_marks_in_whatever_tokens(tokenizer, thoughts):
    """A tokenizer may cut a mark to pieces, join it with others, and put a space before it."""
    wrapped = wrap_tokenizer(tokenizer)
    size = 320
    guides = Guides(wrapped, size, (), 0)

    def allowed(text: str, **more: Any) -> set[int]:
        params = SamplingParams(structured_outputs={"regex": "[ab]{2,9}"}, **more)
        guide = guides.make(params, (size - 1,), None, wrapped.encode_rendered(text))
        bits = np.unpackbits(guide.allowed.words[0].view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    expected, free = allowed(""), set(range(size - 1))
    assert allowed(f"<think>{thoughts}", reasoning_tags=TAGS) == free
    assert allowed(thoughts, reasoning_tags=("", TAGS[1])) == free
    assert allowed(f"<think>{thoughts}</think>", reasoning_tags=TAGS) == expected
    assert allowed(f"{thoughts}</think>", reasoning_tags=("", TAGS[1])) == expected
    for most in (0, 3):
        options = {"reasoning_tags": ("", TAGS[1]), "max_thinking_tokens": most}
        ids = wrapped.encode_rendered("bbbabab")[:most]
        guide = guides.make(SamplingParams(**options), (size - 1,), None, ids)
        for _ in range(20):
            if guide.is_over:
                break
            words = np.unpackbits(guide.allowed.words[0].view(np.uint8), bitorder="little")
            (token,) = np.flatnonzero(words).tolist()
            ids = [*ids, token]
            guide.advance(ids)
        assert guide.is_over
        assert b"".join(wrapped.token_bytes(t) or b"" for t in ids).endswith(b"</think>")


def test_an_output_may_begin_with_thoughts_or_without(engine):
    """A grammar holds behind thoughts, and at once where there are none."""
    params = {
        "max_new_tokens": MAX_TOKENS,
        "n": 8,
        "seed": 2,
        "structured_outputs": {"regex": "[0-9]{3}"},
        "reasoning_tags": TAGS,
        "max_thinking_tokens": 6,
    }
    for bias, has_thoughts in ((100.0, True), (-100.0, False)):
        params["logit_bias"] = {OPEN[0]: bias}
        if len(OPEN) > 1 and has_thoughts:
            params["logit_bias"] |= dict.fromkeys(OPEN, 100.0)
        for out in engine.generate("x", params):
            text = TOKENIZER.decode([t for t in out["output_ids"] if t not in EOS])
            assert text.startswith(TAGS[0]) == has_thoughts
            GrammarCase("regex", "[0-9]{3}").check(text.rpartition(TAGS[1])[2])


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"regex": "a(b"}, "does not compile: .*unclosed group"),
        ({"regex": "a(?=b)"}, "does not compile: .*look-around"),
        ({"json": {"type": "foo"}}, "does not compile: Invalid type: foo"),
        ({"json": {"not": {"type": "string"}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "does not compile"),
        ({"json": {"enum": []}}, "does not compile"),
        ({"json": "{"}, r"structured_outputs\['json'\] must be JSON, got '{'"),
        ({"json": [1]}, r"structured_outputs\['json'\] must be a JSON Schema, a dict, got \[1\]"),
        ({"json": {"a": {1, 2}}}, r"structured_outputs\['json'\] must hold what JSON can"),
        ({"grammar": "start: nobody"}, "does not compile: .*unknown name"),
        ({"grammar": "root ::= ("}, r"structured_outputs\[.grammar.\] is not GBNF: Expected"),
        ({"choice": []}, r"structured_outputs\['choice'\] must be a list of 1 to 1024 texts"),
        ({"choice": [""]}, r"structured_outputs\['choice'\] must be a text, got ''"),
        ({"regex": "a" * 300_000}, "at most 262144 characters, got 300000"),
        ({"json_object": 1}, r"structured_outputs\['json_object'\] must be True or False, got 1"),
        ({"json": None}, r"must have one of json, json_object, regex, choice, grammar, got \[\]"),
        ({"regex": "a", "choice": ["b"]}, r"must have one of .*, got \['regex', 'choice'\]"),
        ({"regexp": "a"}, "unknown structured_outputs 'regexp'.*regex"),
        ({"structural_tag": "x", "regex": "a"}, "structural_tag"),
        ({"regex": "a\ud83d"}, r"\['regex'\] must be text without lone surrogates, .* position 1"),
        ({"choice": ["\ud83d"]}, r"\['choice'\] must be text without lone surrogates"),
        ({"json": {"const": "\ud83d"}}, r"\['json'\] must be text without lone surrogates"),
        ({"grammar": 'start: "\ud83d"'}, r"\['grammar'\] must be text without lone surrogates"),
        ("a", "structured_outputs must be a dict"),
    ],
)
def test_what_is_no_grammar_is_refused_at_once(engine, outputs, message):
    before = engine.get_internal_state().counters.num_requests
    with pytest.raises(InvalidRequestError, match=f"(?s){message}"):
        engine.generate("x", {"structured_outputs": outputs})
    assert engine.get_internal_state().counters.num_requests == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ignore_eos": True}, "ends with a stop token, and the request has none"),
        ({"min_new_tokens": 3}, "min_new_tokens=3 goes without structured_outputs"),
        ({"allowed_token_ids": (9,)}, "no token is allowed after 0 output tokens"),
        ({"max_thinking_tokens": 4}, "max_thinking_tokens=4 needs reasoning_tags"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens must be >= 0, got -1"),
        ({"regex": "a"}, "structured_outputs must be given once"),
    ],
)
def test_what_contradicts_a_grammar_is_refused(engine, more, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate("x", {"structured_outputs": {"choice": ["yes"]}, **more})


def test_a_grammar_that_comes_to_an_end_without_a_token_fails_alone(engine):
    """What else is allowed may run out later."""
    token = TOKENIZER.encode("a")[0]
    params = {"structured_outputs": {"regex": "aab"}, "allowed_token_ids": (token,)}
    with pytest.raises(StructuredOutputError, match="no token is allowed after 2 output tokens"):
        engine.generate("x", params)
    assert engine.generate("x", {"max_new_tokens": 2})["output_ids"]
    engine.check_integrity()


def test_names_of_others_are_understood():
    named = [
        ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_decoding": {"choice": ["a"]}}, {"choice": ["a"]}),
    ]
    for fields, outputs in named:
        assert SamplingParams.from_dict(fields).structured_outputs == outputs
    tags = {"reasoning_tags": TAGS}
    given = SamplingParams.from_dict({"thinking_token_budget": 7, **tags})
    assert given.max_thinking_tokens == 7


def test_gbnf(engine):
    grammar = 'root ::= "x" digit+ "y"\ndigit ::= [0-9]'
    out = engine.generate("x", {"structured_outputs": {"grammar": grammar}, "max_new_tokens": 60})
    assert out["text"][0] == "x"
    assert out["text"][1].isdigit()


def test_without_a_tokenizer():
    params = {"structured_outputs": {"regex": "a"}}
    with (
        Engine(model_config=models.TINY, weights=models.spread_weights(), **SMALL) as engine,
        pytest.raises(InvalidRequestError, match="needs a tokenizer, and the engine has none"),
    ):
        engine.generate(input_ids=[1], sampling_params=params)


def test_a_vocabulary_that_cannot_be_mapped():
    with make(tokenizer=EndingTokenizer(eos=1)) as engine:
        with pytest.raises(InvalidRequestError, match="TunixTokenizer does not"):
            engine.generate("1", {"structured_outputs": {"regex": "a"}})
        assert engine.generate("1", {"max_new_tokens": 2})["output_ids"]


def test_a_grammar_compiles_beside_the_event_loop(engine, monkeypatch):
    """It may take a second."""
    used: list[threading.Thread] = []
    make_guide = Guides.make

    def watched(*args: Any) -> Any:
        used.append(threading.current_thread())
        return make_guide(*args)

    monkeypatch.setattr(Guides, "make", watched)

    async def ask(params: dict[str, Any]) -> str:
        return (await engine.async_generate("x", params))["text"]

    for name, value in ({"regex": "[0-9]{5}"} | {"structured_outputs": {"choice": ["1"]}}).items():
        assert asyncio.run(ask({name: value})).isdigit()
        assert used.pop() is not threading.main_thread()


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_more():
    with make(forbid_compile=True) as engine:
        engine.warmup()
        params = {"structured_outputs": {"regex": "[a-z]{5}"}, "max_new_tokens": 20}
        with pytest.raises(CompileForbiddenError, match=r"warmup\(include_grammars=True"):
            engine.generate("x", params)
        engine.warmup(include_grammars=True)
        assert engine.generate("x", params)["text"]


_ON_DEVICES = """
from tests.engine import test_structured as tests
with tests.make(**{"tp_size": 2, "data_parallel_size": 2}) as engine:
    outs = engine.generate(
        [f"case {n}" for n in range(40)],
        [{"structured_outputs": tests.random_case(n).outputs, "max_new_tokens": 72, "seed": n}
         for n in range(40)],
    )
judge = tests.Judge()
for number, out in enumerate(outs):
    judge.check(tests.random_case(number), out)
print(sum(out["meta_info"]["finish_reason"]["type"] == "stop" for out in outs))
"""


@pytest.mark.slow
def test_groups_and_tensor_parallelism():
    assert int(run_python("-c", _ON_DEVICES, num_devices=4).stdout.split()[-1]) > 20
