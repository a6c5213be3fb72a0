"""A plugin that finds tests that race the engine: `python -m pytest -p tests.late_calls`.

Commands reach an engine late, as if the callers' threads had waited for a core. A test that fails
only then would fail now and then on a busy machine; `tests.threads.gate_steps` mends it.
"""

from __future__ import annotations

import threading
import time

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.group import Asked, EngineGroup

LATE_S = 0.02

_submit = EngineGroup.submit


def _submit_late(self: EngineGroup, asked: Asked) -> None:
    """Requests come in time, and so do looks at an engine that has nothing to do."""
    is_own = any(threading.current_thread() in loop.threads for loop in self.loops)
    is_job = not isinstance(asked, cmd.Command)
    is_idle_look = isinstance(asked, cmd.GetState) and not any(
        loop._core.scheduler.has_work for loop in self.loops
    )
    if not (is_own or is_job or is_idle_look) and not isinstance(asked, cmd.AddRequests):
        time.sleep(LATE_S)
    _submit(self, asked)


EngineGroup.submit = _submit_late
