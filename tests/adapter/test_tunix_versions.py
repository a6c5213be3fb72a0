"""What needs a newer Tunix than the installed one says so, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from tests.tunix_experimental import HAS_EXPERIMENTAL


def import_experimental(*statements):
    """In a process of its own: importing half a package leaves traces."""
    code = "; ".join(["import tunix_sgljax.experimental as e", *statements])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.soak
@pytest.mark.skipif(HAS_EXPERIMENTAL, reason="this Tunix has tunix.experimental")
def test_an_old_tunix_is_named():
    done = import_experimental()
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    version = metadata.version("google-tunix")
    assert last.startswith("ImportError: tunix_sgljax.experimental needs tunix.experimental, which")
    assert "0.1.8" in last
    assert f"google-tunix {version} is installed" in last


@pytest.mark.slow
@pytest.mark.skipif(not HAS_EXPERIMENTAL, reason="there is no tunix.experimental")
def test_a_new_tunix_will_do():
    done = import_experimental("assert all(getattr(e, name) for name in e.__all__)")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_package_does_not_import_it():
    code = (
        "import sys, tunix_sgljax; tunix_sgljax.SglJaxRollout, tunix_sgljax.AgenticGrpoLearner; "
        "assert not [name for name in sys.modules if 'experimental' in name "
        "and name.startswith(('tunix_sgljax', 'tunix.experimental'))]"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=600, check=False)
    assert done.returncode == 0
