"""A real model, SmolLM2-135M-Instruct, in each dtype against float32, and how its drafts fare.

    make real-model
    python benchmarks/exactness/real_model.py            # 10 minutes on 2 cores
    python benchmarks/exactness/real_model.py --quick    # a smoke test

- Perplexity of two texts: that of the goldens (tests/golden/smollm2/text.txt; transformers' number
  is in golden.json), and the repository's LICENSE.
- KL divergence of each dtype from float32, a token: the mean of r - 1 - log r over tokens that
  float32 sampled at temperature 1, where r is their probability in the dtype over that in float32.
- The same greedy tokens: how many of the goldens' prompts are answered as in float32.
- Drafts: of samples at temperature 1 and of greedy answers, with `speculation="always"`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from sgljax_engine import Engine, SamplingParams

sys.path.insert(0, str(ROOT / "examples"))
from get_smollm2 import SOURCE, get_smollm2

GOLDEN = ROOT / "tests/golden/smollm2"
DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
OPTIONS: dict[str, Any] = {
    "max_running_requests": 32,
    "batch_buckets": (32,),
    "max_model_len": 4096,
    "num_kv_tokens": 32_768,
}


class Sizes(NamedTuple):
    """How much is measured."""

    num_prompts: int
    num_samples: int
    num_tokens: int


class Sample(NamedTuple):
    """What float32 sampled behind a prompt."""

    prompt_ids: list[int]
    output_ids: list[int]


class Measured(NamedTuple):
    """One dtype; see the module's docstring."""

    perplexities: list[float]
    logprobs: np.ndarray
    greedy: list[list[int]]
    weight_bytes: int


def read_texts() -> list[str]:
    """The texts of the perplexities."""
    paths = (GOLDEN / "text.txt", ROOT / "LICENSE")
    return [path.read_text(encoding="utf-8").strip() for path in paths]


def read_prompts(engine: Engine, num_prompts: int) -> list[list[int]]:
    """Token ids of the goldens' first prompts."""
    stored = json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8"))
    return [
        engine.apply_chat_template(each["messages"])
        if "messages" in each
        else engine.tokenize(each["text"])
        for each in stored[:num_prompts]
    ]


def sample(engine: Engine, sizes: Sizes) -> list[Sample]:
    """Samples at temperature 1, those of a prompt side by side."""
    prompts = read_prompts(engine, sizes.num_prompts)
    rows = [prompt for prompt in prompts for _ in range(sizes.num_samples)]
    params = [
        SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=sizes.num_tokens, seed=i
        )
        for i in range(len(rows))
    ]
    outputs = engine.generate_requests(rows, params)
    return [Sample(row, list(out.output_ids)) for row, out in zip(rows, outputs, strict=True)]


def measure(engine: Engine, samples: Sequence[Sample], sizes: Sizes) -> Measured:
    """Perplexities, log-probs of the samples' tokens, and greedy answers."""
    ids = [list(engine.tokenize(text)) for text in read_texts()]
    found = engine.score(ids)
    scored = engine.score(
        [[*each.prompt_ids, *each.output_ids] for each in samples],
        start_lens=[len(each.prompt_ids) for each in samples],
    )
    greedy = engine.generate_requests(
        read_prompts(engine, sizes.num_prompts),
        SamplingParams(temperature=0.0, max_new_tokens=24),
    )
    return Measured(
        perplexities=[math.exp(-each.astype(np.float64).mean()) for each in found],
        logprobs=np.concatenate(scored).astype(np.float64),
        greedy=[list(out.output_ids) for out in greedy],
        weight_bytes=engine.get_internal_state().memory.weights_bytes,
    )


def draft(folder: Path, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Drafted and right tokens of samples and of greedy answers, and tokens a row in a step."""
    results = {}
    with Engine(folder, speculation="always", **OPTIONS) as engine:
        prompts = read_prompts(engine, sizes.num_prompts)
        for name, temperature in (("temperature 1", 1.0), ("greedy", 0.0)):
            params = SamplingParams(
                temperature=temperature,
                top_p=1.0,
                top_k=-1,
                max_new_tokens=sizes.num_tokens,
                n=sizes.num_samples if temperature else 1,
            )
            before = engine.get_internal_state().counters
            engine.generate_requests(prompts, params)
            after = engine.get_internal_state().counters
            drafted, right = (
                getattr(after, name) - getattr(before, name)
                for name in ("num_draft_tokens", "num_accepted_tokens")
            )
            generated = after.num_output_tokens - before.num_output_tokens
            results[name] = {
                "num_generated": generated,
                "num_drafted": drafted,
                "num_right": right,
            }
    return results


def lines_of(
    measured: dict[str, Measured], drafts: dict[str, dict[str, float]], known: float
) -> list[str]:
    """The report's tables."""
    exact = measured["float32"]
    lines = [
        "| dtype | weights, MB | perplexity, text.txt | perplexity, LICENSE | KL from float32 | "
        "largest difference of a log-prob | same greedy answers |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| transformers, float32 | | {known:.5f} | | | | |",
    ]
    for name, found in measured.items():
        change = found.logprobs - exact.logprobs
        same = sum(a == b for a, b in zip(found.greedy, exact.greedy, strict=True))
        text, licence = found.perplexities
        lines.append(
            f"| {name} | {found.weight_bytes / 1e6:.0f} | {text:.5f} | {licence:.5f} | "
            f"{kl(change):.1e} | {np.abs(change).max():.1e} | {same} of {len(exact.greedy)} |"
        )
    lines += [
        "",
        "| drafts | tokens | drafted | right | right, of the drafted | right, of the tokens |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in drafts.items():
        drafted, right, total = (found[f"num_{key}"] for key in ("drafted", "right", "generated"))
        lines.append(
            f"| {name} | {total} | {drafted} | {right} | {right / max(drafted, 1):.1%} | "
            f"{right / total:.1%} |"
        )
    return lines


def kl(change: np.ndarray) -> float:
    """The divergence a token, from log r of tokens that were drawn from the other distribution."""
    return float(np.mean(np.expm1(change) - change))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    sizes = Sizes(2, 2, 8) if args.quick else Sizes(38, 4, 64)
    folder, measured, samples = get_smollm2(), {}, []
    for name, options in DTYPES.items():
        print(f"{name} ...", flush=True)
        with Engine(folder, **options, **OPTIONS) as engine:
            samples = samples or sample(engine, sizes)
            measured[name] = measure(engine, samples, sizes)
    print("drafts ...", flush=True)
    drafts = draft(folder, sizes)
    golden = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))
    known = golden["perplexity"]["perplexity"]
    num_tokens = sum(len(each.output_ids) for each in samples)
    write_results(
        output_dir(args) / "real_model.md",
        "A real model in each dtype",
        "benchmarks/exactness/real_model.py",
        lines_of(measured, drafts, known),
        {
            "source": SOURCE,
            "perplexities": {name: found.perplexities for name, found in measured.items()},
            "transformers_perplexity": known,
            "kl_from_float32": {
                name: kl(found.logprobs - measured["float32"].logprobs)
                for name, found in measured.items()
            },
            "drafts": drafts,
        },
        facts=[
            f"{SOURCE['model']} ({SOURCE['licence']}), from {SOURCE['package']}: weights of four "
            "bits, dequantised to float32",
            f"KL over {num_tokens} tokens of {len(samples)} samples of {sizes.num_prompts} prompts",
            f"Drafts: {sizes.num_samples} samples of each prompt at temperature 1, or one greedy "
            f"answer, of at most {sizes.num_tokens} tokens",
        ],
    )


if __name__ == "__main__":
    main()
