"""`generate` on a small model: where prompts come from, what is written where, what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from typing import Any

import pytest

from sgljax_engine import Engine, InvalidRequestError, SamplingParams
from tests.cli import engine_words
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL
from tunix_sgljax.cli.main import main
from tunix_sgljax.cli.prompts import read_prompts

MODEL = GOLDEN / "qwen3_gqa_tied"
GREEDY = ["--temperature", "0", "--max-new-tokens", "6"]


def generate(*argv: Any) -> int:
    engine = engine_words.words()
    return main(["generate", "--model", str(MODEL), *engine, *map(str, argv)])


@pytest.fixture(scope="module")
def expected():
    """Greedy outputs of the engine itself, by prompt."""
    prompts = ["the quick", "over the lazy dog"]
    with Engine(MODEL, **SMALL) as engine:
        params = SamplingParams(temperature=0, max_new_tokens=6)
        outputs = engine.generate(prompts, params, return_logprob=True)
        ids = engine.apply_chat_template([{"role": "user", "content": prompts[0]}])
        alone = dataclasses.replace(params, decode_behind_prompt=False)
        chat = engine.generate(input_ids=ids, sampling_params=alone)
    return dict(zip(prompts, outputs, strict=True)) | {"chat": chat}


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_prompt_is_streamed_to_stdout(expected, capsys):
    assert generate("the quick", *GREEDY) == 0
    output = capsys.readouterr()
    assert output.out == expected["the quick"]["text"] + "\n"
    assert "1 answer(s), 6 tokens in" in output.err
    assert "time to first token" in output.err


def test_several_prompts_from_stdin(expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick\n\nover the lazy dog\n"))
    assert generate(*GREEDY, "--quiet") == 0
    output = capsys.readouterr()
    texts = [expected["the quick"]["text"], expected["over the lazy dog"]["text"]]
    assert output.out == f"=== 1/2\n{texts[0]}\n=== 2/2\n{texts[1]}\n"
    assert output.err == ""


def test_jsonl(expected, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "the quick", "id": "a"},
        {"messages": [{"role": "user", "content": "the quick"}]},
        {"prompt": "over the lazy dog", "sampling_params": {"max_new_tokens": 3, "n": 2}},
        {"input_ids": [5] * 600},
        {"prompt": "x", "sampling_params": {"temprature": 0}},
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    argv = ["--input", source, "--output", target, "--keep-order", "--top-logprobs", "2"]
    assert generate(*argv, *GREEDY) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "2 refused" in output.err
    rows = rows_of(target)
    assert [row["index"] for row in rows] == [0, 1, 2, 2, 3, 4]
    first, chat, *samples = rows[:4]
    wanted = expected["the quick"]
    assert (first["id"], first["text"]) == ("a", wanted["text"])
    assert first["output_ids"] == wanted["output_ids"]
    assert first["finish_reason"] == {"type": "length", "length": 6}
    logprobs = [entry[0] for entry in wanted["meta_info"]["output_token_logprobs"]]
    assert first["logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert first["top_logprobs"][0][0][0] == first["output_ids"][0]
    assert len(first["top_logprobs"][0]) == 2
    assert chat["output_ids"] == expected["chat"]["output_ids"]
    assert [row["sample"] for row in samples] == [0, 1]
    for row in samples:
        assert row["output_ids"] == expected["over the lazy dog"]["output_ids"][:3]
    assert "600" in rows[4]["error"]
    assert "did you mean 'temperature'?" in rows[5]["error"]


def test_chat(expected, capsys):
    assert generate("the quick", *GREEDY, "--chat", "--stop", "never", "--seed", 3) == 0
    assert capsys.readouterr().out == expected["chat"]["text"] + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--engine", "page_sise=4"], "unknown engine option 'page_sise'; did you mean 'page_size"),
        (["--engine", "page_size"], "--engine must be key=value, got 'page_size'"),
        (["--engine", "page_size=0"], "page_size must be an integer >= 1, got 0"),
        (["--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["--top-k", "x"], "argument --top-k: invalid int value: 'x'"),
        (["--logit-bias", "1:2"], "argument --logit-bias: invalid"),
        (["--logprobs"], "--logprobs, --top-logprobs and --keep-order need --output"),
        (["--input", "nowhere.txt"], "give prompts as arguments or with --input, not both"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(argv, message, capsys):
    assert main(["generate", "--model", str(MODEL), "hi", *argv]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(capsys, tmp_path):
    assert generate("--input", tmp_path / "nowhere.txt") == 2
    assert "No such file or directory: " in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text("\n")
    assert generate("--input", tmp_path / "empty.txt") == 2
    assert "no prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "x.jsonl:1 is not JSON"),
        ("[1]", "x.jsonl:1 must be a JSON object, got list"),
        (
            '{"text": "a"}',
            r"must have one of \['prompt', .*\], got \['text'\]",
        ),
        ('{"prompt": "a", "input_ids": [1]}', r"got \['prompt', 'input_ids'\]"),
        ('{"prompt": "a", "temperature": 0}', "has the unknown key 'temperature'"),
        ('{"prompt": 3}', "prompt must be a text, got 3"),
        ('{"prompt": "a", "sampling_params": 3}', "sampling_params must be an object, got 3"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidRequestError, match=message):
        read_prompts([], str(path), False)


def test_every_sampling_field_has_an_option(capsys):
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    for name in SamplingParams.__dataclass_fields__:
        assert f"  --{name.replace('_', '-')}" in text
