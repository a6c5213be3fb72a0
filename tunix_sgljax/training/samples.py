"""The completions that a run trains on: samples.jsonl in its folder, and one to look at."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

logger = logging.getLogger(__name__)

MAX_SHOWN = 600
"""Characters of a prompt or of a completion in the text of `describe_sample`."""


class Sample(NamedTuple):
    """A completion that a step, counted from 1, trained on, and the sum of its rewards."""

    step: int
    prompt: str
    completion: str
    reward: float


class SampleFile:
    """Appends every completion of a run to a file: a JSON object a line, with `Sample`'s names.

    Each line is written by one call, so that a process that is killed leaves whole lines. When the
    disk is full, what was written of the last line is taken back, a warning says so, and the run
    goes on without the file. Lines of steps that a resumed run's checkpoint holds stay.
    """

    def __init__(self, path: Path, current_step: Callable[[], int], num_done: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.first: Sample | None = None
        self._current_step = current_step
        self._thread = threading.get_ident()
        self._file: BinaryIO | None = path.open("ab", buffering=0)
        self._size = _size_of_steps(path, num_done)
        self._file.truncate(self._size)

    def add(
        self, prompts: Sequence[str], completions: Sequence[str], rewards: Any, **_: Any
    ) -> dict[str, Any]:
        """A metric function for Tunix's learners: takes a batch, and measures nothing.

        Batches of evaluations are left out: Tunix makes them on the thread that trains.
        """
        if threading.get_ident() == self._thread:
            return {}
        step = self._current_step()
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
            sample = Sample(step, str(prompt), str(completion), float(reward))
            if self.first is None or self.first.step != step:
                self.first = sample
            self._write(_to_line(sample))
        return {}

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            num_written = self._file.write(line)
            if num_written != len(line):
                raise OSError(f"only {num_written} of {len(line)} bytes fit")
            self._size += len(line)
        except OSError as error:
            logger.warning("%s ends here, and the run goes on: %s", self.path, error)
            self._file.truncate(self._size)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def describe_sample(sample: Sample) -> str:
    """A sample as lines for the terminal; long texts without their middle."""
    return (
        f"sample of step {sample.step}, reward {sample.reward:.3f}\n"
        f"  prompt      {_shown(sample.prompt)}\n"
        f"  completion  {_shown(sample.completion)}"
    )


def _shown(text: str) -> str:
    if len(text) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
    # A model may write what a terminal would obey.
    printable = (each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)
    return "".join(printable).replace("\n", "\n" + " " * 14)


def _to_line(sample: Sample) -> bytes:
    try:
        return (json.dumps(sample._asdict(), ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return (json.dumps(sample._asdict()) + "\n").encode()


def _size_of_steps(path: Path, num_steps: int) -> int:
    """Bytes of the whole lines at the beginning of a file that belong to the first steps."""
    size = 0
    with path.open("rb") as file:
        for line in file:
            try:
                is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= num_steps
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if not is_kept:
                break
            size += len(line)
    return size
