"""Loads the adapters of adapters/ with PEFT, and writes what it computes with them.

Run by hand, never by the test suite, which needs neither torch nor PEFT:

    python -m venv goldvenv
    goldvenv/bin/pip install "transformers==5.24.0" "peft==0.21.2" "numpy>=2" "torch==2.13.0"
    goldvenv/bin/python tests/golden/make_peft_goldens.py

Everything runs on the CPU in float32 on one thread, with no network access. Each adapter, as
`make_adapters.py` wrote it with `tunix-sgljax convert --peft`, gets a `peft.npz`, P being the
number of prompts:

    prompt_<i>   int32[L_i]       Token ids of prompt i, 0 <= i < P.
    logits_<i>   float32[L_i, V]  Logits at every position.
    num_prompts  int64[]          P.

An adapter of which PEFT does not load every tensor into a module of its own, and one that changes
nothing, are errors. So is one that PEFT merges into other logits than it computes beside the base.
"""

# The development environment has neither torch nor PEFT.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import PeftModel
from safetensors.numpy import load_file

logger = logging.getLogger("make_peft_goldens")

GOLDEN = Path(__file__).parent
MAX_MERGED_ERROR = 1e-3
MIN_CHANGE = 0.1


def forward(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:
    """Returns the logits [L, V] of one sequence, with no cache and no padding."""
    input_ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits[0].numpy()


def load_base(folder: Path) -> transformers.PreTrainedModel:
    """Loads a golden model in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def check_loaded(model: PeftModel, adapter: Path) -> None:
    """Raises unless PEFT has exactly the adapter's tensors, value for value."""
    stored = load_file(adapter / "adapter_model.safetensors")
    loaded = {
        name.replace(".default.", "."): param.detach().numpy()
        for name, param in model.named_parameters()
        if ".lora_" in name
    }
    if loaded.keys() != stored.keys():
        raise RuntimeError(f"{adapter}: loaded {sorted(loaded)}, stored {sorted(stored)}")
    for name, array in stored.items():
        if not np.array_equal(loaded[name], array):
            raise RuntimeError(f"{adapter}: {name} was not loaded")


def write(adapter: Path) -> None:
    """Writes the golden file of one adapter."""
    base = load_base(GOLDEN / adapter.name)
    known = np.load(GOLDEN / adapter.name / "golden.npz")
    prompts = [known[f"prompt_{i}"] for i in range(int(known["num_prompts"]))][-3:]
    without: list[np.ndarray] = []
    arrays: dict[str, np.ndarray] = {"num_prompts": np.array(len(prompts), np.int64)}
    for i, prompt in enumerate(prompts):
        arrays[f"prompt_{i}"] = prompt
        without.append(forward(base, prompt))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)  # PEFT: tensors are missing
        model = PeftModel.from_pretrained(base, adapter)
    check_loaded(model, adapter)
    for i, prompt in enumerate(prompts):
        arrays[f"logits_{i}"] = forward(model, prompt)
    merged = model.merge_and_unload()
    errors, changes = [], []
    for i, prompt in enumerate(prompts):
        errors.append(np.abs(forward(merged, prompt) - arrays[f"logits_{i}"]).max())
        changes.append(np.abs(without[i] - arrays[f"logits_{i}"]).max())
    logger.info("%s: merged %.1e, changed %.2f", adapter.name, max(errors), min(changes))
    if max(errors) > MAX_MERGED_ERROR or min(changes) < MIN_CHANGE:
        raise RuntimeError(f"{adapter}: merged {errors}, changed {changes}")
    np.savez_compressed(adapter / "peft.npz", allow_pickle=False, **arrays)


def main() -> None:
    """Writes every golden file."""
    argparse.ArgumentParser(description="Write what PEFT computes.").parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for adapter in sorted((GOLDEN / "adapters").iterdir()):
        write(adapter)


if __name__ == "__main__":
    main()
