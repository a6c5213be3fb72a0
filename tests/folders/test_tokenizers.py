"""Tokenizers of generated folders against `tokenizers` on tokenizer.json, and against goldens."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sgljax_engine import InvalidConfigError
from sgljax_engine.processing.tokenizer import DecodeOptions
from sgljax_engine.processing.tokenizer_folder import load_hf_tokenizer, load_tokenizer
from tests.folders import tokenizer_answers as answers
from tests.folders.tokenizer_cases import NUM_CASES, PUBLISHED, TEXTS, TokenizerCase, all_cases

GOLDENS = json.loads(Path(__file__).with_name("tokenizer_goldens.json").read_text())

DECISIONS = {
    ("5.24.0", "inside"): (
        99,
        "transformers 5 builds the class anew and replaces what tokenizer.json says. 4.51.3 reads "
        "the file, with which the models were trained and published, and so does vLLM with it; "
        "newer releases take more and more models back to the file.",
    ),
    ("5.24.0", "around"): (
        15,
        "transformers 5 ignores add_bos_token and add_eos_token beside a tokenizer.json. For "
        "classes that obeyed them when the folders were written, as DeepSeek's cards promise, an "
        "explicit flag holds here; for all others the file holds, with a warning.",
    ),
    ("5.24.0", "raises"): (
        31,
        "The rebuilt model names an unknown token that the vocabulary lacks; the file does not.",
    ),
    ("4.51.3", "inside"): (
        64,
        "transformers 4 adds special tokens that only the class names (`<unk>`, `<pad>`) to the "
        "vocabulary, with ids that the model does not have. Tokens that a file of the folder names "
        "are added here too.",
    ),
    ("4.51.3", "around"): (
        26,
        "transformers 4 takes the class's defaults, BOS for Llama and Gemma, where no flag is "
        "given; here, as in transformers 5, the file says it then.",
    ),
    ("4.51.3", "raises"): (
        33,
        "transformers 4 refuses classes that it does not know, and wants tokenizer.model for "
        "add_prefix_space; tokenizer.json has all that is needed.",
    ),
}
"""Where transformers alone differs from this engine: how many folders, and why not as there."""


@functools.cache
def cases() -> dict[str, TokenizerCase]:
    return {case.name: case for case in all_cases()}


NAMES = [*PUBLISHED, *(f"random_{number}" for number in range(len(PUBLISHED), NUM_CASES))]


@pytest.fixture
def write(tmp_path):
    return lambda case: case.write(tmp_path)


def wrapped(folder: Path) -> list[answers.Answer]:
    """Answers of the engine's tokenizer."""
    tokenizer: Any = load_tokenizer(folder)
    return [
        answers.answer(
            lambda each, special: (
                tokenizer.encode(each) if special else tokenizer.encode_rendered(each)
            ),
            lambda ids, skip: tokenizer.decode(ids, DecodeOptions(skip_special_tokens=skip)),
            text,
        )
        for text in TEXTS
    ]


def obeyed_flags(case: TokenizerCase) -> dict[str, bool]:
    """Explicit flags, if the class in the folder ever obeyed them."""
    cls = str(case.config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    names = ("add_bos_token", "add_eos_token")
    has_flags = cls in ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
    return {name: case.config[name] for name in names if name in case.config and has_flags}


def expected(case: TokenizerCase, folder: Path) -> list[answers.Answer]:
    """The file's answers, with BOS and EOS as flags that are obeyed say."""
    found, flags = answers.of_file(folder / "tokenizer.json"), obeyed_flags(case)
    ids = {token["content"]: token["id"] for token in case.tokenizer["added_tokens"]}
    bos, eos = ids[case.config["bos_token"]], ids[case.config["eos_token"]]
    first = found[0]  # a text without special tokens
    before = [bos] if flags.get("add_bos_token", first.whole[0] == bos) else []
    after = [eos] if flags.get("add_eos_token", first.whole[-1] == eos) else []
    return [dataclasses.replace(each, whole=before + each.ids + after) for each in found]


def check(names, write):
    wrong = defaultdict(list)
    for name in names:
        case = cases()[name]
        folder = write(case)
        for text, mine, right in zip(TEXTS, wrapped(folder), expected(case, folder), strict=True):
            if mine != right:
                wrong[name].append((text, mine, right))
    assert not wrong


def test_published_combinations_of_files_and_classes(write):
    check(PUBLISHED, write)


FAST = NAMES[len(PUBLISHED) :: 5]


def test_a_fifth_of_the_random_folders(write):
    check(FAST, write)


@pytest.mark.slow
def test_all_other_random_folders(write):
    check(set(NAMES) - set(FAST) - set(PUBLISHED), write)


@functools.cache
def right_digests() -> dict[str, list[str]]:
    """Digests of what is right; the slow test shows that the engine's tokenizers answer so."""
    found = {}
    with tempfile.TemporaryDirectory() as parent:
        for case in cases().values():
            right = expected(case, case.write(Path(parent)))
            found[case.name] = [
                answers.digest(right, ("whole",)),
                answers.digest(right, answers.INNER),
            ]
    return found


def kind_of(golden: list[str], right: list[str]) -> str | None:
    if "raises" in golden:
        return "raises"
    if golden[1] != right[1]:
        return "inside"
    return "around" if golden[0] != right[0] else None


def test_each_difference_from_transformers_alone_has_its_reason():
    found = Counter(
        (release, kind)
        for release, goldens in GOLDENS.items()
        for name, golden in goldens.items()
        if (kind := kind_of(golden, right_digests()[name])) is not None
    )
    assert found == {key: number for key, (number, _) in DECISIONS.items()}


def test_two_explicit_flags_do_what_they_did_in_transformers_4():
    tried = 0
    for name, (whole, inner) in GOLDENS["4.51.3"].items():
        if len(obeyed_flags(cases()[name])) == 2 and inner == right_digests()[name][1]:
            assert whole == right_digests()[name][0], name
            tried += 1
    assert tried >= 10


def test_flags_without_effect_are_named(write, caplog):
    with caplog.at_level(logging.WARNING, logger="sgljax_engine"):
        load_hf_tokenizer(write(cases()["llama3_no_bos"]))
    (record,) = [each for each in caplog.records if "has no effect" in each.message]
    assert "tokenizer_config.json: add_bos_token=False" in record.message


def test_tokens_that_the_folder_names_beyond_tokenizer_json_are_added(write):
    case = cases()["deepseek_llm"]
    case.config["additional_special_tokens"] = ["<|extra|>"]
    tokenizer = load_hf_tokenizer(write(case))
    size = len(Tokenizer.from_str(json.dumps(case.tokenizer)).get_vocab())
    assert tokenizer.encode("<|extra|>", add_special_tokens=False) == [size]
    assert len(tokenizer) == size + 1, "no <unk>, which only the class names"


def test_tokenizers_that_cannot_be_read_are_refused_with_their_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
