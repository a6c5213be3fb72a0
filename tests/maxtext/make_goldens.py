"""Writes tests/golden/maxtext.json: configs and parameters of small MaxText models.

    python -m tests.maxtext.make_goldens

Tests read the file where no MaxText is installed. Of each config it has the fields that the
converter and the rules read.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

from flax import nnx

from sgljax_engine import flatten_named
from tests.maxtext import agreement
from tunix_sgljax.maxtext.model_config import to_model_config
from tunix_sgljax.maxtext.rules import to_rules

OUTPUT = Path(__file__).parents[1] / "golden" / "maxtext.json"


class Recorder:
    """A config that records what is read of it."""

    def __init__(self, config: Any) -> None:
        """Wraps a MaxTextConfig."""
        self._config = config
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        self.read[name] = value.value if isinstance(value, enum.Enum) else value
        return value


def main() -> None:
    """Writes each family scanned and tied, and flat with a head of its own."""
    content = {}
    for case in agreement.CASES:
        if case.is_scanned == case.is_tied:
            actor = agreement.make_actor(case, "float32")
            recorder = Recorder(actor.config)
            to_model_config(recorder, context_length=64)
            to_rules(recorder)
            params = flatten_named(nnx.state(actor.model, nnx.Param))
            content[str(case)] = {
                "config": dict(sorted(recorder.read.items())),
                "parameters": {name: list(x.shape) for name, x in params.items()},
            }
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in content.items())
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
