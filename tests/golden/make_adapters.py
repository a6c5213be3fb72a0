"""Writes the adapters of which `make_peft_goldens.py` has PEFT compute the logits.

    python tests/golden/make_adapters.py

Run by hand, in the development environment, when what `convert --peft` writes has changed on
purpose; then run the other script. Pairs are drawn by tests/cli/lora_checkpoints.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent
sys.path.insert(0, str(GOLDEN.parents[1]))

from tests.cli import lora_checkpoints as checkpoints  # noqa: E402
from tunix_sgljax.cli.main import main  # noqa: E402


def write(name: str, rules: str) -> None:
    """Writes the adapter of one golden model."""
    output = GOLDEN / "adapters" / name
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = checkpoints.save(checkpoints.make(name, rules), Path(scratch) / "root")
        argv = [root, "--base", name, "--output", output, "--peft"]
        argv += ["--lora-alpha", checkpoints.ALPHA]
        code = main(["convert", *map(str, argv)])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    os.chdir(GOLDEN)  # so that adapters name their base alone
    for _name, _rules in checkpoints.ADAPTERS.items():
        write(_name, _rules)
