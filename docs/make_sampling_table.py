"""Writes docs/sampling.md from the engine's own fields, docstrings and refusals.

    python docs/make_sampling_table.py

A test compares the file with `render()` and collects every test that it names.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from sgljax_engine import FOREIGN_FIELDS, ForeignField, SamplingParams
from sgljax_engine.sampling_params import LogprobOptions

OUTPUT = Path(__file__).with_name("sampling.md")
_ROWS = "tests/engine/test_sampling_table.py::TestRows::test_"
_TEXT = "tests/engine/test_sampling_table.py::TestText::test_"
_LOGPROBS = "tests/engine/test_logprob_options.py::TestShapes::test_"

TESTS = {
    "stop": _TEXT + "stop_across_tokens",
    "include_stop_str_in_output": _TEXT + "include_stop_str_in_output",
    "detokenize": _TEXT + "detokenize",
    "skip_special_tokens": _TEXT + "skip_special_tokens",
    "spaces_between_special_tokens": _TEXT + "spaces_between_special_tokens",
    "decode_behind_prompt": _TEXT + "decode_behind_prompt",
    "reasoning_tags": _TEXT + "reasoning_tags",
}
"""Tests of fields that are not in `TestRows` under the field's name."""

REFUSAL_TEST = "tests/engine/test_sampling_table.py::TestRefused::test_field"

LOGPROB_ARGUMENTS = {
    "return_logprob": ("enabled", _LOGPROBS + "return_logprob_alone"),
    "logprob_start_len": ("start_len", _LOGPROBS + "prompt_from_a_position"),
    "top_logprobs_num": ("top_num", _LOGPROBS + "lists_match_float64"),
    "token_ids_logprob": ("token_ids", _LOGPROBS + "lists_match_float64"),
}
"""Arguments of `Engine.generate`: the field of `LogprobOptions`, and the test."""

VLLM_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_token_ids": "",
    "decode_behind_prompt": "",
    "reasoning_tags": "",
}
"""vLLM's names where they differ; empty where vLLM has no such field."""

_HEAD = """# Sampling

<!-- Written by docs/make_sampling_table.py; do not edit. -->

Every field of vLLM's `SamplingParams` and of this engine's is either supported, with a test, or
refused, with an error that says what to do instead. Nothing that is asked for is ignored. Pass
fields as `SamplingParams` or as a dict with the same names, for all prompts of a call or one for
each. In a dict, None is the field's default.
"""

_REFUSED = f"""## Refused

Names of other engines. In a dict they are accepted with a value that asks for nothing: None,
False, what is empty, and what the second column says. All other values are refused, and the error
says what to do instead. `{REFUSAL_TEST}` tests each.
"""

