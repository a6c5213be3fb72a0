"""Word problems for the recipe of the tests: rows as Tunix's GSM8K module makes them.

The recipe names this module; `tunix-sgljax tunix` finds it in the folder where it is called.
"""

from __future__ import annotations

import grain


def create_dataset(num: int) -> grain.MapDataset:
    """What `data_module` must have; `data_config` holds the arguments."""
    questions = [(f"Ann has {i} pens, Bob {2 * i}. How many?", str(3 * i)) for i in range(num)]
    rows = [{"prompts": f"Q: {text}", "question": text, "answer": sum_} for text, sum_ in questions]
    return grain.MapDataset.source(rows)
