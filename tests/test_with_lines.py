"""`.ci/with_lines.py`: a silent command is not a silent terminal, and its exit code stays."""

import subprocess
import sys
from pathlib import Path

from tests.threads import LIMIT_S

CI = Path(__file__).parents[1] / ".ci"
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from with_lines import run
sys.exit(run("waiting", [sys.executable, "-c", "input(); raise SystemExit(3)"], 0.01))
"""


def test_lines_until_the_command_ends():
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(CI)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        for _ in range(3):
            assert process.stdout.readline().startswith("waiting: ")
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(LIMIT_S) == 3
