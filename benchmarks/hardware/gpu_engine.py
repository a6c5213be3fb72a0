"""Rollouts and decode steps of the whole engine on one GPU; see gpu.py."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3

from benchmarks.hardware.gpu_kernels import Ceilings
from benchmarks.lib.shapes import IdTokenizer
from benchmarks.lib.turns import timed
from sgljax_engine import SamplingParams
from tunix_sgljax import SglJaxRollout, create_sgljax_rollout

_TINY = dataclasses.replace(
    ModelConfig.qwen3_0p6b(),
    num_layers=2,
    vocab_size=128,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """What is measured.

    Attributes:
        model: Tunix's config.
        num_prompts, num_samples, prompt_lengths: Of the rollouts; shortest and longest prompt.
        output_lengths: Shortest, median and longest.
        repeats: Turns of each contestant, after one that compiles.
        batches, context, num_steps: Rows, prompt tokens and number of the decode steps.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig.qwen3_0p6b)
    num_prompts: int = 16
    num_samples: int = 8
    prompt_lengths: tuple[int, int] = (64, 128)
    output_lengths: tuple[int, int, int] = (16, 128, 512)
    repeats: int = 3
    batches: tuple[int, ...] = (1, 16, 128)
    context: int = 512
    num_steps: int = 128

    @classmethod
    def smoke(cls) -> EngineSizes:
        """Runs in seconds on a CPU."""
        return cls(
            model=_TINY,
            num_prompts=2,
            num_samples=2,
            prompt_lengths=(4, 8),
            output_lengths=(2, 4, 8),
            repeats=1,
            batches=(1, 4),
            context=16,
            num_steps=8,
        )

    def in_words(self) -> str:
        """The model, for the report."""
        m = self.model
        return (
            f"Qwen3 of {m.num_layers} layers, hidden {m.embed_dim}, {m.num_heads}/{m.num_kv_heads} "
            f"heads of {m.head_dim}, MLP {m.hidden_dim}, vocabulary {m.vocab_size}"
        )

    @property
    def num_params(self) -> int:
        """Parameters that a decode step reads; the tied table once."""
        m = self.model
        attention = 2 * m.embed_dim * (m.num_heads + m.num_kv_heads) * m.head_dim
        return m.num_layers * (attention + 3 * m.embed_dim * m.hidden_dim) + (
            m.vocab_size * m.embed_dim
        )

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * 2 * self.model.num_layers * self.model.num_kv_heads * self.model.head_dim


