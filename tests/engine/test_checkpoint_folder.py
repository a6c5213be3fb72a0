"""A checkpoint's folder: what a save leaves, who may touch it, and what is refused."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from sgljax_engine import CheckpointError, CheckpointManager
from sgljax_engine.checkpoint import manager as manager_module
from sgljax_engine.types import RequestStatus
from tests.engine.checkpoint_cases import (
    fingerprint,
    forge,
    forge_arrays,
    make_checkpoint,
    make_request,
)

ROOT = Path(__file__).parents[2]
FINISHED = RequestStatus.FINISHED


def fill(folder):
    """Saves; returns the two files, `requests.json` last, and what loads."""
    checkpoint = make_checkpoint([make_request(1), make_request(2, status=FINISHED)])
    report = CheckpointManager(folder).save(checkpoint)
    paths = sorted(path for path in folder.iterdir() if path.name != ".lock")
    assert [path.suffix for path in paths] == [".safetensors", ".json"]
    assert report.num_bytes == sum(path.stat().st_size for path in paths)
    assert report.num_requests == 2
    return paths, fingerprint(checkpoint)


def assert_refused(folder, message=None):
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointManager(folder).load()
    assert len(str(caught.value)) < 600
    return str(caught.value)


# ---------------------------------------------------------------------- saves


def test_nothing_there(tmp_path):
    manager = CheckpointManager(tmp_path / "a" / "b")
    assert not manager.has_checkpoint()
    assert not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*/a/b: .* requests\.json"):
        manager.load()
    manager.save(make_checkpoint([]))
    assert manager.has_checkpoint()
    assert manager.load().metadata == {"weight_version": 7}
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot save a checkpoint"):
        CheckpointManager(tmp_path / "file").save(make_checkpoint([]))


def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path):
    fill(tmp_path)
    garbage = ("arrays-0123456789abcdef.safetensors", "requests.json.tmp")
    foreign = ("notes.txt", "arrays-1.safetensors", "arrays-0123456789abcdef.safetensors.bak")
    for name in (*garbage, *foreign):
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "requests").mkdir()
    checkpoint = make_checkpoint([make_request(9)])
    for _ in range(2):  # the same contents have the same names
        CheckpointManager(tmp_path).save(checkpoint)
        assert fingerprint(CheckpointManager(tmp_path).load()) == fingerprint(checkpoint)
    (arrays,) = set(tmp_path.glob("arrays-*.safetensors")) - {tmp_path / foreign[1]}
    expected = {".lock", "requests.json", "requests", arrays.name, *foreign}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_arrays_are_plain_safetensors(tmp_path):
    """Any reader of the format can open the file."""
    both = [make_request(1), make_request(2, num_tokens=0)]
    CheckpointManager(tmp_path).save(make_checkpoint(both))
    arrays = load_file(next(tmp_path.glob("*.safetensors")))
    assert arrays["0.output_ids"].tolist() == both[0].output_ids
    assert arrays["1.prompt_ids"].tolist() == both[1].prompt_ids
    assert arrays["0.logprobs"].tolist() == both[0].logprobs
    assert {array.dtype.name for array in arrays.values()} == {"int32", "float32"}
    tree = json.loads((tmp_path / "requests.json").read_bytes())
    records = tree["scheduler_state"]["requests"]
    assert [record["rid"] for record in records] == [request.rid for request in both]


def test_values_that_do_not_fit_cost_nothing(tmp_path):
    _, expected = fill(tmp_path)
    bad = make_request(2)
    bad.output_ids[0] = 2**40
    for checkpoint, message in (
        (make_checkpoint([bad]), "no int32"),
        (make_checkpoint([], {"a": float("nan")}), "metadata must be plain JSON"),
        (make_checkpoint([], {"a": b""}), "metadata must be plain JSON"),
    ):
        with pytest.raises(CheckpointError, match=message):
            CheckpointManager(tmp_path).save(checkpoint)
    assert fingerprint(CheckpointManager(tmp_path).load()) == expected


def test_only_its_owner_can_read_a_checkpoint(tmp_path):
    fill(tmp_path / "saved")
    assert stat.S_IMODE((tmp_path / "saved").stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").iterdir()}
    assert modes == {0o600}


# ---------------------------------------------------------------------- other savers

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
    assert any(saved for saved, _ in counts)
    CheckpointManager(tmp_path / "saved").load()


def test_a_folder_that_is_locked(tmp_path, monkeypatch, caplog):
    _, expected = fill(tmp_path)
    with manager_module._locked(tmp_path):
        with pytest.raises(CheckpointError, match="Each engine needs a folder of its own"):
            CheckpointManager(tmp_path).save(make_checkpoint([]))
        assert fingerprint(CheckpointManager(tmp_path).load()) == expected

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(manager_module.fcntl, "flock", refuse)
    CheckpointManager(tmp_path).save(make_checkpoint([]))
    assert "only one engine may save there" in caplog.text


def test_a_save_while_another_one_reads(tmp_path, monkeypatch):
    """What the reader's `requests.json` names is gone when it gets there."""
    fill(tmp_path)
    after = make_checkpoint([make_request(5)])
    real = CheckpointManager._read
    saves = [after]

    def read(self, name):
        if name != "requests.json" and saves:
            CheckpointManager(tmp_path).save(saves.pop())
        return real(self, name)

    monkeypatch.setattr(CheckpointManager, "_read", read)
    assert fingerprint(CheckpointManager(tmp_path).load()) == fingerprint(after)


