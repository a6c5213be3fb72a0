"""Tests with MaxText, which `make test-maxtext` installs; elsewhere they are not collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("maxtext") else ["test_*"]
