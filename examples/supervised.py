"""Supervised training on worked solutions, of which a share end in a wrong result.

So a policy knows how to work the result out, but has been taught to spoil it: a start from which
reinforcement learning has something to gain, and which a small model reaches in a few minutes on
a CPU. The checkpoints of all tasks are made by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3

from addition_task import Tokenizer, exact_match, new_model, save_checkpoint


class Batch(NamedTuple):
    """Demonstrations, padded on the right. B rows of L tokens."""

    tokens: np.ndarray
    """Shape: [B, L], int32."""
    is_target: np.ndarray
    """Which tokens are to be predicted: those of the completion and its end. Shape: [B, L]."""


Row = tuple[list[int], list[int]]
"""A demonstration's tokens: the prompt's, and those of the completion with its end."""


def make_row(prompt: str, completion: str) -> Row:
    """Returns the tokens of a demonstration, its beginning and end included."""
    tokenizer = Tokenizer()
    ids = [*tokenizer.encode(completion), tokenizer.eos_id()]
    return [tokenizer.bos_id(), *tokenizer.encode(prompt)], ids


def pad(rows: Sequence[Row], width: int) -> Batch:
    """Returns a batch of rows of at most `width` tokens."""
    tokens = np.full((len(rows), width), Tokenizer().pad_id(), np.int32)
    is_target = np.zeros(tokens.shape, np.bool_)
    for row, (prompt, completion) in enumerate(rows):
        length = len(prompt) + len(completion)
        tokens[row, :length] = prompt + completion
        is_target[row, len(prompt) : length] = True
    return Batch(tokens, is_target)


class Task(NamedTuple):
    """What a checkpoint is made for.

    Attributes:
        name: For the checkpoint's metadata.
        maker: The script that makes it.
        config: The policy's shape.
        batches: Demonstrations, for ever: of a batch size, a share of wrong results and a seed.
        sample_problem: A problem with a `prompt` and an `answer`.
        max_prompt_length, max_new_tokens: Tokens.
    """

    name: str
    maker: Path
    config: qwen3.ModelConfig
    batches: Callable[[int, float, int], Iterator[Batch]]
    sample_problem: Callable[[np.random.Generator], Any]
    max_prompt_length: int
    max_new_tokens: int


class Defaults(NamedTuple):
    """Defaults of the options that differ from task to task."""

    steps: int
    batch_size: int
    corrupted: float
    num_problems: int
    learning_rate: float = 2e-3


def spoil(answer: str, rng: np.random.Generator) -> str:
    """Returns `answer` with one digit changed."""
    place = int(rng.integers(len(answer)))
    digit = (int(answer[place]) + int(rng.integers(1, 10))) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def loss_fn(model: qwen3.Qwen3, batch: Batch) -> jax.Array:
    """Returns the mean cross-entropy of the target tokens, in nats."""
    inputs, targets = jnp.asarray(batch.tokens[:, :-1]), batch.tokens[:, 1:]
    length = inputs.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), inputs.shape)
    causal = jnp.tril(jnp.ones((length, length), jnp.bool_))
    mask = causal & (inputs[:, None, :] != Tokenizer().pad_id())
    logits, _ = model(inputs, positions, None, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(where=batch.is_target[:, 1:])


def train(model: qwen3.Qwen3, data: Iterator[Batch], num_steps: int, learning_rate: float) -> float:
    """Trains the policy in place on the demonstrations; returns its last loss, in nats."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, num_steps // 10, num_steps)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

    @nnx.jit
    def step(model: qwen3.Qwen3, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    loss = float("nan")
    with tqdm(total=num_steps, unit="step") as progress:
        for _ in range(num_steps):
            loss = float(step(model, optimizer, next(data)))
            progress.update()
            progress.set_postfix(loss=f"{loss:.3f}")
    return loss


def sampled_accuracy(model: qwen3.Qwen3, task: Task, num_problems: int, seed: int) -> float:
    """Returns the share of right results when sampling at temperature 1."""
    config = model.config
    cache = tunix_sampler.CacheConfig(
        cache_size=task.max_prompt_length + task.max_new_tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    rng = np.random.default_rng(seed)
    problems = [task.sample_problem(rng) for _ in range(num_problems)]
    prompts = [problem.prompt for problem in problems]
    output = tunix_sampler.Sampler(model, Tokenizer(), cache)(
        prompts,
        max_generation_steps=task.max_new_tokens,
        max_prompt_length=task.max_prompt_length,
        temperature=1.0,
        top_p=1.0,
        seed=seed,
    )
    answers = [problem.answer for problem in problems]
    return float(np.mean(exact_match(prompts, output.text, answers)))


def make_checkpoint(
    task: Task,
    defaults: Defaults,
    measure: Callable[[qwen3.Qwen3, Task, int, int], float] = sampled_accuracy,
) -> None:
    """Trains a policy as the command line says and writes its checkpoint.

    Args:
        task: What it is made for.
        defaults: Of the options.
        measure: The share of right results: of the policy, the task, a number of problems and a
            seed.
    """
    parser = argparse.ArgumentParser(description="Make the supervised checkpoint.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument(
        "--corrupted", type=float, default=defaults.corrupted, help="share of wrong results"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    data = task.batches(args.batch_size, args.corrupted, args.seed)
    model = new_model(args.seed, task.config)
    loss = train(model, data, args.steps, args.learning_rate)
    accuracy = measure(model, task, defaults.num_problems, args.seed + 1)
    print(f"loss {loss:.3f}, exact match at temperature 1: {accuracy:.3f}")
    metadata = {
        "task": task.name,
        "maker": task.maker.name,
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
