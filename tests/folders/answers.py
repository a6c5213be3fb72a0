"""transformers' answers to the folders, and how ours compare with them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine import EngineError, ModelConfig
from tests.folders import ours
from tests.folders.drafts import Draft

ANSWERS = Path(__file__).with_name("answers.npz")
TOLERANCE = 5e-3
"""Difference of log-probs that float32 explains; what is read wrongly makes more than 0.02.

Only rms_norm_eps makes less, and is compared itself.
"""


@functools.cache
def answers() -> tuple[dict[str, dict[str, Any]], np.ndarray]:
    """Facts by the folder's name, and the rows of log-probs; see make_goldens.py."""
    with np.load(ANSWERS, allow_pickle=False) as stored:
        return json.loads(stored["facts"].tobytes()), stored["logprobs"]


class Verdict(NamedTuple):
    """How a folder compares.

    Attributes:
        kind: "equal"; "both refuse", which includes weights that transformers makes up; "refused"
            by us alone; "lenient", refused, or completed with random weights, by transformers
            alone; "wrong".
        reason: Our error, or the difference.
    """

    kind: str
    reason: str = ""


def _asked_context(model: ModelConfig, asked: int) -> int:
    """max_position_embeddings, also of a context that YaRN extends."""
    yarn = model.rope.yarn
    return asked if yarn and model.context_length == yarn.context_length else model.context_length


class Comparer:
    """Compares folders; those that read to the same model and weights are computed once."""

    def __init__(self, logprobs: Callable[[ours.Found], np.ndarray] = ours.logprobs) -> None:
        """Has computed nothing yet."""
        self._logprobs = logprobs
        self._known: dict[str, np.ndarray] = {}

    def compare(self, draft: Draft) -> Verdict:
        """Compares what a folder is read as."""
        facts, rows = answers()
        answer = facts[draft.name]
        is_refused = "error" in answer or "row" not in answer
        with tempfile.TemporaryDirectory() as scratch:
            draft.write(Path(scratch))
            try:
                found = ours.read(Path(scratch))
            except EngineError as error:
                reason = str(error).replace(scratch, "FOLDER")
                return Verdict("both refuse" if is_refused else "refused", reason)
        if "error" in answer:
            return Verdict("lenient", answer["error"])
        if "row" not in answer:
            return Verdict("lenient", f"missing {answer['missing']}")
        for name, read in (
            ("dtype", found.dtype),
            ("eps", found.model.rms_norm_eps),
            ("context", _asked_context(found.model, answer["context"])),
            ("tied", found.model.tie_word_embeddings),
        ):
            if read != answer[name]:
                return Verdict("wrong", f"{name} {read!r}, transformers has {answer[name]!r}")
        if found.key not in self._known:
            self._known[found.key] = self._logprobs(found)
        error = np.abs(self._known[found.key] - rows[answer["row"]]).max()
        if not error <= TOLERANCE:
            return Verdict("wrong", f"log-probs differ by {error:.3g}")
        return Verdict("equal")
