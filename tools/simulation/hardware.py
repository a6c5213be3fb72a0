"""Tables of step times, for machines that are not here too."""

from __future__ import annotations

import bisect
import dataclasses
from types import MappingProxyType

from sgljax_engine.errors import InvalidConfigError, unknown_name_message


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTable:
    """How long the steps of a model take on a machine.

    Attributes:
        source: Where the numbers are from.
        rows: Batch sizes of the decode programs, ascending. A step takes as long as the smallest
            program that holds its rows; larger batches take as much longer as they have more rows.
        step_s: Seconds of a step of each, without reading keys.
        key_s: Seconds for each key that a step reads.
        prefill_token_s: Seconds for each prefilled token.
        dispatch_s: Seconds of the host for each dispatch.
    """

    source: str
    rows: tuple[int, ...]
    step_s: tuple[float, ...]
    key_s: float
    prefill_token_s: float
    dispatch_s: float

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise InvalidConfigError(f"rows must be ascending numbers >= 1, got {self.rows}")
        if len(self.step_s) != len(self.rows) or min(self.step_s) <= 0:
            raise InvalidConfigError(
                f"step_s must have a number > 0 for each of {len(self.rows)} rows, got "
                f"{self.step_s}"
            )
        for name in ("key_s", "prefill_token_s", "dispatch_s"):
            if getattr(self, name) < 0:
                raise InvalidConfigError(f"{name} must be >= 0, got {getattr(self, name)}")

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step with so many rows, without reading keys."""
        index = bisect.bisect_left(self.rows, num_rows)
        if index < len(self.rows):
            return self.step_s[index]
        return self.step_s[-1] * num_rows / self.rows[-1]

    def smaller(self, num_rows: int) -> int:
        """Rows of the next smaller program than that of so many rows; 0 if there is none."""
        index = bisect.bisect_left(self.rows, num_rows)
        return self.rows[index - 1] if index else 0


_ACCELERATOR_ROWS = (1, 4, 16, 64, 256)
"""Programs of an accelerator: padding shares the one read of the weights."""

TABLES = MappingProxyType(
    {
        "cpu": StepTable(
            source="a Qwen3 of 27 million parameters on two cores of an AMD EPYC, measured on "
            "2026-11-24 (steps by rows, keys by contexts); prefill as many tokens in a step of "
            "64 rows, and 0.5 ms of host a dispatch, assumed",
            rows=(1, 4, 8, 16, 32, 64, 128, 256),
            step_s=(2.17e-3, 2.91e-3, 3.62e-3, 3.88e-3, 5.37e-3, 10.2e-3, 20.7e-3, 44.7e-3),
            key_s=1.76e-7,
            prefill_token_s=1.6e-4,
            dispatch_s=5e-4,
        ),
        "v5e": StepTable(
            source="Qwen3-0.6B on one v5e: least times of the compiled programs, "
            "benchmarks/results/accelerators.md (1.19 GB of weights and 114,688 bytes a key at "
            "819 GB/s), and 0.3 ms of host a dispatch, assumed",
            rows=_ACCELERATOR_ROWS,
            step_s=(1.45e-3,) * len(_ACCELERATOR_ROWS),
            key_s=1.4e-7,
            prefill_token_s=11.23e-3 / 2048,
            dispatch_s=3e-4,
        ),
        "h100": StepTable(
            source="Qwen3-0.6B on one H100: least times of the compiled programs, "
            "benchmarks/results/accelerators.md (at 3.35 TB/s), and 0.3 ms of host a dispatch, "
            "assumed",
            rows=_ACCELERATOR_ROWS,
            step_s=(0.36e-3,) * len(_ACCELERATOR_ROWS),
            key_s=3.42e-8,
            prefill_token_s=1 / 1.556e5,
            dispatch_s=3e-4,
        ),
        "h200": StepTable(
            source="Qwen3-0.6B on one H200, measured: benchmarks/results/gpu_ladder.md "
            "(3.78 ms for 128 rows; prefill of 2,048 tokens), 2.3 ms of it attention of 576 keys a "
            "row, profiled on 2026-11-26, and 0.3 ms of host a dispatch, assumed",
            rows=_ACCELERATOR_ROWS,
            step_s=(1.48e-3,) * len(_ACCELERATOR_ROWS),
            key_s=3.12e-8,
            prefill_token_s=1 / 1.556e5,
            dispatch_s=3e-4,
        ),
    }
)
"""Step times by machine."""


def find_table(name: str) -> StepTable:
    """The table of a machine.

    Args:
        name: A key of `TABLES`.

    Raises:
        InvalidConfigError: for an unknown name.
    """
    if name not in TABLES:
        raise InvalidConfigError(unknown_name_message("hardware", name, list(TABLES)))
    return TABLES[name]
