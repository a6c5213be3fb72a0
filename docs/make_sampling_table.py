"""Writes docs/sampling.md from the engine's own fields, docstrings and refusals.

    python docs/make_sampling_table.py

A test compares the file with `render()` and looks for the test of every field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from sgljax_engine import FOREIGN_FIELDS, ForeignField, SamplingParams

OUTPUT = Path(__file__).with_name("sampling.md")
_ROWS = "tests/engine/test_sampling_table.py::TestRows::test_"
_TEXT = "tests/engine/test_sampling_table.py::TestText::test_"
_GRAMMARS = "tests/engine/test_structured.py::TestGrammars::test_"
_LOGPROBS = "tests/engine/test_logprob_options.py::TestShapes::test_"

TESTS = {
    "stop": _TEXT + "stop_across_tokens",
    "include_stop_str_in_output": _TEXT + "include_stop_str_in_output",
    "detokenize": _TEXT + "detokenize",
    "skip_special_tokens": _TEXT + "skip_special_tokens",
    "spaces_between_special_tokens": _TEXT + "spaces_between_special_tokens",
    "decode_behind_prompt": _TEXT + "decode_behind_prompt",
    "reasoning_tags": _TEXT + "reasoning_tags",
    "return_sampling_mask": "tests/engine/test_sampling_masks.py::TestRequests::test_masks",
    "structured_outputs": _GRAMMARS + "outputs_follow_their_grammars",
    "max_thinking_tokens": _GRAMMARS + "thoughts_are_bounded",
}
"""Tests of fields that are not in `TestRows` under the field's name."""

REFUSAL_TEST = "tests/engine/test_sampling_table.py::TestRefused::test_field"

LOGPROB_ARGUMENTS = {
    "return_logprob": _LOGPROBS + "return_logprob_alone",
    "logprob_start_len": _LOGPROBS + "prompt_from_a_position",
    "top_logprobs_num": _LOGPROBS + "lists_match_float64",
    "token_ids_logprob": _LOGPROBS + "lists_match_float64",
}
"""Arguments of `Engine.generate`, and their tests."""

VLLM_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_token_ids": "",
    "decode_behind_prompt": "",
    "reasoning_tags": "",
    "return_sampling_mask": "",
    "max_thinking_tokens": "thinking_token_budget",
}
"""vLLM's names where they differ; empty where vLLM has no such field."""

_HEAD = """# Sampling

<!-- Written by docs/make_sampling_table.py; do not edit. -->

Every field of vLLM's `SamplingParams` and of this engine's is supported and tested, or refused with
an error that says what to do instead. Pass `SamplingParams` or a dict with the same names, for all
prompts of a call or one for each. In a dict, None is the field's default.
"""

_SUPPORTED = """## Supported

[SamplingParams](reference/requests.md#sgljax_engine.SamplingParams) has meaning, default and range
of each field, and [generate](reference/engine.md#sgljax_engine.Engine.generate) those of the
arguments for log-probs:
"""

_REFUSED = """## Refused

Names of other engines. A dict may hold them with a value that asks for nothing: None, False, what
is empty, and the values in brackets. All others are refused.
"""

