"""Many steps of over-sampling's state machine, under yields at each lock; a child process.

`python -m tests.adapter.over_sampling_steps 20000 SEED` goes on until so many rules were taken, and
prints what was done. Seed 1 on 2026-11-28, on two shared cores in 7 minutes: 20,399 steps, 721
examples, 2,053 trainings' steps, 5,436 prompts, 808,255 yields, no fault.
"""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.yields import yield_at_locks


def main(num_steps: int, seed: int) -> None:
    """Takes at least so many steps, in examples of at most 40."""
    num_yields = yield_at_locks(seed)
    from tests.adapter.test_over_sampling_machine import OverSamplingMachine

    counts = {"steps": 0, "examples": 0, "trainings' steps": 0, "prompts": 0}

    class Counted(OverSamplingMachine):
        @invariant()
        def count(self) -> None:
            counts["steps"] += 1

        def teardown(self) -> None:
            super().teardown()
            counts["examples"] += 1
            counts["trainings' steps"] += self.num_steps
            counts["prompts"] += len(self.trained)

    options: Any = settings(
        max_examples=50,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    while counts["steps"] < num_steps:
        run_state_machine_as_test(Counted, settings=options)
    done = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    sys.stdout.write(f"{done}, {num_yields():,} yields\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
