"""The state machine of interruptions with recurrent states.

`python -m tests.engine.hybrid_machine NUMBER STEPS` runs so many examples of so many steps.
250 of 40, which are up to 10,000 steps, take 20 s; they passed on 2026-11-28.
"""

from __future__ import annotations

import sys
import unittest

from tests import inside
from tests.engine import interrupt_model, test_interrupt_machine
from tests.engine.models import HYBRID

if __name__ == "__main__":
    interrupt_model.use(HYBRID, num_state_slots=4)
    subject = test_interrupt_machine.make_subject()
    assert inside.core(subject.engine).pool.states is not None
    num_examples, num_steps = map(int, sys.argv[1:])
    test = test_interrupt_machine.machine(num_examples, num_steps=num_steps)
    result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(test))
    sys.exit(not result.wasSuccessful())
