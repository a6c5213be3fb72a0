"""Has JAX write entries of its compilation cache whole, in this process and those that it starts.

JAX writes an entry in place, so another process that reads meanwhile finds half of it, warns and
compiles for itself. With this folder on PYTHONPATH each entry is written beside its place and then
renamed: the processes of a test run share one cache without a lock.

Python imports a module of this name when it starts, before JAX is imported: the hook below waits
for that. tests/compilation.py puts the folder on the path, and does the same for its own process.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import tempfile
from typing import Any

_MODULE = "jax._src.lru_cache"


def write_whole(lru_cache: Any) -> None:
    """Replaces how JAX's cache writes an entry. Idempotent.

    Args:
        lru_cache: JAX's module of that name.
    """

    def put(self: Any, key: str, value: bytes) -> None:
        path = os.path.join(self.path, f"{key}{lru_cache._CACHE_SUFFIX}")
        if os.path.exists(path):
            return
        with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as file:
            file.write(value)
        os.replace(file.name, path)

    lru_cache.LRUCache.put = put


class _Hook(importlib.abc.MetaPathFinder):
    """Lets the module be found as ever, and changes it once it is loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                write_whole(module)

            spec.loader.exec_module = exec_module
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Hook())
