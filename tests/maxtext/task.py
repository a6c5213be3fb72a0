"""What MaxText loads by its path: how a row becomes a prompt, and its reward."""

from __future__ import annotations

import json
from typing import Any


def process_data(
    dataset_name: str, model_tokenizer: Any, template_config: Any, tmvp_config: Any, x: Any
) -> dict[str, str]:
    """A row as MaxText's trainer expects it."""
    return {
        "prompts": x["question"],
        "question": x["question"],
        "answer": json.dumps([x["answer"]]),
    }


def share_of_e(prompts: Any, completions: Any, tmvp_config: Any, **kwargs: Any) -> list[float]:
    """The share of a completion's characters that are an e."""
    return [text.count("e") / max(len(text), 1) for text in completions]
