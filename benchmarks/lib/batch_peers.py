"""transformers' generate, measured."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import numpy as np

from tunix_sgljax.bench.shapes import PAD_ID
from tunix_sgljax.bench.vanilla import BatchPeer
from tunix_sgljax.bench.workloads import Workload

TRANSFORMERS = "transformers"


class TransformersPeer(BatchPeer):
    """Hugging Face's `generate` on torch, eager, all cores, left-padded with an attention mask."""

    def __init__(self, torch_model: Any, workload: Workload, batch_size: int | None) -> None:
        """Takes a torch model; `batch_size` None takes all requests in one batch."""
        super().__init__(TRANSFORMERS, workload, batch_size)
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = torch_model

    def run_batch(self, prompts: list[list[int]], num_steps: int, is_greedy: bool) -> list[Any]:
        """See `BatchPeer`."""
        torch = self._torch
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), PAD_ID, np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        sampling = {} if is_greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = self._model.generate(
                torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                max_new_tokens=num_steps,
                do_sample=not is_greedy,
                pad_token_id=PAD_ID,
                **sampling,
            )
        return list(output[:, longest:].numpy())
