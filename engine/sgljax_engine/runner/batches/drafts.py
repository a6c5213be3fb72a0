"""Host arrays of what rows may draft from; the rules of `runner.batches.batch` apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.runner.programs.drafts import NO_TOKEN, TEXT_CHUNK, DraftBatch
from sgljax_engine.speculation.plan import RowDrafts
from sgljax_engine.speculation.texts import MATCHED_TOKENS

_REFERENCE_TOKENS = 8192
_OWN_TOKENS = 2048
_REFERENCES_OF_MODEL_LEN = 16


class TextSizes(NamedTuple):
    """Tokens of a text: references with an end mark each, own tokens, and new ones."""

    references: int
    own: int
    grown: int

    @classmethod
    def of(cls, max_model_len: int, grown: int) -> TextSizes:
        """Sizes for sequences of up to `max_model_len` tokens."""
        longest = min(_REFERENCES_OF_MODEL_LEN * (max_model_len + 1), _REFERENCE_TOKENS)
        return cls(longest, min(max_model_len, _OWN_TOKENS), grown)

    @property
    def total(self) -> int:
        """Entries: those before the first token, and whole chunks of the search."""
        return MATCHED_TOKENS + -(-sum(self) // TEXT_CHUNK) * TEXT_CHUNK


def build_draft_batch(
    rows: Sequence[RowDrafts], size: int, sizes: TextSizes, row_tokens: int
) -> DraftBatch:
    """Texts of the rows of a decode batch; padding rows have none.

    Where not all references fit, the most useful do, and of the last one its first tokens.
    """
    text = np.full((size, sizes.total), NO_TOKEN, np.int32)
    ends = np.zeros((size, 2), np.int32)
    num_text = np.zeros(size, np.int32)
    drafts_own = np.zeros(size, bool)
    for index, row in enumerate(rows):
        room = sizes.references
        siblings = _fitting(row.siblings, room // 2 if row.history else room)
        history = _fitting(row.history, room - sum(len(each) + 1 for each in siblings))
        end = MATCHED_TOKENS
        for part, references in enumerate((history, siblings)):
            for reference in references:
                text[index, end : end + len(reference)] = reference
                end += len(reference) + 1
            ends[index, part] = end
        own = row.own[-sizes.own :]
        text[index, end : end + len(own)] = own
        num_text[index] = end + len(own)
        drafts_own[index] = row.drafts_own
    places = np.arange(row_tokens, dtype=np.int32)
    arrays: Any = (text, ends, num_text, drafts_own, places)
    return DraftBatch(*arrays)


def _fitting(references: Sequence[np.ndarray], room: int) -> list[np.ndarray]:
    """The last references, in their order, with an entry behind each, in so many entries."""
    taken: list[np.ndarray] = []
    for reference in reversed(references):
        if room < 2:
            break
        taken.append(reference[: room - 1])
        room -= len(taken[-1]) + 1
    return taken[::-1]
