"""Options of the command line for the engine of tests/geometry.py."""

from __future__ import annotations

import json
from typing import Any

from tests.geometry import SMALL


def words(**options: Any) -> list[str]:
    """`--engine key=value` for `SMALL`, and for more."""
    given = {**SMALL, **options}
    return [x for key, value in given.items() for x in ("--engine", f"{key}={json.dumps(value)}")]
