"""Weights of a trainer for engines on other machines. Needs the extra [fleet]; imports no JAX.

A *weight store* is a folder, or a bucket behind a URL of fsspec, that one trainer writes and any
number of engines read.
"""

from __future__ import annotations

from sgljax_engine.fleet.reader import ReadVersion, VersionReader
from sgljax_engine.fleet.writer import VersionWriter, WrittenVersion

__all__ = ["ReadVersion", "VersionReader", "VersionWriter", "WrittenVersion"]
