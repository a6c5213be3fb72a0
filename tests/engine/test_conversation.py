"""Conversations keep the ids that were sampled, however their text would be tokenized."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import InvalidRequestError
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.conversation import conversation_ids
from tests.engine.small_tokenizers import GOLDEN

HF = AutoTokenizer.from_pretrained(GOLDEN / "qwen3_gqa_tied")
TOKENIZER = wrap_tokenizer(HF)
EOS = HF.convert_tokens_to_ids("<|im_end|>")
ASK = [{"role": "user", "content": "hi"}]
NEXT = {"role": "user", "content": "why?"}


def letters(text: str) -> list[int]:
    """Ids of the bytes of a text, one by one: never merged."""
    return [HF.encode(letter, add_special_tokens=False)[0] for letter in text]


def encode(text: str) -> list[int]:
    return HF.encode(text, add_special_tokens=False)


def sampled(text: str, ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "token_ids": ids, **fields}


WORD = next(word for word in ("the", "and", "lazy", "over") if encode(word) != letters(word))


def test_the_tokenizer_drifts():
    """Else nothing here shows anything."""
    assert encode(WORD) != letters(WORD)
    assert HF.decode(letters(WORD)) == WORD


@pytest.mark.parametrize("ended", [True, False])
def test_sampled_ids_are_kept(ended):
    prompt = conversation_ids(TOKENIZER, ASK)
    output = letters(WORD) + [EOS] * ended
    found = conversation_ids(TOKENIZER, [*ASK, sampled(WORD, output), NEXT])
    tail = "<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert found == prompt + letters(WORD) + encode(tail)


def test_every_turn_starts_with_the_last_turns_ids():
    messages: list[dict[str, Any]] = list(ASK)
    before: list[int] = []
    for turn in range(4):
        prompt = conversation_ids(TOKENIZER, messages)
        assert prompt[: len(before)] == before
        output = [*letters(WORD), EOS]
        messages += [sampled(WORD, output, prompt_token_ids=prompt), dict(NEXT, content=str(turn))]
        before = prompt + output


def test_messages_without_ids_are_tokenized_anew():
    messages = [*ASK, {"role": "assistant", "content": WORD}, NEXT]
    plain = HF.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert conversation_ids(TOKENIZER, messages) == plain
    assert conversation_ids(TOKENIZER, [*ASK, sampled(WORD, encode(WORD)), NEXT]) == plain


def test_a_tool_call_without_content_keeps_its_ids():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    output = [*letters(WORD), EOS]
    message = sampled("", output, tool_calls=[call]) | {"content": None}
    found = conversation_ids(TOKENIZER, [*ASK, message, {"role": "tool", "content": "2"}])
    assert found[: len(conversation_ids(TOKENIZER, ASK)) + len(output)][-len(output) :] == output


def test_with_tunixs_adapter_there_is_one_bos():
    adapter = wrap_tokenizer(TokenizerAdapter(HF))
    found = conversation_ids(adapter, [*ASK, sampled(WORD, letters(WORD)), NEXT])
    plain = conversation_ids(TOKENIZER, [*ASK, sampled(WORD, letters(WORD)), NEXT])
    assert found == [HF.bos_token_id, *plain]


def test_thoughts_that_the_template_drops_are_kept():
    """Templates such as Qwen3's leave out what an earlier turn thought; the model saw it."""
    own = AutoTokenizer.from_pretrained(GOLDEN / "qwen3_gqa_tied")
    own.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = wrap_tokenizer(own)
    text = "<think>hm</think> yes"
    ids = own.encode(text, add_special_tokens=False)
    found = conversation_ids(tokenizer, [*ASK, sampled(text, ids), NEXT])
    assert own.decode(found) == f"<user>hi<assistant>{text}<user>why?<assistant>"


def edited(field: str, value: Any) -> list[dict[str, Any]]:
    prompt = conversation_ids(TOKENIZER, ASK)
    return [*ASK, sampled(WORD, letters(WORD), prompt_token_ids=prompt) | {field: value}, NEXT]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (edited("prompt_token_ids", [1, 2]), r"messages\[1\].*differ at position 0 of 2"),
        ([{"role": "user", "content": "hello"}, *edited("role", "assistant")[1:]], "differ at pos"),
        (edited("token_ids", None), "has prompt_token_ids but no token_ids"),
        (edited("token_ids", "abc"), "must be a list of integers, got 'abc'"),
        (edited("token_ids", [1.5]), r"must be a list of integers, got \[1.5\]"),
        (edited("role", "user"), "must be an assistant's to have token_ids, got role 'user'"),
    ],
)
def test_refused(messages, error):
    with pytest.raises(InvalidRequestError, match=error):
        conversation_ids(TOKENIZER, messages)


def test_a_template_that_hides_the_message_is_refused():
    own = AutoTokenizer.from_pretrained(GOLDEN / "qwen3_gqa_tied")
    own.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(InvalidRequestError, match="writes the content of that message 0 times"):
        conversation_ids(wrap_tokenizer(own), [*ASK, sampled(WORD, [5]), NEXT])


class TestContinued:
    """The last message goes on."""

    CUT = "The answer"

    @pytest.mark.parametrize("more", [[], [{"role": "assistant", "content": "a"}, NEXT]])
    def test_is_what_transformers_makes(self, more):
        messages = [*ASK, *more, {"role": "assistant", "content": self.CUT}]
        found = conversation_ids(
            TOKENIZER, messages, add_generation_prompt=False, continue_final_message=True
        )
        plain = HF.apply_chat_template(messages, continue_final_message=True, return_dict=False)
        assert found == plain

    def test_with_the_ids_that_were_sampled(self):
        """Tests ids in the last message, and in one before it."""
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        prompt = conversation_ids(TOKENIZER, ASK)
        output = letters(WORD)
        assert conversation_ids(TOKENIZER, [*ASK, sampled(WORD, output)], **options) == (
            prompt + output
        )
        turns = [*ASK, sampled(WORD, output), NEXT]
        last = {"role": "assistant", "content": self.CUT}
        found = conversation_ids(TOKENIZER, [*turns, last], **options)
        assert found == conversation_ids(TOKENIZER, turns) + encode(self.CUT)

    def test_behind_one_bos(self):
        adapter = wrap_tokenizer(TokenizerAdapter(HF))
        messages = [*ASK, {"role": "assistant", "content": self.CUT}]
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        found = conversation_ids(adapter, messages, **options)
        assert found[: len(conversation_ids(adapter, ASK))] == conversation_ids(adapter, ASK)
        assert found[1:] == conversation_ids(TOKENIZER, messages, **options)

    @pytest.mark.parametrize(
        ("messages", "add", "message"),
        [
            ([*ASK, {"role": "assistant", "content": "a"}], True, "add_generation_prompt=False"),
            (ASK, False, r"messages\[0\] must be an assistant's"),
        ],
    )
    def test_is_refused(self, messages, add, message):
        with pytest.raises(InvalidRequestError, match=message):
            conversation_ids(
                TOKENIZER, messages, add_generation_prompt=add, continue_final_message=True
            )
