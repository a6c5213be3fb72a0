"""Writes what PEFT computes with the adapters of adapter_cases.py into adapter_answers.npz.

Run by hand, never by the test suite, which needs neither torch nor PEFT; see make_goldens.py:

    goldvenv/bin/pip install "peft==0.21.2"
    PYTHONPATH=. goldvenv/bin/python tests/folders/make_adapter_goldens.py

adapter_answers.npz holds

    logprobs  float32[R, T - 1]  Log-probs of tokens 1 to T of `drafts.TOKENS`.
    facts     uint8[...]         JSON: by the adapter's name an object. `error`: why PEFT refuses
        it; otherwise the `row` of its log-probs, and whether it says that tensors are `missing`.
"""

# The development environment has neither torch nor PEFT.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel

from tests.folders.adapter_cases import Adapter, cases
from tests.folders.drafts import TOKENS
from tests.folders.make_goldens import load

OUT = Path(__file__).with_name("adapter_answers.npz")
_MAX_CHARS = 160


def answer(adapter: Adapter, folder: Path) -> tuple[dict[str, Any], np.ndarray | None]:
    """What PEFT makes of an adapter."""
    base = folder / "base"
    base.mkdir()
    adapter.base.write(base)
    adapter.write(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            model, _ = load(adapter.base, base, torch.float32)
            torch.manual_seed(57)
            model = PeftModel.from_pretrained(model, folder).eval()
            ids = torch.from_numpy(TOKENS.astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0]
        except Exception as error:  # whatever PEFT raises is its answer
            text = " ".join(str(error).split())
            return {"error": f"{type(error).__name__}: {text}"[:_MAX_CHARS]}, None
    logps = torch.log_softmax(logits[:-1].double(), dim=-1).numpy()
    found = np.take_along_axis(logps, TOKENS[1:, None].astype(np.int64), axis=-1)[:, 0]
    return {"missing": any("missing adapter keys" in str(each.message) for each in told)}, found


def main() -> None:
    """Writes the answers."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    facts: dict[str, Any] = {}
    rows: list[np.ndarray] = []
    for name, adapter in cases().items():
        with tempfile.TemporaryDirectory() as scratch:
            fact, row = answer(adapter, Path(scratch))
        if row is not None:
            fact["row"] = len(rows)
            rows.append(row.astype(np.float32))
        facts[name] = fact
        print(name, fact)  # noqa: T201
    packed = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    np.savez_compressed(OUT, allow_pickle=False, logprobs=np.array(rows), facts=packed)


if __name__ == "__main__":
    main()
