"""Folders of checkpoints that others write to, read from, or filled with what is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from sgljax_engine import CheckpointError, CheckpointManager
from sgljax_engine.checkpoint import lock
from sgljax_engine.checkpoint.fields import dump_json
from sgljax_engine.checkpoint.manifest import MANIFEST_NAME, _signed
from tests.engine.checkpoint_cases import (
    fingerprint,
    make_checkpoint,
    make_prefix,
    make_request,
)

ROOT = Path(__file__).parents[2]

SAVING = """
import sys
from sgljax_engine import CheckpointError, CheckpointManager
from tests.engine.checkpoint_cases import make_checkpoint, make_request
manager, seed = CheckpointManager(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
saved = refused = 0
for i in range(40):
    try:
        manager.save(make_checkpoint([make_request(r, seed=seed + i) for r in range(i % 7)]))
        saved += 1
    except CheckpointError as error:
        assert "another process or engine is saving one there" in str(error), error
        refused += 1
print(saved, refused)
"""


def test_two_processes_that_save_into_one_folder(tmp_path):
    """Each save is whole or refused: nothing of one is removed by the other."""
    command = [sys.executable, "-c", SAVING, str(tmp_path / "saved")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "engine")])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    both = [subprocess.Popen([*command, seed], **pipes) for seed in ("0", "1000")]
    for each in both:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in both:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    counts = [tuple(map(int, each.communicate()[0].split())) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert [sum(count) for count in counts] == [40, 40]
    assert all(saved for saved, _ in counts)
    assert len(CheckpointManager(tmp_path / "saved").load().scheduler_state.requests) == 39 % 7


@pytest.mark.parametrize("has_folder_locks", [True, False])
def test_a_folder_that_is_locked(tmp_path, monkeypatch, has_folder_locks):
    if not has_folder_locks:  # as on network file systems
        real = lock.fcntl.flock

        def flock(descriptor, operation):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(9, "Bad file descriptor")
            real(descriptor, operation)

        monkeypatch.setattr(lock.fcntl, "flock", flock)
    manager = CheckpointManager(tmp_path)
    checkpoint = make_checkpoint([make_request(1)])
    manager.save(checkpoint)
    with lock.locked(tmp_path):
        with pytest.raises(CheckpointError, match="Each engine needs a folder of its own"):
            manager.save(make_checkpoint([]))
        assert fingerprint(manager.load()) == fingerprint(checkpoint)
    manager.save(make_checkpoint([]))
    assert not manager.load().scheduler_state.requests


def test_what_another_one_saved_is_not_taken_for_ones_own(tmp_path):
    """The files that a manager remembers are gone when it saves again."""
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    requests = [make_request(rid) for rid in range(4)]
    first.save(make_checkpoint(requests))
    second.save(make_checkpoint([make_request(9, seed=5)]))
    checkpoint = make_checkpoint(requests)
    assert first.save(checkpoint).num_written == 4
    assert fingerprint(CheckpointManager(tmp_path).load()) == fingerprint(checkpoint)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_only_its_owner_can_read_a_checkpoint(tmp_path, compression):
    folder = tmp_path / "saved"
    manager = CheckpointManager(folder, compression=compression)
    manager.save(make_checkpoint([make_request(1)], make_prefix()))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["manifest", "requests", "prefix"])
def test_a_pipe_does_not_hang_a_restore(tmp_path, kind):
    CheckpointManager(tmp_path).save(make_checkpoint([make_request(1)], make_prefix()))
    for path in list(tmp_path.glob(f"{kind}*")):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is no regular file"):
        CheckpointManager(tmp_path).load()


@pytest.mark.parametrize("name", ["json", "safetensors"])
def test_a_bomb_takes_no_memory(tmp_path, monkeypatch, name):
    """Contents larger than a segment of so many requests can have."""
    monkeypatch.setattr("sgljax_engine.checkpoint.segments._MAX_RECORD_BYTES", 1 << 20)
    CheckpointManager(tmp_path, compression="zstd").save(make_checkpoint([make_request(1)]))
    (path,) = tmp_path.glob(f"requests-*.{name}.zst")
    path.write_bytes(zstandard.compress(bytes(64 << 20)))
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    for segment in manifest["segments"]:
        for entry in segment["files"]:
            if entry[0] == path.name:
                data = path.read_bytes()
                entry[1:] = [len(data), hashlib.sha256(data).hexdigest()]
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    (tmp_path / MANIFEST_NAME).write_bytes(dump_json(_signed(body)))
    with pytest.raises(CheckpointError, match="holds more than"):
        CheckpointManager(tmp_path).load()