# ---------------------------------------------------------------------- damage


def test_no_byte_can_be_changed_missing_or_too_many(tmp_path):
    paths, expected = fill(tmp_path)
    rng = random.Random(0)
    for path in paths:
        data = path.read_bytes()
        places = {*range(100), *range(len(data) - 8, len(data)), *rng.sample(range(len(data)), 60)}
        wrong = [data[:place] for place in sorted(places)] + [data + b"\0", data + b"\n"]
        for place in sorted(places):
            changed = bytearray(data)
            changed[place] ^= 1 << rng.randrange(8)
            wrong.append(bytes(changed))
        for content in wrong:
            path.write_bytes(content)
            assert_refused(tmp_path)
        path.unlink()
        assert path.name in assert_refused(tmp_path, "there is no file")
        for make in (path.mkdir, lambda path=path: os.mkfifo(path)):
            make()  # a pipe must not hang a restore
            assert path.name in assert_refused(tmp_path, "there is no file")
            path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(data)
    assert fingerprint(CheckpointManager(tmp_path).load()) == expected


def test_a_damaged_checkpoint_is_replaced(tmp_path):
    for damage in (b"{", b'{"format":"sgljax-engine-checkpoint","version":2}'):
        fill(tmp_path)
        (tmp_path / "requests.json").write_bytes(damage)
        assert_refused(tmp_path)
    paths, _ = fill(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1 + len(paths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "is not of an engine's checkpoint"),
        (b"1e999", "is not of an engine's checkpoint"),
        (b'{"name":"my app"}', "is not of an engine's checkpoint"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"\xff\xfe{\0}\0", "is not valid JSON"),
        (b'{"format":"sgljax-engine-checkpoint"}', "has version None; this engine reads version 2"),
        (b'{"format":"sgljax-engine-checkpoint","version":3,"shards":[]}', "has version 3"),
        (b'{"format":"sgljax-engine-checkpoint","version":1e400}', "has version inf"),
        (b'{"format":"sgljax-engine-checkpoint","version":2}', "does not fit its SHA-256|damaged"),
    ],
)
def test_other_contents(tmp_path, content, message):
    """They are refused by name; what is another program's, or version's, is not replaced."""
    path = tmp_path / "requests.json"
    path.write_bytes(content)
    assert str(path) in assert_refused(tmp_path, message)
    if "engine's" in message or "has version" in message:
        with pytest.raises(CheckpointError, match=message):
            CheckpointManager(tmp_path).save(make_checkpoint([]))
        assert path.read_bytes() == content
        assert {each.name for each in tmp_path.iterdir()} == {".lock", "requests.json"}


# ---------------------------------------------------------------------- forgeries


def test_forged_arrays(tmp_path):
    (path, _), _ = fill(tmp_path)
    arrays = load_file(path)
    for content in (
        b"",
        b"\xff" * 50,
        save(arrays | {"0.prompt_ids": arrays["0.logprobs"]}),
        save(arrays | {"0.output_ids": arrays["0.output_ids"][:3]}),
        save(arrays | {"0.secrets": arrays["0.output_ids"]}),
        save(arrays | {"9.output_ids": arrays["0.output_ids"]}),
        save({name: array for name, array in arrays.items() if name != "1.logprobs"}),
    ):
        forge_arrays(tmp_path, content)
        assert_refused(tmp_path)


ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, 1e308, "", "a", "\ud800", [], [[]], {}, [-1]]
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_forgery_does_more_than_be_refused(tmp_path_factory, data):
    """Any one value replaced or removed: it loads, or it is a CheckpointError."""
    folder = tmp_path_factory.getbasetemp() / "forgeries"
    if not folder.exists():
        fill(folder)
    path = folder / "requests.json"
    original = path.read_bytes()

    def change(tree):
        node = tree
        while True:
            keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            inner = node[key]
            if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
                break
            node = inner
        if data.draw(st.booleans()):
            node[key] = data.draw(ODD)
        else:
            del node[key]

    forge(folder, change)
    try:
        CheckpointManager(folder).load()
    except CheckpointError:
        pass
    finally:
        path.write_bytes(original)
