"""Makes the supervised checkpoint from which `grpo_async.py` starts.

    python examples/make_multiples_checkpoint.py --output examples/data/multiples_sft.safetensors

As in `make_addition_checkpoint.py` the policy learns from worked solutions of which a share end in
a wrong sum: it can work the sum out, but has been taught to spoil it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3

from addition_task import Tokenizer, exact_match, new_model, save_checkpoint
from make_addition_checkpoint import Batch, spoil, train
from multiples_task import MAX_NEW_TOKENS, MAX_PROMPT_LENGTH, model_config, sample_problem

POOL = 8  # batches that are sorted by length together
WIDTH_STEP = 48  # widths of batches are multiples of it, so that few programs are compiled


def batches(batch_size: int, corrupted: float, seed: int) -> Iterator[Batch]:
    """Yields batches of demonstrations, for ever; those of a batch have similar lengths."""
    rng = np.random.default_rng(seed)
    while True:
        rows = sorted((_row(corrupted, rng) for _ in range(POOL * batch_size)), key=_length)
        groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        for index in rng.permutation(POOL):
            yield _pad(groups[index])


def _row(corrupted: float, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    tokenizer = Tokenizer()
    problem = sample_problem(rng)
    answer = problem.answer if rng.random() >= corrupted else spoil(problem.answer, rng)
    prompt = [tokenizer.bos_id(), *tokenizer.encode(problem.prompt)]
    completion = tokenizer.encode(f"{problem.scratchpad},{answer}")
    return prompt, [*completion, tokenizer.eos_id()]


def _length(row: tuple[list[int], list[int]]) -> int:
    return len(row[0]) + len(row[1])


def _pad(rows: list[tuple[list[int], list[int]]]) -> Batch:
    width = -(-max(map(_length, rows)) // WIDTH_STEP) * WIDTH_STEP
    tokens = np.full((len(rows), width), Tokenizer().pad_id(), np.int32)
    is_target = np.zeros(tokens.shape, np.bool_)
    for row, (prompt, completion) in enumerate(rows):
        length = len(prompt) + len(completion)
        tokens[row, :length] = prompt + completion
        is_target[row, len(prompt) : length] = True
    return Batch(tokens, is_target)


def sampled_accuracy(model: qwen3.Qwen3, num_problems: int, seed: int) -> float:
    """Returns the share of right sums when sampling at temperature 1."""
    config = model.config
    cache = tunix_sampler.CacheConfig(
        cache_size=MAX_PROMPT_LENGTH + MAX_NEW_TOKENS,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    rng = np.random.default_rng(seed)
    problems = [sample_problem(rng) for _ in range(num_problems)]
    prompts = [problem.prompt for problem in problems]
    output = tunix_sampler.Sampler(model, Tokenizer(), cache)(
        prompts,
        max_generation_steps=MAX_NEW_TOKENS,
        max_prompt_length=MAX_PROMPT_LENGTH,
        temperature=1.0,
        top_p=1.0,
        seed=seed,
    )
    answers = [problem.answer for problem in problems]
    return float(np.mean(exact_match(prompts, output.text, answers)))


def main() -> None:
    """Trains the policy and writes the checkpoint."""
    parser = argparse.ArgumentParser(description="Make the supervised checkpoint.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--corrupted", type=float, default=0.7, help="share of wrong sums")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    data = batches(args.batch_size, args.corrupted, args.seed)
    model = new_model(args.seed, model_config())
    loss = train(model, data, args.steps, args.learning_rate)
    accuracy = sampled_accuracy(model, 256, args.seed + 1)
    print(f"loss {loss:.3f}, exact match at temperature 1: {accuracy:.3f}")
    metadata = {
        "task": "repeated addition with a scratchpad",
        "maker": Path(__file__).name,
        "steps": str(args.steps),
        "batch_size": str(args.batch_size),
        "learning_rate": str(args.learning_rate),
        "corrupted": str(args.corrupted),
        "seed": str(args.seed),
        "loss": f"{loss:.4f}",
        "exact_match": f"{accuracy:.4f}",
    }
    save_checkpoint(args.output, model, metadata)
    print(f"wrote {args.output} ({args.output.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
