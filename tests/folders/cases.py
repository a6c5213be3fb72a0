"""The folders: each family alone, each edit of each family, and random walks over edits.

Runs without JAX and without torch.
"""

from __future__ import annotations

import functools

import numpy as np

from tests.folders.drafts import Draft
from tests.folders.edits import EDITS, SETTING_EDITS, Edit
from tests.folders.families import FAMILIES
from tests.folders.file_edits import FILE_EDITS
from tests.folders.rope_edits import ROPE_EDITS

WALKS_OF_A_FAMILY = 10
_FIRST = ("dim", "tie", "files")
"""Parts whose edits make weights anew, before others change their names or dtypes."""


@functools.cache
def cases() -> dict[str, Draft]:
    """All folders by name; the same ones in each process."""
    found: dict[str, Draft] = {}
    for family in FAMILIES:
        edits = [
            edit
            for edit in (*SETTING_EDITS, *ROPE_EDITS, *EDITS, *FILE_EDITS)
            if family in edit.families
        ]
        chosen: list[tuple[Edit, ...]] = [(), *((edit,) for edit in edits)]
        rng = np.random.default_rng([57, *family.encode()])
        chosen += [_walk(edits, rng) for _ in range(WALKS_OF_A_FAMILY)]
        for each in chosen:
            draft = Draft.of(family)
            for edit in each:
                edit.apply(draft)
            draft.name = " + ".join([family, *(edit.name for edit in each)])
            found[draft.name] = draft
    return found


def _walk(edits: list[Edit], rng: np.random.Generator) -> tuple[Edit, ...]:
    """Two to four edits of different parts, in an order in which they can be applied."""
    walk: dict[str, Edit] = {}
    count = int(rng.integers(2, 5))
    for index in rng.permutation(len(edits)):
        walk.setdefault(edits[index].part, edits[index])
        if len(walk) == count:
            break
    order = {part: place for place, part in enumerate(_FIRST)}
    return tuple(sorted(walk.values(), key=lambda edit: order.get(edit.part, len(order))))
