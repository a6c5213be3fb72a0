"""GRPO on addition whose completions come from a fleet: servers on this machine, of which any dies.

    python examples/fleet/run.py                             # two workers, known by their addresses
    python examples/fleet/run.py --workers 3 --router vllm   # behind a router: sglang or vllm
    python examples/fleet/run.py --kill-every 5 --minutes 10 # kill -9 of a random worker, for ever
    python examples/fleet/run.py --embedded                  # the same run without a fleet

This process trains and has no engine. It starts the others, restarts those that end, and ends all
of them whatever happens to it. See docs/fleet.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/

from fleet.launch import main

if __name__ == "__main__":
    sys.exit(main())
