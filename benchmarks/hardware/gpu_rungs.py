"""The rungs of gpu_ladder.py, and how each is measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.models.qwen3.model import Qwen3

from benchmarks.hardware import gpu_products, gpu_training
from benchmarks.hardware.gpu_prefill import measure_prefill_kernels
from benchmarks.hardware.gpu_sizes import Sizes
from benchmarks.lib.models import make_tunix_model
from benchmarks.lib.shapes import IdTokenizer
from benchmarks.lib.turns import timed
from benchmarks.throughput import hybrid
from sgljax_engine import Engine, MoEConfig, SamplingParams
from sgljax_engine.attention import pallas
from sgljax_engine.builder import backends
from sgljax_engine.kernels.gpu import linear
from sgljax_engine.layers.fused import FusedProducts
from sgljax_engine.layers.invariant import InvariantKernels
from sgljax_engine.layers.kernels import LinearBackend, XlaKernels
from tunix_sgljax import SglJaxRollout, create_sgljax_rollout

TOLERANCE = 0.15
"""Most that a log-prob of a greedy token may differ from XLA's code's, in bfloat16."""

_GPU_ATTENTION = pallas.gpu_attention
_ALL = FusedProducts()
_ATTENTION = FusedProducts(joins=False, adds=False)

CUBLAS = "--xla_gpu_enable_triton_gemm=false"
ALL_BUFFERS = "--xla_gpu_enable_command_buffer=+CONDITIONAL,+WHILE"
NO_BUFFERS = "--xla_gpu_enable_command_buffer="


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A variant of the engine, or a measurement of another kind.

    Attributes:
        fused: Products with what is after them; None for XLA's code, and attention without
            prologue.
        flags: XLA's, beside those of the environment.
        steps: Decode steps of a dispatch; None for the engine's default.
        quantization: The engine's.
        is_deterministic: Whether it samples deterministically.
        top_p: Of the samples.
        group: Neighbouring rows of decode with the same prompt.
        measure: Name of what is measured, see `MEASUREMENTS`.
    """

    fused: FusedProducts | None = _ALL
    flags: str = ""
    steps: int | None = None
    quantization: str | None = None
    is_deterministic: bool = False
    top_p: float = 1.0
    group: int = 1
    measure: str = "decode"


BASE = "base: XLA around the attention kernel"

RUNGS = {
    "JAX and a kernel": Rung(measure="jax"),
    BASE: Rung(fused=None),
    "attention from projections on, logits in float32": Rung(fused=_ATTENTION),
    "products of one input, and gates, in one kernel": Rung(fused=FusedProducts(adds=False)),
    "residuals in products: all fused": Rung(),
    "rollouts beside Tunix's sampler": Rung(measure="rollouts"),
    "weight sync, sleep and wake": Rung(measure="interruptions"),
    "log-probs beside the trainer's": Rung(measure="mismatch"),
    "an MLP alone, by tiles": Rung(measure="tiles"),
    "bench.py's workload": Rung(measure="bench"),
    "kvcached's workload": Rung(measure="served"),
    "a whole training with GRPO": Rung(measure="grpo"),
    "prefill": Rung(measure="prefill"),
    "bench.py's workload, base": Rung(fused=None, measure="bench"),
    "prefill, base": Rung(fused=None, measure="prefill"),
    "groups of 16 share a prompt, base": Rung(fused=None, group=16),
    "groups of 16 share a prompt": Rung(group=16),
    "deterministic: all fused": Rung(is_deterministic=True),
    "int8, XLA around the attention kernel": Rung(fused=None, quantization="int8"),
    "int8, all fused": Rung(quantization="int8"),
    "256 steps a dispatch": Rung(steps=256),
    "an MLP alone in int8, by tiles": Rung(quantization="int8", measure="tiles"),
    "samples with top-p": Rung(top_p=0.95),
    "a hybrid and experts beside a dense model": Rung(measure="kinds"),
    "an MLP alone, by cuBLAS and JAX's Hopper products": Rung(flags=CUBLAS, measure="hopper"),
    "an MLP alone in int8, by JAX's Hopper products": Rung(
        flags=CUBLAS, quantization="int8", measure="hopper"
    ),
    "base, products by cuBLAS": Rung(fused=None, flags=CUBLAS),
    "all fused, logits by cuBLAS": Rung(flags=CUBLAS),
    "all fused, command buffers over loops and branches": Rung(flags=ALL_BUFFERS),
    "all fused, no command buffers": Rung(flags=NO_BUFFERS),
    "base, no command buffers": Rung(fused=None, flags=NO_BUFFERS),
    "attention from projections on, no command buffers": Rung(fused=_ATTENTION, flags=NO_BUFFERS),
    "bench.py's workload, attention from projections on": Rung(fused=_ATTENTION, measure="bench"),
}


