"""A pytest plugin: the later layout of Tunix's experimental package, over the installed Tunix.

`pytest -p tests.later_tunix tests/experimental/...` runs tests with it. No release has that layout
and no whole checkout of it was to be had, so these are stand-ins, written from a description of
what Tunix's main had in September 2026: names, fields and contracts, without what this project
does not use. They replace no part of this project.
"""

from __future__ import annotations

from pathlib import Path

import tunix

OVERLAY = Path(__file__).parent / "overlay"

tunix.__path__.append(str(OVERLAY))
