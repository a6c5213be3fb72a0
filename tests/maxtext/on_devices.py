"""Runs the command on the devices of this process, and writes what a test looks at.

python -m tests.maxtext.on_devices NUM_STEPS key=value ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.maxtext.runs import command


def main(num_steps: int, overrides: list[str]) -> int:
    """Trains, and writes one line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        run = command(Path(folder), num_steps, *overrides)
    mesh = run.rollout.mesh
    assert mesh is not None
    found = {
        "version": run.rollout.weight_version,
        "num_differing": [len(names) for names in run.differing],
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "num_engines": run.num_engines,
        "num_samples": [len(texts) for texts in run.texts],
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
