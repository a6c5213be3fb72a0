"""What grammars cost: a mask, and the rows beside those that follow a grammar.

    python benchmarks/throughput/structured.py                # some minutes
    python benchmarks/throughput/structured.py --pairs 1 --quick

The vocabularies are the commonest words of this environment's Python files, with the spaces before
them, and all bytes. Masks are those of a random walk through each grammar.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from benchmarks.lib.turns import speed_table, take_turns
from sgljax_engine import Engine, SamplingParams
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.guides import Guides

NUM_ROWS, NUM_BESIDE, NUM_TOKENS, END = 64, 8, 64, 0
LONG = {"regex": r"([A-Z][a-z]+ ){4000}"}
PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}}
GRAMMARS: dict[str, dict[str, Any]] = {
    "JSON Schema": {"json": {"type": "object", "properties": PERSON, "required": ["name", "age"]}},
    "any JSON object": {"json_object": True},
    "regex": {"regex": r"([A-Z][a-z]+ ){4,400}[0-9]+"},
}


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of common words; token 0 ends."""
    words: collections.Counter[str] = collections.Counter()
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text("utf-8", "ignore")
        words.update(re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+", text))
        if len(words) > 4 * vocab_size:
            break
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = dict.fromkeys(["<end>", *sorted(level.alphabet())])
    for word, _ in words.most_common():
        ((name, _),) = level.pre_tokenize_str(word)
        names[name] = None
        if len(names) == vocab_size:
            break
    vocab = {name: number for number, name in enumerate(names)}
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    rust.pre_tokenizer, rust.decoder = level, tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>")


def mask_us(
    tokenizer: Any, vocab_size: int, outputs: dict[str, Any], num_masks: int
) -> list[float]:
    """Microseconds of each step of a random walk."""
    guides, rng = Guides(wrap_tokenizer(tokenizer), vocab_size, (END,), 0), random.Random(0)
    found: list[float] = []
    while len(found) < num_masks:
        guide, ids = guides.make(SamplingParams(structured_outputs=outputs), (END,), None), []
        while len(ids) < NUM_TOKENS:
            bits = np.unpackbits(guide.allowed.words[0].view(np.uint8), bitorder="little")
            ids.append(rng.choice(np.flatnonzero(bits).tolist()))
            if ids[-1] == END:
                break
            start = time.perf_counter()
            guide.advance(ids)
            found.append(1e6 * (time.perf_counter() - start))
    return found


def measure(tokenizer: Any, vocab_size: int, num_turns: int) -> dict[str, list[float]]:
    """Seconds in which 56 free rows are done, beside 8 that go on, free or with a grammar."""
    config = dataclasses.replace(SMALL, vocab_size=vocab_size, eos_token_ids=(END,))
    prompts = np.random.default_rng(0).integers(64, 2048, (NUM_ROWS, 16)).tolist()
    free = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    beside: dict[str, dict[str, Any]] = {
        "free": {"max_new_tokens": 900, "ignore_eos": True},
        "with a grammar": {"max_new_tokens": 900, "structured_outputs": LONG},
    }
    with Engine(
        model_config=config,
        load_format="dummy",
        tokenizer=tokenizer,
        max_model_len=1024,
        max_running_requests=NUM_ROWS,
    ) as engine:

        def run(params: dict[str, Any]) -> Callable[[], float]:
            def free_rows() -> float:
                streams = [
                    engine.generate(
                        input_ids=ids, sampling_params=params, stream=True, rid=str(number)
                    )
                    for number, ids in enumerate(prompts[:NUM_BESIDE])
                ]
                for stream in streams:
                    next(stream)
                start = time.perf_counter()
                engine.generate(input_ids=prompts[NUM_BESIDE:], sampling_params=free)
                took_s = time.perf_counter() - start
                for number, stream in enumerate(streams):
                    engine.abort_request(str(number))
                    collections.deque(stream, maxlen=0)
                engine.flush_cache()
                return took_s

            return free_rows

        runs = {name: run(params) for name, params in beside.items()}
        return take_turns(runs, num_turns, measure=lambda run: run())


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__, pairs=5).parse_args(argv)
    masks = ["| vocabulary | grammar | median, us | 95 of 100 below |", "|---:|---|---:|---:|"]
    rows: dict[str, dict[str, list[float]]] = {}
    for vocab_size in (2048,) if args.quick else (49_152, 151_936):
        tokenizer = make_tokenizer(vocab_size)
        for name, outputs in GRAMMARS.items():
            us = mask_us(tokenizer, vocab_size, outputs, 20 if args.quick else 2000)
            low, high = np.percentile(us, (50, 95))
            masks.append(f"| {vocab_size} | {name} | {low:.0f} | {high:.0f} |")
        case = f"56 free rows, vocabulary {vocab_size}, 8 others"
        rows[case] = measure(tokenizer, vocab_size, args.pairs)
    write_results(
        output_dir(args) / "structured.md",
        "What grammars cost",
        "benchmarks/throughput/structured.py",
        [*masks, "", *speed_table(rows, "free")],
        {"seconds": rows},
        facts=[f"Model: {SMALL_IN_WORDS}, random weights"],
    )


if __name__ == "__main__":
    main()
