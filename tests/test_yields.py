"""The sanitiser of threads finds a race that is seldom seen without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RACE = """
import queue, sys, threading
if sys.argv[1:]:
    from tests.yields import yield_at_locks
    num_yields = yield_at_locks(int(sys.argv[1]))
lock, ended, total = threading.Lock(), queue.SimpleQueue(), 0
both_run = threading.Barrier(2)

def count():  # reads and writes under the lock, but not both at once
    global total
    both_run.wait()
    for _ in range(200):
        with lock:
            seen = total
        with lock:
            total = seen + 1
    ended.put(None)

for _ in range(2):
    threading.Thread(target=count).start()
for _ in range(2):
    ended.get()
condition = threading.Condition()
with condition:
    assert not condition.wait_for(lambda: False, timeout=0.01)
assert not sys.argv[1:] or num_yields() > 100
print(total)
"""


def lost_updates(*arguments: object) -> int:
    """Counts that the race loses, of 400."""
    command = [sys.executable, "-c", RACE, *map(str, arguments)]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return 400 - int(done.stdout)


def test_a_race_is_found_with_every_seed():
    assert all(lost_updates(seed) > 0 for seed in range(3))
