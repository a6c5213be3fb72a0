"""Weights that change from version to version, what a store must return, and files that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import fsspec
import ml_dtypes
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from sgljax_engine.fleet import ReadVersion

DTYPES = tuple(
    np.dtype(each)
    for each in (
        np.float32,
        ml_dtypes.bfloat16,
        np.float16,
        np.int8,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )
)
SHAPES = ((), (0,), (3, 0), (1,), (5,), (8, 9), (40, 3))
PIECE_LEN = 16
"""Elements of a piece where tests make them short, so that small tensors have several."""

Weights = dict[str, np.ndarray]


def random_array(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, so NaNs of all kinds too."""
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape).copy()


def random_weights(rng: np.random.Generator, num: int = 5) -> Weights:
    """Tensors of random dtypes and shapes."""
    return {
        f"layers.{i}.weight": random_array(
            rng, DTYPES[rng.integers(len(DTYPES))], SHAPES[rng.integers(len(SHAPES))]
        )
        for i in range(num)
    }


def changed(rng: np.random.Generator, weights: Weights, fraction: float) -> Weights:
    """A copy in which about this fraction of the elements of each tensor has other bits."""
    found = {}
    for name, array in weights.items():
        other = random_array(rng, array.dtype, array.shape)
        found[name] = np.where(rng.random(array.shape) < fraction, other, array).astype(array.dtype)
    return found


def same(found: Weights, expected: Weights) -> bool:
    """Whether two sets of tensors are equal in names, dtypes, shapes and bits."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        and found[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )


def check_read(read: ReadVersion, version: int, expected: Weights) -> None:
    assert read.version == version
    assert same(read.tensors, expected)
    assert not any(array.flags.writeable for array in read.tensors.values())


Hook = Callable[[str, str], None]
"""Called with an operation and its path before a file is touched."""


class HookedFileSystem(MemoryFileSystem):
    """Files in memory, `hooked://`, whose every operation a test sees before it happens."""

    protocol = "hooked"
    store: dict = {}  # noqa: RUF012  # as in the base class, whose own is not touched
    pseudo_dirs = [""]  # noqa: RUF012
    hook: Hook | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hooked://"))

    @classmethod
    @contextlib.contextmanager
    def hooked(cls, hook: Hook) -> Iterator[None]:
        """Has `hook` called; not from within itself."""

        def once(operation: str, path: str) -> None:
            cls.hook = None
            try:
                hook(operation, path)
            finally:
                cls.hook = staticmethod(once)

        cls.hook = staticmethod(once)
        try:
            yield
        finally:
            cls.hook = None

    def _call(self, operation: str, path: str) -> None:
        if self.hook is not None:
            self.hook(operation, path)

    def _open(
        self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs
    ):
        if mode != "rb":
            self._call("write", path)
        return super()._open(path, mode, block_size, autocommit, cache_options, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._call("read", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._call("list", path)
        return super().ls(path, detail=detail, **kwargs)

    def _rm(self, path):
        self._call("delete", path)
        super()._rm(path)


fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)
