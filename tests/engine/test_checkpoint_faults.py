"""Whenever a save fails, or its process dies, there is a checkpoint to go on from."""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgljax_engine import CheckpointError, CheckpointManager
from sgljax_engine.checkpoint import manager as manager_module
from tests.engine.checkpoint_cases import fingerprint, make_checkpoint, make_request

ROOT = Path(__file__).parents[2]


class Fault:
    """Lets the k-th thing that checkpoints ask of the system fail, once or from then on.

    What other threads and the garbage collector ask meanwhile is neither counted nor failed.
    """

    def __init__(self, monkeypatch, *, at, is_final):
        self.count = 0
        self._at = at
        self._is_final = is_final
        real_open = builtins.open

        def guarded(name, function):
            def wrapper(*args, **kwargs):
                if sys._getframe(1).f_globals["__name__"].startswith(manager_module.__package__):
                    self.step(name)
                return function(*args, **kwargs)

            return wrapper

        for owner, name in (
            (os, "open"),
            (os, "fsync"),
            (os, "replace"),
            (os, "listdir"),
            (os, "fstat"),
            (Path, "unlink"),
            (Path, "mkdir"),
        ):
            monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))

        def open_file(path, mode, opener):
            self.step(f"open {mode}")
            file = real_open(path, mode, opener=opener)
            return FaultyFile(file, self) if mode == "wb" else file

        monkeypatch.setattr(manager_module, "open", open_file, raising=False)

    def step(self, name):
        self.count += 1
        if self.count == self._at or (self._is_final and self.count > self._at):
            raise OSError(errno.ENOSPC, f"{name}: no space left")

    @property
    def has_happened(self):
        return self.count >= self._at


class FaultyFile:
    """A file of which a part may be written before writing fails."""

    def __init__(self, file, fault):
        self._file = file
        self._fault = fault

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        try:
            self._fault.step("write")
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)

    def flush(self):
        self._fault.step("flush")
        self._file.flush()

    def fileno(self):
        return self._file.fileno()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_final", [False, True])
def test_every_step_of_a_save_may_fail(tmp_path, is_first, is_final):
    """When that is final nothing works any more, not even tidying up, as when a machine dies."""
    before, after, last = (
        make_checkpoint([make_request(i), make_request(i + 1)]) for i in (1, 2, 3)
    )
    prints = {fingerprint(before): "previous", fingerprint(after): "new"}
    outcomes = {"previous": 0, "new": 0}
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        if not is_first:
            CheckpointManager(folder).save(before)
        failure = None
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, at=at, is_final=is_final)
            try:
                CheckpointManager(folder).save(after)
            except CheckpointError as error:
                failure = error
        if failure is not None:
            assert isinstance(failure.__cause__, OSError)
            assert "no space left" in str(failure)
        reader = CheckpointManager(folder)
        if reader.has_checkpoint():
            outcome = prints[fingerprint(reader.load())]
            assert outcome == "new" or failure is not None
        else:
            assert is_first
            assert failure is not None
            outcome = "previous"
        outcomes[outcome] += failure is not None
        CheckpointManager(folder).save(last)
        assert fingerprint(reader.load()) == fingerprint(last)
        assert len(list(folder.iterdir())) == 3  # with the lock
        if not fault.has_happened:
            assert failure is None
            break
    assert outcomes["previous"] > 15
    # Only the last step of all, forcing the new name to the disk, may fail with the new one there.
    # Opening the folder and syncing it are two calls.
    assert outcomes["new"] == 2, outcomes


def test_files_are_on_the_disk_before_they_are_named(tmp_path, monkeypatch):
    """What a machine that loses its power needs, and no test can see but by the order of calls."""
    manager = CheckpointManager(tmp_path)
    manager.save(make_checkpoint([make_request(1)]))
    events, synced = [], {}
    real_fsync, real_replace, real_unlink = os.fsync, os.replace, Path.unlink

    def fsync(descriptor):
        real_fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        if status.st_ino == tmp_path.stat().st_ino:
            events.append("folder")

    def replace(source, target):
        assert synced[os.stat(source).st_ino] == os.stat(source).st_size > 0
        real_replace(source, target)
        events.append(Path(target).suffix)

    def unlink(path, missing_ok=False):
        real_unlink(path, missing_ok=missing_ok)
        events.append(f"remove {path.suffix}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "unlink", unlink)
    manager.save(make_checkpoint([make_request(1), make_request(2)]))
    wanted = [".safetensors", "folder", ".json", "folder", "folder", "remove .safetensors"]
    assert events == wanted


# ---------------------------------------------------------------------- kill -9


def step_checkpoint(step):
    requests = [make_request(i, num_tokens=20, seed=step // (i + 1)) for i in range(6)]
    return make_checkpoint(requests, {"step": step})


CHILD = """
import sys
from sgljax_engine import CheckpointManager
from tests.engine.test_checkpoint_faults import step_checkpoint

manager = CheckpointManager(sys.argv[1])
step = manager.load().metadata["step"] + 1 if manager.has_checkpoint() else 0
while True:
    checkpoint = step_checkpoint(step)
    manager.save(checkpoint)
    print(step, flush=True)
    step += 1
"""


def test_a_process_that_is_killed_while_it_saves(tmp_path):
    rng = random.Random(0)
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    last_step = -1
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "checkpoint")],
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        ) as child:
            assert child.stdout is not None
            first = int(child.stdout.readline())
            time.sleep(rng.uniform(0.02, 0.2))
            child.kill()
            printed = [first, *map(int, child.stdout.read().split())]
        assert child.returncode == -signal.SIGKILL
        assert printed == list(range(last_step + 1, last_step + 1 + len(printed)))
        loaded = CheckpointManager(tmp_path / "checkpoint").load()
        # The last save that was reported, or the one after it.
        assert loaded.metadata["step"] in (printed[-1], printed[-1] + 1)
        last_step = loaded.metadata["step"]
        assert fingerprint(loaded) == fingerprint(step_checkpoint(last_step))
    assert last_step >= 4
