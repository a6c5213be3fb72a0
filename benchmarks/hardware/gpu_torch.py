"""PyTorch's attention and transformers' `generate` on the same GPU; see gpu.py.

Both run in this process, in the memory that JAX leaves free.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.hardware.gpu_engine import EngineSizes, timed, workload
from benchmarks.hardware.gpu_kernels import Ceilings, KernelResult, KernelSizes
from benchmarks.lib.torch_model import make_hf_config
from tunix_sgljax.model_config import to_model_config

_ROUNDS = 32


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def _torch() -> Any:
    # By name, for the type checker: the development environment has no torch.
    return importlib.import_module("torch")


def _device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _seconds_per_round(torch: Any, run: Callable[[int], object], seconds: float) -> float:
    """The median of five times, each of as many rounds as fill `seconds`."""

    def batch(rounds: int) -> None:
        for number in range(rounds):
            run(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    batch(3)
    rounds = max(int(seconds / (timed(lambda: batch(_ROUNDS)) / _ROUNDS)), _ROUNDS)
    return float(np.median([timed(lambda: batch(rounds)) for _ in range(5)])) / rounds


def measure_torch_attention(sizes: KernelSizes, ceilings: Ceilings) -> Iterator[KernelResult]:
    """`scaled_dot_product_attention` over keys that lie together, for decode and for prefill."""
    torch = _torch()
    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"dtype": torch.bfloat16, "device": _device(torch)}
    heads, kv_heads, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    token_bytes = 2 * 2 * kv_heads * dim
    for batch in sizes.batches:
        for context in sizes.contexts:
            row_bytes = batch * context * token_bytes
            sets = max(min(sizes.min_pool_bytes // row_bytes, _ROUNDS), 1)
            q = torch.randn(batch, heads, 1, dim, **options)
            k, v = (torch.randn(sets, batch, kv_heads, context, dim, **options) for _ in "kv")

            def decode(number: int, q: Any = q, k: Any = k, v: Any = v, sets: int = sets) -> Any:
                return attend(q, k[number % sets], v[number % sets], enable_gqa=True)

            time_s = _seconds_per_round(torch, decode, sizes.seconds)
            limit_s = row_bytes / ceilings.bytes_per_s
            yield KernelResult("decode", "torch", batch, context, time_s, limit_s)
            del q, k, v
    tokens = sizes.prefill_tokens
    q = torch.randn(1, heads, tokens, dim, **options)
    k, v = (torch.randn(1, kv_heads, tokens, dim, **options) for _ in "kv")
    time_s = _seconds_per_round(
        torch, lambda _: attend(q, k, v, is_causal=True, enable_gqa=True), sizes.seconds
    )
    limit_s = 4.0 * dim * heads * tokens * (tokens + 1) / 2 / ceilings.flops_per_s
    yield KernelResult("prefill", "torch", 1, tokens, time_s, limit_s)


def measure_transformers(sizes: EngineSizes) -> Iterator[dict[str, Any]]:
    """`generate` of transformers on the rollouts' prompts: all rows run to the longest output."""
    torch = _torch()
    from transformers import GenerationConfig, Qwen3ForCausalLM

    config = make_hf_config(to_model_config(sizes.model, context_length=4096))
    with torch.device(_device(torch)):
        model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    prompts, lengths = workload(sizes)
    width, longest = max(map(len, prompts)), max(lengths)
    ids = np.array([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    inputs = {
        "input_ids": torch.tensor(ids, device=_device(torch)),
        "attention_mask": torch.tensor((ids != 0).astype(np.int64), device=_device(torch)),
    }

    def run(num_tokens: int) -> None:
        options = GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
        )
        with torch.inference_mode():
            output = model.generate(**inputs, generation_config=options)
        assert output.shape[1] == width + num_tokens
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    first_s = timed(lambda: run(2))
    seconds = timed(lambda: run(longest))
    yield {
        "contestant": "transformers generate",
        "useful tokens/s": sum(lengths) / seconds,
        "seconds": seconds,
        "step, ms": 1e3 * seconds / longest,
        "first run, s": first_s,
    }