_TAIL = """## Order of operations

Logits of each step go through

1. `allowed_token_ids`, then `bad_token_ids`;
2. `min_new_tokens`: no stop token yet;
3. `logit_bias`;
4. `repetition_penalty` (tokens of prompt and output), `frequency_penalty`, `presence_penalty`
   (tokens of the output);
5. `temperature`; at 0 the most likely token is taken, and filters do not matter;
6. `top_k`, then `top_p` over what remains, then `min_p`.

This is vLLM's order except for `min_p`, which vLLM applies before `top_k`; SGLang applies it last,
as here. Ties with the last kept token are kept. The tokens that are kept are those of a sort in
float64, at every temperature and with the settings as given
(`tests/engine/test_sampling_filters.py`). `tests/engine/test_sampling_numerics.py` compares
the rest with float64, sampled frequencies too, and
`tests/engine/test_sampling_table.py::TestDistribution::test_logprobs_of_real_generations` does so
on real generations.

Draws depend on `seed`, on the step and on the row's own distribution. So a request with a seed
gives the same tokens in any batch, in any configuration, and also after a retraction
(`tests/engine/test_sampling_batches.py`), up to rounding: another batch size may sum in another
order ([interruptions.md](interruptions.md) says how often that changes a draw). One thing matters
besides: with the JIT-compiled CPU kernels a seed draws other tokens than with portable code.

## Log-probs

`meta_info` has SGLang's lists of `(log-prob, token id, None)`. The lists of an output always have
its length.

| log-prob | of | where |
|---|---|---|
| raw | log softmax(logits) | `output_token_logprobs`, `RequestOutput.logprobs` |
| processed | the distribution that the token was drawn from; 0 when greedy | \
`output_processed_logprobs`, `RequestOutput.processed_logprobs` |
| scaled | log softmax(logits / temperature); raw when greedy | `RequestOutput.scaled_logprobs` |

`input_token_logprobs`, `{input,output}_top_logprobs` and `{input,output}_token_ids_logprobs` are
raw. The first token of a prompt has no log-prob; its entries are None. Prompt log-probs come
from the weights with which the output started. If an output spans several weight versions, each
token has the log-prob of the weights that sampled it.

The Tunix rollout returns the *scaled* log-probs, because the trainer recomputes exactly those:
log softmax(logits / temperature), without penalties and filters. The rollout's `logprobs_mode`
selects others.

## Experts

With `enable_return_routed_experts=True`, which a model without experts refuses, each output says
which experts its tokens went through, so that a trainer can replay the choices:
`RequestOutput.routed_experts`, in dicts `meta_info["routed_experts"]`, is an array [tokens,
layers, experts of a token], uint8 for up to 256 experts. The experts of a token are in descending
order of their probabilities. There is a row for each token of prompt and output but the last one,
which the model has not seen. A stream has it in its last item.

The choices are kept beside the keys of each token, and follow them: into the prefix cache,
through page copies, and to the host while the engine sleeps. So they are those of the pass that
computed the keys that the request ended with. A request that was retracted is prefilled again,
and has the choices of the weights that did so. The memory plan counts them: 384 bytes a token for
Qwen3-30B-A3B, 0.4 % of its keys in bfloat16.

It is None for a request that is aborted while it waits or is being prefilled, and for an output
that was finished when a [checkpoint](checkpoints.md) was saved. Checkpoints leave KV pages out:
restored requests are prefilled again.

`tests/engine/test_routed_experts.py` compares all of this with one pass over prompt and output.

## Streaming

`generate(stream=True)` returns an iterator immediately. Each item has `index`, the position of its
output in the call, and what is new since that output's last item: text, `output_ids` and
log-probs. The items add up to what `stream=False` returns; text is held back until no later token
can change it. Closing or dropping the iterator aborts unfinished requests.
"""


def attribute_docs(owner: type) -> dict[str, str]:
    """The "Attributes" of a class docstring, each on one line."""
    body = inspect.cleandoc(owner.__doc__ or "").split("Attributes:\n")[1]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", body, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def test_of(name: str) -> str:
    """The node id of the test of a field."""
    return TESTS.get(name, _ROWS + name)


def _field_rows() -> list[str]:
    docs = attribute_docs(SamplingParams)
    rows = ["| field | in vLLM | default | meaning and range | test |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(SamplingParams):
        name = field.name
        vllm = VLLM_NAMES.get(name, name)
        rows.append(
            f"| `{name}` | {f'`{vllm}`' if vllm else ''} | `{field.default!r}` | {docs[name]} "
            f"| `{_short(test_of(name))}` |"
        )
    return rows


def _logprob_rows() -> list[str]:
    docs = attribute_docs(LogprobOptions)
    defaults = {field.name: field.default for field in dataclasses.fields(LogprobOptions)}
    rows = ["| argument of `generate` | default | meaning and range | test |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | `{defaults[field]!r}` | {docs[field]} | `{_short(test)}` |"
        for name, (field, test) in LOGPROB_ARGUMENTS.items()
    ]
    return rows


def foreign_row(field: ForeignField) -> str:
    """The row of a field that the engine lacks."""
    neutral = [*([] if field.takes_false else ["not False"]), *map(repr, field.neutral)]
    return f"| `{field.name}` | {', '.join(neutral)} | {field.instead} |"


def _foreign_rows() -> list[str]:
    return [
        "| field | also accepted | instead |",
        "|---|---|---|",
        *map(foreign_row, FOREIGN_FIELDS.values()),
    ]


def _short(node: str) -> str:
    return node.removeprefix("tests/engine/")


def render() -> str:
    """The text of docs/sampling.md."""
    sections = [
        _HEAD,
        "## Supported\n\nTests are in `tests/engine/`.\n",
        "\n".join(_field_rows()) + "\n",
        "\n".join(_logprob_rows()) + "\n",
        _REFUSED,
        "\n".join(_foreign_rows()) + "\n",
        _TAIL,
    ]
    return "\n".join(sections)


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
