"""How many Python calls a rollout's methods make: `python .ci/python_calls.py [--files]`.

Counted with `sys.setprofile` on all threads: calls of functions of the two packages, in the second
`SglJaxRollout.generate` of one prompt, and the second `update_params`.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from flax import nnx

import sgljax_cpu
import sgljax_engine
import tunix_sgljax
from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL, new_rollout, params_of, rollout_config

OURS = tuple(
    str(Path(package.__file__).parent) for package in (tunix_sgljax, sgljax_engine, sgljax_cpu)
)


class Counter:
    """Counts calls by file, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.by_file: collections.Counter[str] = collections.Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function, of any thread."""
        if self.is_on and event == "call":
            path = frame.f_code.co_filename
            if path.startswith(OURS):
                self.by_file[path] += 1

    def count(self, name: str, call: Callable[[], Any]) -> None:
        """Prints the calls of the second call, and with `--files` those of each file."""
        call()
        self.by_file.clear()
        self.is_on = True
        sys.setprofile(self)
        call()
        sys.setprofile(None)
        self.is_on = False
        print(f"{name}: {self.by_file.total()} Python calls")
        if "--files" in sys.argv:
            for path, count in self.by_file.most_common():
                print(f"  {count:5} {path}")


def main() -> None:
    """Prints both counts."""
    counter = Counter()
    threading.setprofile(counter)
    model = ref.make_tunix_qwen3(MODEL)
    rollout = new_rollout(model)
    config = rollout_config(max_tokens_to_generate=2)
    params = params_of(model)
    counter.count("generate", lambda: rollout.generate(["5 6 7"], config))
    counter.count("update_params", lambda: rollout.update_params(params, (nnx.Param,)))
    rollout.close()


if __name__ == "__main__":
    main()
