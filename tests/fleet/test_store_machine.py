"""Sequences of writes, failed writes, resumed writers and readers, beside a plain dictionary."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgljax_engine import WeightStoreError
from sgljax_engine.fleet import VersionReader, VersionWriter, deltas
from sgljax_engine.fleet.config import PAIRS
from tests.fleet.weight_stores import (
    PIECE_LEN,
    HookedFileSystem,
    Weights,
    changed,
    check_read,
    random_weights,
    same,
)

STORES = itertools.count()
KEEP, BASE_EVERY = 2, 3


class StoreMachine(RuleBasedStateMachine):
    """A writer and two readers; `written` is what the store must return."""

    @initialize(seed=st.integers(0, 2**32 - 1), max_file_bytes=st.sampled_from([1, 100, 2**20]))
    def begin(self, seed, max_file_bytes):
        self.url = f"hooked://{next(STORES)}"
        self.rng = np.random.default_rng(seed)
        self.max_file_bytes = max_file_bytes
        self.weights = random_weights(self.rng)
        self.adapter: dict | None = None
        self.written: dict[int, tuple[Weights, dict | None]] = {}
        self.bases: list[int] = []
        self.is_fresh = True
        self.seen = 0
        self.readers = [VersionReader(self.url), VersionReader(self.url)]
        self.resume()

    @rule()
    def resume(self):
        """Another life of the trainer."""
        self.writer = VersionWriter(
            self.url, base_every=BASE_EVERY, keep=KEEP, max_file_bytes=self.max_file_bytes
        )
        self.is_fresh = True

    @rule(fraction=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    def change(self, fraction):
        self.weights = changed(self.rng, self.weights, fraction)

    @rule(num=st.integers(1, 6))
    def change_model(self, num):
        self.weights = random_weights(self.rng, num)

    @rule(adapter=st.sampled_from([None, {"r": 8, "target_modules": ["q_proj"]}]))
    def change_adapter(self, adapter):
        self.adapter = adapter

    @rule(as_base=st.booleans())
    def write(self, as_base):
        whole = dict(self.weights)
        if self.adapter is not None:
            whole |= {f"{PAIRS}{n}": x for n, x in random_weights(self.rng, 2).items()}
        self.attempted = whole
        given = {name: array.copy() for name, array in whole.items()}
        done = self.writer.write(given, adapter=self.adapter, as_base=as_base)
        for array in given.values():  # the writer's copy is its own
            array.fill(0)
        assert done.version > self.seen
        assert done.whole_bytes == sum(array.nbytes for array in whole.values())
        if self.is_fresh or as_base:
            assert done.is_base
        else:
            before, adapter = self.written[max(self.written)]
            differ = sum(
                int((deltas.bits(before[name]) != deltas.bits(array)).sum())
                for name, array in whole.items()
                if name in before and before[name].shape == array.shape
                and before[name].dtype == array.dtype
            )  # fmt: skip
            # One with an adapter is a delta of the base, not of the version before.
            of_model = self.adapter is None and adapter is None
            assert done.is_base or self.adapter or (of_model and done.num_changed == differ)
        self.is_fresh = False
        self.written[done.version] = (whole, self.adapter)
        self.seen = done.version
        if done.is_base:
            self.bases.append(done.version)
        assert self.adapter or done.version - self.bases[-1] < BASE_EVERY

    @rule(after=st.integers(0, 30))
    def fail_to_write(self, after):
        """The store fails at one of its operations, and works again."""
        countdown = itertools.count(after, -1)

        def fail(operation, path):
            if next(countdown) == 0:
                raise OSError(f"no {operation} of {path}")

        known = dict(self.written), list(self.bases)
        with HookedFileSystem.hooked(fail):
            try:
                self.write(as_base=False)
            except WeightStoreError:
                self.is_fresh = True
                self.written, self.bases = known
                # The manifest may have been written, before old versions were deleted.
                newest = self.readers[0].newest()
                if newest is not None and newest > self.seen:
                    self.written[newest] = (self.attempted, self.adapter)
                    self.bases.append(newest)
                    self.seen = newest

    @precondition(lambda self: self.written)
    @rule(back=st.integers(0, 12), reader=st.integers(0, 1))
    def read(self, back, reader):
        versions = sorted(self.written, reverse=True)
        version = versions[min(back, len(versions) - 1)]
        oldest = self.bases[-KEEP:][0]
        weights, adapter = self.written[version]
        if version < oldest or (adapter and back):  # it may be deleted, but a reader may hold it
            with contextlib.suppress(WeightStoreError):
                check_read(self.readers[reader].read(version), version, weights)
            return
        read = self.readers[reader].read(version)
        check_read(read, version, weights)
        assert read.adapter == adapter

    @rule(reader=st.integers(0, 1))
    def restart_reader(self, reader):
        self.readers[reader] = VersionReader(self.url)

    @rule(reader=st.integers(0, 1))
    def forget(self, reader):
        self.readers[reader].forget()

    @invariant()
    def newest_is_the_last_written(self):
        newest = max(self.written, default=None)
        assert self.readers[0].newest() == self.writer.newest == newest


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    monkeypatch.setattr(deltas, "PIECE_LEN", PIECE_LEN)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=25, report_multiple_bugs=False)


def test_the_oracle_sees_bits():
    """NaN and -0.0 included: else the machine could not fail."""
    plus, minus = np.zeros(1, np.float32), -np.zeros(1, np.float32)
    assert same({"x": plus}, {"x": plus.copy()})
    assert not same({"x": plus}, {"x": minus})
    assert same({"x": plus / 1 * np.float32("nan")}, {"x": plus / 1 * np.float32("nan")})
    assert not same({"x": plus}, {"x": plus.view(np.int32)})
