"""Writes the next token's probabilities that transformers computes from generated files.

Run by hand, never by the test suite, which needs no torch:

    python -m venv goldvenv
    goldvenv/bin/pip install "transformers==5.24.0" "numpy>=2" "torch==2.13.0"  # its CPU build
    goldvenv/bin/python -m tests.folders.make_generation_goldens

generation_goldens.npz has `probs`, float32[files, moments, V]: what is left of LOGITS when the
processors of `generate` have seen them. top_k is 0 where a file has none: transformers would take
50, vLLM, SGLang and this engine take all.
"""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from tests.folders.generation_cases import LOGITS, OUTPUTS, PROMPT, VOCAB_SIZE, honoured


def probabilities(model: Any, contents: dict[str, Any]) -> np.ndarray:
    """Probabilities after PROMPT and each of OUTPUTS: float32[moments, V]."""
    config = GenerationConfig.from_dict({"top_k": 0, **contents})
    defaults = config._get_default_generation_params()
    config.update(**{k: v for k, v in defaults.items() if getattr(config, k) is None})
    if contents.get("top_k") is None:
        config.top_k = 0
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(PROMPT),
        encoder_input_ids=torch.tensor([PROMPT]),
        logits_processor=LogitsProcessorList(),
        device="cpu",
    )
    found = []
    for output in OUTPUTS:
        scores = processors(torch.tensor([[*PROMPT, *output]]), torch.tensor([LOGITS]))
        found.append(torch.softmax(scores[0], -1).numpy())
    return np.stack(found)


def main() -> None:
    """Writes the file beside this one."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    probs = np.stack([probabilities(model, contents) for contents in honoured()])
    path = Path(__file__).with_name("generation_goldens.npz")
    np.savez_compressed(path, probs=probs.astype(np.float32))


if __name__ == "__main__":
    main()
