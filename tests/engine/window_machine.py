"""The state machine of interruptions with a pool of sliding windows.

`python -m tests.engine.window_machine NUMBER` runs so many examples.
"""

from __future__ import annotations

import sys
import unittest

from tests import inside
from tests.engine import interrupt_model, test_interrupt_machine
from tests.engine.test_window_pages import MODEL

if __name__ == "__main__":
    interrupt_model.use(MODEL, max_running_requests=3)
    subject = test_interrupt_machine.make_subject()
    pool = inside.core(subject.engine).pool
    assert pool.windows is not None
    test = test_interrupt_machine.machine(int(sys.argv[1]))
    result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(test))
    sys.exit(not result.wasSuccessful())
