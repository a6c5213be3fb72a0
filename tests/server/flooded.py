"""A server in a process of its own: prints its address, ends with its standard input."""

from __future__ import annotations

import sys

from sgljax_engine import Engine
from tests.server.served import FOLDER, OPTIONS

if __name__ == "__main__":
    with Engine(FOLDER, **OPTIONS) as engine:
        engine.generate("a", {"max_new_tokens": 1})
        sys.stdout.write(f"{engine.serve(port=0).url}\n")
        sys.stdout.flush()
        sys.stdin.read()