def use(fused: FusedProducts | None, *, is_smoke: bool) -> str:
    """Has engines that are built from now on use these; returns the name of their attention."""
    if fused is not None and is_smoke:
        fused = dataclasses.replace(fused, interpret=True)
    kernels = XlaKernels(fused=fused)
    backends.pick_kernels = lambda name, target: LinearBackend(name, kernels)
    if not is_smoke:
        return "pallas"
    made = InvariantKernels.make(interpret=True)
    InvariantKernels.make = lambda *, interpret=True: made
    pallas.gpu_problem = lambda target, head_dims: None
    pallas.gpu_attention = functools.partial(_GPU_ATTENTION, interpret=True)
    return "pallas"


class Ladder:
    """The rungs of one process, on the same random weights."""

    def __init__(self, sizes: Sizes, *, is_smoke: bool, reference: Path) -> None:
        """`reference` is the folder where XLA's code leaves its tokens and log-probs."""
        self.sizes, self.is_smoke, self.reference = sizes, is_smoke, reference

    @functools.cached_property
    def model(self) -> Qwen3:
        """Tunix's model, as all rungs have it."""
        return make_tunix_model(self.sizes.model, dtype=jnp.bfloat16, scale=0.02)

    def run(self, rung: Rung) -> dict[str, Any]:
        """One rung's results."""
        return MEASUREMENTS[rung.measure](self, rung)

    def rollout(
        self,
        rung: Rung,
        *,
        max_model_len: int,
        rows: int,
        buckets: tuple[int, ...] = (),
        num_kv_tokens: int | None = None,
    ) -> SglJaxRollout:
        """An engine of the rung; by default all rows are as long as may be, in one bucket."""
        options: dict[str, Any] = {} if rung.steps is None else {"decode_steps": rung.steps}
        return create_sgljax_rollout(
            self.model,
            IdTokenizer(),
            max_model_len=max_model_len,
            max_running_requests=rows,
            batch_buckets=(*buckets, rows),
            num_kv_tokens=num_kv_tokens or rows * (max_model_len + 16),
            attention_backend=use(rung.fused, is_smoke=self.is_smoke),
            linear_backend="xla",  # of a CPU: its own kernels have weights in another layout
            dtype="bfloat16",
            quantization=rung.quantization,
            enable_deterministic_sampling=rung.is_deterministic,
            **options,
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random prompts, the same each time."""
        rng = np.random.default_rng(1)
        return rng.integers(1, self.sizes.model.vocab_size, (count, length)).tolist()

    def decode(self, rung: Rung) -> dict[str, Any]:
        """Seconds of a decode step, after the check."""
        sizes = self.sizes
        context, steps, rows = sizes.context, sizes.num_steps, sizes.rows
        rollout = self.rollout(rung, max_model_len=context + steps + 1, rows=rows)
        group = min(rung.group, rows)
        prompts = [each for each in self.prompts(rows // group, context) for _ in range(group)]

        def run(new_tokens: int) -> float:
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, top_p=rung.top_p)
            return timed(lambda: rollout.engine.generate_requests(prompts, params))

        try:
            found = self.check(rollout, prompts, rung)
            if not found["is_right"]:
                return found
            step_s, first = self.step_seconds(run)
        finally:
            rollout.close()
        return found | {
            "step, ms": 1e3 * step_s,
            "tokens/s": rows / step_s,
            "first run, s": first,
        }

    def step_seconds(self, run: Callable[[int], float]) -> tuple[float, float]:
        """Seconds of a decode step, and of the first run; `run` returns those of so many tokens."""
        repeats, steps = self.sizes.repeats, self.sizes.num_steps
        first = run(steps + 1)
        run(1)
        once, full = (
            float(np.median([run(count) for _ in range(repeats)])) for count in (1, steps + 1)
        )
        return (full - once) / steps, first

    def check(self, rollout: SglJaxRollout, prompts: list[list[int]], rung: Rung) -> dict[str, Any]:
        """Greedy log-probs against those of XLA's code with such weights, if that has run.

        Where tokens part they have the same context, so the largest log-probs there count too.
        """
        params = SamplingParams(
            temperature=0.0, max_new_tokens=self.sizes.check_tokens, ignore_eos=True
        )
        outputs = rollout.engine.generate_requests(prompts, params)
        ours = [(output.output_ids, output.logprobs) for output in outputs]
        same = {"quantization": rung.quantization, "group": rung.group}
        reference = self.reference / f"{rung.quantization}_{rung.group}.json"
        if rung == dataclasses.replace(RUNGS[BASE], **same):
            reference.write_text(json.dumps(ours))
        if not reference.exists():
            return {"is_right": True, "largest difference": float("nan"), "compared tokens": 0}
        largest, compared = 0.0, 0
        base = json.loads(reference.read_text())
        for (ids, logprobs), (base_ids, base_logprobs) in zip(ours, base, strict=True):
            for i, token in enumerate(ids):
                largest = max(largest, abs(logprobs[i] - base_logprobs[i]))
                compared += 1
                if token != base_ids[i]:
                    break
        is_right = largest <= TOLERANCE
        return {"is_right": is_right, "largest difference": largest, "compared tokens": compared}

    def bench(self, rung: Rung) -> dict[str, Any]:
        """nano-vllm's bench.py: inputs and outputs uniform in a range, all at once."""
        sizes = self.sizes
        low, high = sizes.bench_lengths
        lengths = np.random.default_rng(0).integers(low, high + 1, (2, sizes.bench_requests))
        return self._at_once(rung, lengths, 2 * high)

    def served(self, rung: Rung) -> dict[str, Any]:
        """The workload of kvcached's issue 331: all requests of one length, all at once."""
        inputs, outputs = self.sizes.served_lengths
        lengths = np.repeat([[inputs], [outputs]], self.sizes.served_requests, axis=1)
        return self._at_once(rung, lengths, inputs + outputs + 1)

    def _at_once(self, rung: Rung, lengths: np.ndarray, max_model_len: int) -> dict[str, Any]:
        """Tokens a second of random requests with these inputs and outputs, int [2, N]."""
        rng, vocab = np.random.default_rng(1), self.sizes.model.vocab_size
        prompts = [rng.integers(1, vocab, length).tolist() for length in lengths[0]]
        params = [SamplingParams(max_new_tokens=int(n), ignore_eos=True) for n in lengths[1]]
        rows = len(prompts)
        rollout = self.rollout(
            rung,
            max_model_len=max_model_len,
            rows=rows,
            buckets=tuple(sorted({max(rows // 4, 1), max(rows // 2, 1)} - {rows})),
            num_kv_tokens=int(lengths.sum()) + 32 * rows,
        )
        try:
            first = timed(lambda: rollout.engine.generate_requests(prompts, params))
            rollout.engine.flush_cache()
            took = timed(lambda: rollout.engine.generate_requests(prompts, params))
        finally:
            rollout.close()
        num_tokens = int(lengths[1].sum())
        return {"tokens/s": num_tokens / took, "seconds": took, "first run, s": first}

    def kinds(self, rung: Rung) -> dict[str, Any]:
        """Tokens a second of decode, of models of other kinds and about one size."""
        sizes, shapes = self.sizes, hybrid.sizes(is_quick=self.is_smoke)
        width, found = shapes.dense.intermediate_size, dict[str, Any]()
        experts = dataclasses.replace(
            shapes.dense,
            architecture="Qwen3MoeForCausalLM",
            moe=MoEConfig(
                num_experts=8,
                num_experts_per_token=2,
                intermediate_size=width // 4,
                norm_topk_prob=True,
            ),
        )
        models = {"dense": shapes.dense, "hybrid": shapes.hybrid, "experts": experts}
        for name, model in models.items():
            with hybrid.engine_of(
                model,
                dtype="bfloat16",
                attention_backend=use(rung.fused, is_smoke=self.is_smoke),
                linear_backend="xla",
                num_kv_tokens=hybrid.NUM_ROWS[-1] * (shapes.prompt + sizes.num_steps + 32),
            ) as engine:
                prompts = hybrid.random_prompts(model, hybrid.NUM_ROWS[-1], shapes.prompt)

                def run(num: int, engine: Engine = engine, prompts: Any = prompts) -> float:
                    params = SamplingParams(max_new_tokens=num, ignore_eos=True)
                    return timed(lambda: engine.generate_requests(prompts, params))

                step_s, _ = self.step_seconds(run)
            found[f"{name}, tokens/s"] = hybrid.NUM_ROWS[-1] / step_s
        return found

    def prefill(self, rung: Rung) -> dict[str, Any]:
        """Attention kernels alone; prompt tokens a second of a lone prompt with its one token."""
        sizes, found = self.sizes, dict[str, Any]()
        if rung.fused is not None:
            found |= dict(measure_prefill_kernels(is_smoke=self.is_smoke))
        rollout = self.rollout(rung, max_model_len=max(sizes.prefill_tokens) + 1, rows=1)
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        try:
            for length in sizes.prefill_tokens:
                prompts = self.prompts(1, length)
                times = []
                for _ in range(sizes.repeats + 1):
                    rollout.engine.flush_cache()
                    times.append(
                        timed(lambda p=prompts: rollout.engine.generate_requests(p, params))
                    )
                found[f"{length} tokens, tokens/s"] = length / float(np.median(times[1:]))
        finally:
            rollout.close()
        return found

    def products(self, rung: Rung) -> dict[str, Any]:
        """Microseconds of an MLP, a layer after the other, by rows and variants."""
        is_int8, model = rung.quantization is not None, self.sizes.model
        if rung.measure == "tiles":
            counts = self.sizes.tile_rows
            variants = gpu_products.tiles(is_int8=is_int8, is_smoke=self.is_smoke)
        else:
            counts = self.sizes.hopper_rows
            variants = gpu_products.hopper_int8() if is_int8 else gpu_products.hopper()
        found: dict[str, Any] = {}
        for rows in counts:
            for name, took in gpu_products.measure(
                (model.hidden_size, model.intermediate_size),
                rows,
                variants,
                is_int8=is_int8,
                is_smoke=self.is_smoke,
            ):
                found[f"{name}, {rows} rows, us"] = took
        return found

    def jax(self, rung: Rung) -> dict[str, Any]:
        """Which JAX runs, what it says of our kernels, and whether one of them is right."""
        del rung
        device = jax.devices()[0]
        x, weight = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = jax.jit(functools.partial(linear.linear_add, interpret=self.is_smoke))(
                x, weight, x
            )
        error = np.abs(np.asarray(out, np.float64) - _exact(x) - _exact(x) @ _exact(weight))
        if not error.max() < 0.1:  # of sums of 64, rounded to bfloat16
            raise RuntimeError(f"linear_add is wrong by {error.max():.3g}")
        lowering = {str(each.message) for each in caught if "lowering" in str(each.message)}
        return {
            "JAX": jax.__version__,
            "compute capability": str(getattr(device, "compute_capability", "none")),
            "largest error": float(np.max(error)),
            "warnings of its lowering": "; ".join(sorted(lowering)) or "none",
        }


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


MEASUREMENTS: dict[str, Callable[[Ladder, Rung], dict[str, Any]]] = {
    "jax": Ladder.jax,
    "decode": Ladder.decode,
    "rollouts": gpu_training.rollouts,
    "interruptions": gpu_training.interruptions,
    "mismatch": gpu_training.mismatch,
    "bench": Ladder.bench,
    "served": Ladder.served,
    "kinds": Ladder.kinds,
    "grpo": gpu_training.grpo,
    "prefill": Ladder.prefill,
    "tiles": Ladder.products,
    "hopper": Ladder.products,
}