def make_model(sizes: EngineSizes) -> Qwen3:
    """Tunix's model with random weights in bfloat16.

    One small program a shape: XLA took 90 s on an H100 for all weights at once.
    """
    config = dataclasses.replace(sizes.model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [_random(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, made))


@functools.partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A norm's scale of 1, or normal weights that keep activations near 1."""
    if len(shape) == 1:
        return jnp.ones(shape, jnp.bfloat16)
    return (0.02 * jax.random.normal(key, shape)).astype(jnp.bfloat16)


def make_rollout(
    model: Qwen3,
    backend: str,
    *,
    max_model_len: int,
    rows: int,
    buckets: Sequence[int],
    deterministic: bool = False,
    linear_backend: str = "auto",
) -> SglJaxRollout:
    """Our engine on that model's weights."""
    return create_sgljax_rollout(
        model,
        IdTokenizer(),
        max_model_len=max_model_len,
        max_running_requests=rows,
        batch_buckets=tuple(buckets),
        num_kv_tokens=rows * (max_model_len + 16),
        attention_backend=backend,
        linear_backend=linear_backend,
        enable_deterministic_sampling=deterministic,
        dtype="bfloat16",
    )


def workload(sizes: EngineSizes) -> tuple[list[list[int]], list[int]]:
    """The prompts, each repeated for its samples, and the length of each sample."""
    rng = np.random.default_rng(0)
    low, high = sizes.prompt_lengths
    prompts = [
        rng.integers(1, sizes.model.vocab_size, rng.integers(low, high + 1)).tolist()
        for _ in range(sizes.num_prompts)
    ]
    shortest, median, longest = sizes.output_lengths
    lengths = rng.lognormal(np.log(median), 0.8, sizes.num_prompts * sizes.num_samples).round()
    lengths = np.clip(lengths, shortest, longest).astype(int)
    return [prompt for prompt in prompts for _ in range(sizes.num_samples)], lengths.tolist()


def _vanilla(model: Qwen3, sizes: EngineSizes, prompts: list[list[int]]) -> Callable[[], object]:
    config, tokenizer = sizes.model, IdTokenizer()
    max_prompt, max_new = sizes.prompt_lengths[1], sizes.output_lengths[2]
    cache = CacheConfig(
        cache_size=max_prompt + max_new,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = Sampler(model, tokenizer, cache)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    return lambda: sampler(
        input_strings=texts,
        max_generation_steps=max_new,
        max_prompt_length=max_prompt,
        temperature=1.0,
        top_p=1.0,
        seed=time.perf_counter_ns() % 2**31,
    )


def _race(
    sizes: EngineSizes,
    ceilings: Ceilings,
    engines: dict[str, dict[str, Any]],
    *,
    has_vanilla: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rollouts of several contestants in turns, on the same weights.

    One that fails in its first run leaves the race, and fails the section when the others have
    finished. The limit reads the weights in every step of the longest output and each sample's keys
    in each of its steps, and computes each prompt once.
    """
    model = make_model(sizes)
    prompts, lengths = workload(sizes)
    params = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths]
    longest, rows = sizes.prompt_lengths[1] + sizes.output_lengths[2], len(prompts)

    def ours(stack: contextlib.ExitStack, options: dict[str, Any]) -> Callable[[], object]:
        rollout = make_rollout(model, max_model_len=longest, rows=rows, buckets=(rows,), **options)
        stack.callback(rollout.close)
        return lambda: rollout.engine.generate_requests(prompts, params)

    runs: dict[str, Callable[[], object]] = {}
    first: dict[str, float] = {}
    failures: list[Exception] = []
    with contextlib.ExitStack() as stack:
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            name: functools.partial(ours, stack, options) for name, options in engines.items()
        }
        if has_vanilla:
            makers["vanilla"] = lambda: _vanilla(model, sizes, prompts)
        for name, make in makers.items():
            try:
                run = make()
                first[name] = timed(run)
                runs[name] = run
                print(f"{name}: first run {first[name]:.1f} s", flush=True)
            except Exception as error:
                traceback.print_exc()
                failures.append(error)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(sizes.repeats):
            for name, run in runs.items():
                times[name].append(timed(run))
    weights_s = max(lengths) * 2 * sizes.num_params / ceilings.bytes_per_s
    keys = sum(len(p) * n + n * n / 2 for p, n in zip(prompts, lengths, strict=True))
    keys_s = keys * sizes.kv_token_bytes / ceilings.bytes_per_s
    distinct = sum(len(p) for p in prompts[:: sizes.num_samples])
    limit_s = weights_s + keys_s + 2.0 * distinct * sizes.num_params / ceilings.flops_per_s
    for name in runs:
        median = float(np.median(times[name]))
        yield {
            "contestant": name,
            "useful tokens/s": sum(lengths) / median,
            "seconds": median,
            "of limit": limit_s / median,
            "first run, s": first[name],
        }
    if failures:
        raise failures[0]


def measure_rollouts(
    sizes: EngineSizes, backends: Sequence[str], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Rollouts of the engine with each backend and of the vanilla sampler, in turns."""
    engines = {f"engine, {backend}": {"backend": backend} for backend in backends}
    return _race(sizes, ceilings, engines, has_vanilla=True)


def measure_determinism(
    sizes: EngineSizes, backends: Sequence[str], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """The same rollouts with and without deterministic sampling, in turns."""
    del backends
    engines = {
        "engine": {"backend": "auto"},
        "engine, deterministic": {"backend": "auto", "deterministic": True},
    }
    return _race(sizes, ceilings, engines)


def measure_decode_steps(
    sizes: EngineSizes, backends: Sequence[str], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Seconds of a decode step by batch size, and to the first token of a lone request."""
    model = make_model(sizes)
    rng = np.random.default_rng(1)
    for backend in backends:
        rollout = make_rollout(
            model,
            backend,
            max_model_len=sizes.context + sizes.num_steps + 1,
            rows=max(sizes.batches),
            buckets=sizes.batches,
        )
        engine = rollout.engine

        def run(batch: int, new_tokens: int, engine: Any = engine) -> float:
            prompts = rng.integers(1, sizes.model.vocab_size, (batch, sizes.context)).tolist()
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            return timed(lambda: engine.generate_requests(prompts, params))

        for batch in sizes.batches:
            for new_tokens in (1, sizes.num_steps + 1):
                run(batch, new_tokens)  # compiles
            once = [run(batch, 1) for _ in range(3)]
            full = [run(batch, sizes.num_steps + 1) for _ in range(3)]
            step_s = float(np.median(full) - np.median(once)) / sizes.num_steps
            kv_bytes = batch * (sizes.context + sizes.num_steps / 2) * sizes.kv_token_bytes
            limit_s = (2 * sizes.num_params + kv_bytes) / ceilings.bytes_per_s
            yield {
                "backend": backend,
                "rows": batch,
                "step, ms": 1e3 * step_s,
                "limit, ms": 1e3 * limit_s,
                "of limit": limit_s / step_s,
                "tokens/s": batch / step_s,
                "to first tokens, ms": 1e3 * float(np.median(once)),
            }
        rollout.close()
