"""Which of the engine's files a prompt passes before model code: `python .ci/request_path.py`.

Two counts of one `Engine.generate` with a prompt of token ids. *On the way*: files on the call
stacks that lead from `generate` to the first function of a model, on the caller's and on the
engine's thread. *Touched*: all files of which any function runs meanwhile, helpers included.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import sgljax_engine
from sgljax_engine import Engine
from tests.engine.models import TINY, spread_weights

ROOT = Path(sgljax_engine.__file__).parent


class Watcher:
    """Sees which files calls pass."""

    def __init__(self) -> None:
        self.is_on = False
        self.touched: list[str] = []
        self.on_the_way: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function, of any thread."""
        name = own_file(frame)
        if not self.is_on or event != "call" or name is None:
            return
        if name.startswith("models/"):
            self.is_on = False
            self.add_stack(frame.f_back)
            return
        if frame.f_code.co_name == "submit":
            self.add_stack(frame)
        if name not in self.touched:
            self.touched.append(name)

    def add_stack(self, frame: FrameType | None) -> None:
        """Adds the files of a frame and its callers, callers first."""
        found = []
        while frame is not None:
            found.append(own_file(frame))
            frame = frame.f_back
        for name in reversed(found):
            if name is not None and name not in self.on_the_way:
                self.on_the_way.append(name)


def own_file(frame: FrameType) -> str | None:
    """A frame's file within the engine's package."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


def main() -> None:
    """Prints both lists."""
    seen = Watcher()
    threading.setprofile(seen)
    sys.setprofile(seen)
    with Engine(model_config=TINY, weights=spread_weights(), compilation_cache_dir=None) as engine:
        engine.get_internal_state()  # its thread waits for commands
        seen.is_on = True
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2})
        sys.setprofile(None)
    for title, files in (("on the way", seen.on_the_way), ("touched", seen.touched)):
        print(f"{len(files)} files {title}: {', '.join(files)}")


if __name__ == "__main__":
    main()
