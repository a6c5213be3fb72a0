"""The tests' compilation cache: shared by processes without races, kept between runs."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jaxlib.version
import pytest
from jax._src import lru_cache

from tests import compilation


def test_an_entry_is_written_beside_its_place_and_renamed(tmp_path, monkeypatch):
    cache = lru_cache.LRUCache(str(tmp_path), max_size=-1)
    real, written = os.replace, []

    def replace(source, target):
        assert not os.path.exists(target)
        with open(source, "rb") as file:
            written.append(file.read())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    cache.put("key", b"a program")
    cache.put("key", b"the same, of another process that was slower")
    assert written == [b"a program"]
    assert cache.get("key") == b"a program"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("imported", ["jax", "jax._src.lru_cache"])
def test_processes_that_tests_start_do_so_too(imported):
    code = (
        f"import {imported}; from jax._src import lru_cache as m; print(m.LRUCache.put.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "sitecustomize"


def test_it_is_kept_in_the_checkout_for_these_versions():
    assert jax.config.jax_compilation_cache_dir == str(compilation.CACHE)  # type: ignore[attr-defined]
    assert compilation.CACHE.parent.name == ".cache"
    assert f"-{jax.__version__}-{jaxlib.version.__version__}-" in compilation.CACHE.name


def test_what_is_old_goes(tmp_path, monkeypatch):
    own, other = tmp_path / "programs-2", tmp_path / "programs-1"
    paths = own / "a-cache", other / "b.o", own / "c-cache", other / "d.o", own / "temporary"
    for age, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(compilation, "CACHE", own)
    monkeypatch.setattr(compilation, "_MAX_BYTES", 25)
    compilation.prune()
    assert {path.name for path in tmp_path.glob("*/*")} == {"a-cache", "b.o", "temporary"}