_TAIL = """## Order of operations

Logits of each step go through

1. `allowed_token_ids`, then `bad_token_ids`;
2. `min_new_tokens`: no stop token yet;
3. `logit_bias`;
4. `repetition_penalty` (prompt and output), `frequency_penalty`, `presence_penalty` (output);
5. `temperature`; at 0 the most likely token is taken, and filters do not matter;
6. `top_k`, then `top_p` over what remains, then `min_p`, as in SGLang; vLLM applies `min_p` first.

Ties with the last kept token are kept.

## Log-probs

| log-prob | definition | where |
|---|---|---|
| raw | log softmax(logits) | `output_token_logprobs`, `RequestOutput.logprobs` |
| processed | of the distribution that the token was drawn from; 0 when greedy | \
`output_processed_logprobs`, `RequestOutput.processed_logprobs` |
| scaled | log softmax(logits / temperature); raw when greedy | `RequestOutput.scaled_logprobs`; \
what the Tunix rollout returns |

`meta_info` has SGLang's lists of `(log-prob, token id, None)`. Those of the prompt
(`input_token_logprobs`), of top tokens and of chosen tokens are raw. The first token of a prompt
has None. An output token's log-prob is of the weights that sampled it, a prompt token's of the
weights with which the output started.

## Experts

With `enable_return_routed_experts=True` each output of a model with experts has
`RequestOutput.routed_experts`, in dicts `meta_info["routed_experts"]`: an array
[tokens, layers, experts of a token], uint8 for up to 256 experts, the most probable expert first.
It has a row for each token of prompt and output but the last one, which the model has not seen. A
stream has it in its last item. A retracted request has the choices of the weights that prefilled it
again. It is None for a request that was aborted before it decoded, and for an output that was
finished when a [checkpoint](interruptions.md#checkpoints) was saved.

## Sampling masks

With `return_sampling_mask=True` an output has `output_token_sampling_mask`, for each token the ids
that it was drawn from, and `output_token_sampling_logprobs`, its log-prob over these. Such a
request samples from at most 512 tokens: a larger top_k is refused, and without one it is 512.
Tokens that tie with the last of a full mask are not drawn. Chat and completions give vLLM's
`token_ids` and `offsets` as `sampling_mask`. Trainers use it for
[replay](training.md#sampling-replay).

## Structured output

`structured_outputs` lets a request generate only what a grammar allows, by llguidance
(the extra `guided`): one of `json` (a JSON Schema), `json_object`, `regex`,
`choice` and `grammar` (Lark or GBNF). SGLang's `json_schema`, `regex` and `ebnf` mean the same. An
end token follows, unless `max_new_tokens` comes first. Such a request takes one step a dispatch,
with drafts also the tokens that the grammar forces; others beside it keep their bits and their
steps. Processed log-probs are over what was allowed. `max_thinking_tokens` bounds thoughts, which
`reasoning_tags` mark; the grammar holds behind them.

## Streaming

`generate(stream=True)` returns an iterator immediately. Each item has what is new of the
output at position `index`: text, `output_ids` and log-probs. Text is held back until no later token
can change it. Closing or dropping the iterator aborts unfinished requests.

## Deterministic sampling

It gives the tokens and log-probs of a greedy or seeded request the same bits, whatever its batch
mates, order of arrival, prefix cache, chunked prefill, page and pool size, retraction, pauses,
sleep, steps per dispatch and buckets. `score` and `get_per_token_logps` give the same bits.

| where | |
|---|---|
| one CPU with the JIT-compiled kernels | always, in every dtype and with any number of threads; \
no cost |
| one NVIDIA GPU | with `enable_deterministic_sampling=True`, for \
[7 % of a step](accelerators.md#gpus) on an H200 |
| elsewhere | no |

True is refused for several devices, TPUs, CPUs without the kernels, a head_dim that fills no vector
of the CPU, `attention_backend="xla"` and `linear_backend="xla"`. On GPUs `linear_backend` must be
"pallas", which "auto" picks on Hopper; models with experts, recurrent states or shared keys,
adapters, int8 weights and int8 keys are refused.

- Another machine, or another version of JAX or XLA, may give other bits. A seed draws other tokens
  with the JIT-compiled CPU kernels than with portable code.
- A request that keeps keys of older weights (`in_place`) depends on the time of the update.
- Equal weights give equal bits. `Engine.find_differing_weights(source)` and
  `SglJaxRollout.find_differing_weights(state)` name weights that differ from their source.
"""


def test_of(name: str) -> str:
    """The node id of the test of a field."""
    return TESTS.get(name, _ROWS + name)


def _field_lines() -> list[str]:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    renamed = [f"`{name}` (there `{vllm}`)" for name, vllm in VLLM_NAMES.items() if vllm]
    ours = [f"`{name}`" for name, vllm in VLLM_NAMES.items() if not vllm]
    return [
        f"- {', '.join(f'`{name}`' for name in names)}",
        f"- {', '.join(f'`{name}`' for name in LOGPROB_ARGUMENTS)}",
        "",
        f"vLLM's names are the same, but for {' and '.join(renamed)}; vLLM lacks "
        f"{', '.join(ours)}.",
    ]


def foreign_list(fields: Iterable[ForeignField]) -> list[str]:
    """Fields that the engine lacks: a line for each thing to do instead."""
    groups: dict[str, list[ForeignField]] = {}
    for field in fields:
        groups.setdefault(field.instead, []).append(field)
    return [f"- {', '.join(map(named, group))}: {instead}" for instead, group in groups.items()]


def named(field: ForeignField) -> str:
    """A field's name, with the values that it may have in brackets."""
    values = [f"`{_json(value)}`" for value in field.neutral]
    values += [] if field.takes_false else ["not false"]
    return f"`{field.name}`" + (f" ({', '.join(values)})" if values else "")


def _json(value: object) -> str:
    return repr(value).replace("'", '"').replace("True", "true")


def render() -> str:
    """The text of docs/sampling.md."""
    sections = [
        _HEAD,
        _SUPPORTED,
        "\n".join(_field_lines()) + "\n",
        _REFUSED,
        "\n".join(foreign_list(FOREIGN_FIELDS.values())) + "\n",
        _TAIL,
    ]
    return "\n".join(sections)


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
