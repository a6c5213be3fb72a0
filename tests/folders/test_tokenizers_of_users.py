"""Tokenizers that users load themselves: a warning where tokenizer.json reads texts otherwise."""

from __future__ import annotations

import logging

import pytest
from transformers import AutoTokenizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import find_tokenizer_difference, load_hf_tokenizer
from sgljax_engine.processing.any_tokenizer import take_tokenizer
from tests.engine.small_tokenizers import CharTokenizer
from tests.folders.tokenizer_cases import PUBLISHED

WRONG = ("llama2", "llama2_legacy", "code_llama", "yi", "qwen2_by_three", "smollm")
"""Combinations that transformers 5.12.1 and 5.24.0 both read otherwise than the file."""

RIGHT = ("mistral", "llama3", "qwen2", "qwen3", "new_class", "llama2_metaspace")


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_is_found_and_not_in_the_engines_own(tmp_path, name):
    folder = PUBLISHED[name].build(name).write(tmp_path)
    found = find_tokenizer_difference(AutoTokenizer.from_pretrained(str(folder)))
    assert found is not None
    assert found.startswith(f"{folder / 'tokenizer.json'} has another ")
    assert find_tokenizer_difference(load_hf_tokenizer(folder)) is None


@pytest.mark.parametrize("name", RIGHT)
def test_a_class_that_spells_the_same_pipeline_otherwise_is_no_difference(tmp_path, name):
    folder = PUBLISHED[name].build(name).write(tmp_path)
    assert find_tokenizer_difference(AutoTokenizer.from_pretrained(str(folder))) is None


def test_the_warning_at_the_start_is_one_line_and_looks_into_tunixs_adapter(tmp_path, caplog):
    folder = PUBLISHED["llama2"].build("llama2").write(tmp_path)
    adapter = TokenizerAdapter(TokenizerAdapter(AutoTokenizer.from_pretrained(str(folder))))
    with caplog.at_level(logging.WARNING, logger="sgljax_engine"):
        take_tokenizer(adapter)
        take_tokenizer(TokenizerAdapter(load_hf_tokenizer(folder)))
        take_tokenizer(CharTokenizer())
    (record,) = caplog.records
    assert "has another normalizer, pre_tokenizer, model" in record.message
    assert "it reads '  two  spaces" in record.message


def test_an_unreadable_file_of_a_users_tokenizer_is_named_and_not_refused(tmp_path, caplog):
    folder = PUBLISHED["llama3"].build("llama3").write(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING, logger="sgljax_engine"):
        take_tokenizer(tokenizer)
    (record,) = caplog.records
    assert f"cannot read {folder / 'tokenizer.json'}" in record.message
