"""Writes transformers' answers to the folders of cases.py into answers.npz.

Run by hand, never by the test suite, which needs no torch:

    python -m venv goldvenv
    goldvenv/bin/pip install "transformers==5.24.0" "numpy>=2" "torch==2.13.0"
    PYTHONPATH=. goldvenv/bin/python tests/folders/make_goldens.py

Everything runs on the CPU in float32 on one thread, with no network access, eager attention and
plain loops over experts. Each folder is written to a temporary place and loaded with dtype="auto",
then in float32, by the class that a multimodal folder names, else by AutoModelForCausalLM.

answers.npz holds

    logprobs  float32[R, T - 1]  Distinct rows of log-probs of tokens 1 to T of `drafts.TOKENS`.
    facts     uint8[...]         JSON: by the folder's name an object. `error`: why transformers
        refuses it; otherwise `dtype`, `tied`, `eps`, `context`, the weights it reports as
        `missing` (and makes up), `unexpected` (and drops) or `mismatched`, those of the vision
        tower left out, and `row` of its log-probs if no weight is missing.
"""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.folders.cases import cases
from tests.folders.drafts import TOKENS, Draft

logger = logging.getLogger("make_goldens")

OUT = Path(__file__).with_name("answers.npz")
_VISION = ("vision", "visual", "multi_modal_projector", "embed_vision", "embed_audio", "audio")
_MAX_NAMES = 3
_MAX_CHARS = 160


def load(draft: Draft, folder: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """The model of a folder, and what was loaded of it."""
    name = draft.family.architecture if draft.family.is_multimodal else "AutoModelForCausalLM"
    model, info = getattr(transformers, name).from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    return model.eval(), info


def answer(draft: Draft, folder: Path) -> tuple[dict[str, Any], np.ndarray | None]:
    """What transformers makes of a folder."""
    draft.write(folder)
    try:
        model, info = load(draft, folder, "auto")
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype != "float32":
            model, info = load(draft, folder, torch.float32)
        ids = torch.from_numpy(TOKENS.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        logps = torch.log_softmax(logits[:-1].double(), dim=-1).numpy()
        found = np.take_along_axis(logps, TOKENS[1:, None].astype(np.int64), axis=-1)[:, 0]
    except Exception as error:  # whatever transformers raises is its answer
        text = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {text}"[:_MAX_CHARS]}, None
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    text = model.config.get_text_config()
    facts: dict[str, Any] = {
        "dtype": dtype,
        "tied": head.data_ptr() == table.data_ptr(),
        "eps": text.rms_norm_eps,
        "context": text.max_position_embeddings,
    }
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        names = [name for name in names if not any(part in name for part in _VISION)]
        if names:
            facts[kind] = names[:_MAX_NAMES]
    return facts, None if "missing" in facts else found.astype(np.float32)  # else random


def main() -> None:
    """Writes the answers of all folders."""
    parser = argparse.ArgumentParser(description="Write what transformers makes of the folders.")
    parser.add_argument("--only", default="", help="print the folders whose names begin so")
    parser.add_argument("--add", action="store_true", help="keep the answers that are there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    known: dict[str, dict[str, Any]] = {}
    if args.add:
        with np.load(OUT, allow_pickle=False) as file:
            known, stored = json.loads(file["facts"].tobytes()), file["logprobs"]
    facts: dict[str, Any] = {}
    rows: dict[bytes, int] = {}
    for name, draft in cases().items():
        if not name.startswith(args.only):
            continue
        if name in known:
            facts[name] = known[name]
            if "row" in known[name]:
                row = stored[known[name]["row"]].tobytes()
                facts[name]["row"] = rows.setdefault(row, len(rows))
            continue
        with tempfile.TemporaryDirectory() as scratch:
            facts[name], found = answer(draft, Path(scratch))
        if found is not None:
            facts[name]["row"] = rows.setdefault(found.tobytes(), len(rows))
        if args.only:
            logger.info("%s: %s", name, facts[name])
    logger.info("%d folders, %d rows", len(facts), len(rows))
    if args.only:
        return
    logprobs = np.stack([np.frombuffer(row, np.float32) for row in rows])
    text = np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8)
    np.savez_compressed(OUT, allow_pickle=False, logprobs=logprobs, facts=text)


if __name__ == "__main__":
    main()
