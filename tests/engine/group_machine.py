"""The state machine of interruptions over a group: `python -m tests.engine.group_machine NUMBER`.

Needs two host devices. Prints how many rules were taken.
"""

from __future__ import annotations

import functools
import sys
import unittest
from typing import Any

import jax
import numpy as np
from hypothesis.stateful import invariant
from jax.sharding import Mesh

from tests.engine import test_interrupt_machine as single
from tests.engine.interrupt_model import OPTIONS


@functools.cache
def make_subject() -> single.Subject:
    """Two engines, each as large as the single one."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    twice = {name: 2 * OPTIONS[name] for name in ("num_kv_tokens", "max_running_requests")}
    return single.Subject(mesh=mesh, **twice)


class GroupMachine(single.InterruptMachine):
    """As of a single engine; versions agree, and each pool is whole."""

    make_subject: Any = staticmethod(make_subject)
    num_steps = 0

    @invariant()
    def engines_agree(self):
        GroupMachine.num_steps += 1
        if self.hold is None and not self.expected.updates:
            state = self.expected.state()
            assert {each.weight_version for each in state.engines} == {state.weight_version}
            assert {each.asleep for each in state.engines} == {state.asleep}
            assert {each.pause_mode for each in state.engines} == {state.pause_mode}


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    test = single.machine(int(sys.argv[1]), GroupMachine)
    result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(test))
    sys.stdout.write(f"{GroupMachine.num_steps} steps\n")
    sys.exit(not result.wasSuccessful())
