"""The checks behind the claims of exactness; test_negative_controls.py shows that each can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sgljax_engine import Engine, SamplingParams
from tests.engine.determinism_cases import Bits, differing
from tests.engine.models import random_prompts

Golden = Mapping[str, np.ndarray]
"""What transformers computed for a checkpoint."""


def golden_prompts(golden: Golden) -> list[list[int]]:
    return [golden[f"prompt_{i}"].tolist() for i in range(int(golden["num_prompts"]))]


def check_golden(engine: Engine, golden: Golden) -> None:
    """Greedy tokens and their log-probs, all prompts in one batch."""
    params = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)
    outputs = engine.generate_requests(golden_prompts(golden), params)
    for i, output in enumerate(outputs):
        assert output.output_ids == golden[f"greedy_{i}"].tolist()
        np.testing.assert_allclose(output.logprobs, golden[f"greedy_logps_{i}"], atol=1e-4)
        assert output.scaled_logprobs == output.logprobs


def check_golden_scores(engine: Engine, golden: Golden) -> None:
    """Log-probs of the prompts."""
    prompts = golden_prompts(golden)
    for i, (prompt, found) in enumerate(zip(prompts, engine.score(prompts), strict=True)):
        logits = golden[f"logits_{i}"].astype(np.float64)
        peak = logits.max(-1, keepdims=True)
        logps = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        expected = logps[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def check_bits(found: Sequence[Bits], expected: Sequence[Bits]) -> None:
    """Tokens and log-probs of each request, to the last bit."""
    assert differing(found, expected) == []


def check_scaled_logprobs(engine: Engine, temperature: float) -> None:
    """What decoding reports is what scoring at the same temperature finds."""
    prompts = [ids for ids in random_prompts(6, 1, 40) for _ in range(3)]
    params = [
        SamplingParams(max_new_tokens=20, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    outputs = engine.generate_requests(prompts, params)
    sequences = [[*p, *o.output_ids] for p, o in zip(prompts, outputs, strict=True)]
    scored = engine.score(sequences, temperature, [len(prompt) for prompt in prompts])
    for output, logprobs in zip(outputs, scored, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, output.scaled_logprobs, atol=2e-5)


def check_update_leaves_no_prefix(
    engine: Engine, fresh: Engine, weights: Mapping[str, Any], prompt: list[int]
) -> None:
    """After an update, a prompt that was cached is computed anew: as an engine that knew no other.

    Args:
        engine: With a prefix cache and other weights.
        fresh: With these weights from the start.
        weights: Of the update.
        prompt: A prompt of more than a page.
    """
    old = _greedy(engine, prompt).output_ids
    engine.update_weights(weights)
    assert engine.get_internal_state().cached_kv_tokens == 0
    expected = _greedy(fresh, prompt).output_ids
    assert expected != old
    first, again = _greedy(engine, prompt), _greedy(engine, prompt)
    assert first.num_cached_tokens == 0 < again.num_cached_tokens
    assert first.output_ids == again.output_ids == expected


def check_reuse_changes_nothing(engine: Engine, reference: Engine, prompt: list[int]) -> None:
    """A prompt whose pages are cached goes on as in an engine without a cache."""
    first, again = _greedy(engine, prompt), _greedy(engine, prompt)
    assert first.num_cached_tokens < again.num_cached_tokens
    assert first.output_ids == again.output_ids == _greedy(reference, prompt).output_ids


def check_weights(engine: Engine, weights: Mapping[str, Any], checksums: dict[str, str]) -> None:
    """The engine holds the bits of these weights, whose checksums were taken before."""
    assert engine.find_differing_weights(weights) == []
    assert engine.get_weights_checksum() == checksums


def _greedy(engine: Engine, prompt: list[int]) -> Any:
    params = SamplingParams(temperature=0, max_new_tokens=8)
    return engine.generate_requests([prompt], params)[0]
