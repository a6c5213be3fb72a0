"""Whatever happens to the files, a checkpoint loads as it was saved or is refused."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgljax_engine import CheckpointError, CheckpointManager
from sgljax_engine.types import RequestStatus
from tests.engine.checkpoint_cases import (
    dump,
    fingerprint,
    forge_file,
    forge_manifest,
    make_checkpoint,
    make_prefix,
    make_request,
)

FINISHED = RequestStatus.FINISHED


def fill(folder, compression=None):
    """Two segments and a prefix cache; returns what is in the folder."""
    manager = CheckpointManager(folder, compression=compression)
    manager.save(make_checkpoint([make_request(1)]))
    checkpoint = make_checkpoint([make_request(1), make_request(2, status=FINISHED)], make_prefix())
    manager.save(checkpoint)
    paths = sorted(folder.iterdir())
    assert len(paths) == 6
    return paths, fingerprint(checkpoint)


def assert_refused(folder, message=None):
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointManager(folder).load()
    return str(caught.value)


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_no_byte_can_be_changed(tmp_path, compression):
    paths, expected = fill(tmp_path, compression)
    rng = random.Random(0)
    for path in paths:
        data = path.read_bytes()
        places = {*range(24), *range(len(data) - 8, len(data))}
        places |= set(rng.sample(range(len(data)), min(60, len(data))))
        for place in sorted(places):
            changed = bytearray(data)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            assert path.name in assert_refused(tmp_path)
        path.write_bytes(data)
    assert fingerprint(CheckpointManager(tmp_path).load()) == expected


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_no_byte_can_be_missing_or_too_many(tmp_path, compression):
    paths, expected = fill(tmp_path, compression)
    rng = random.Random(0)
    for path in paths:
        data = path.read_bytes()
        lengths = {0, 1, 7, 8, 9, len(data) - 1, *rng.sample(range(len(data)), 20)}
        for changed in [*(data[:length] for length in sorted(lengths)), data + b"\0", data + b"\n"]:
            path.write_bytes(changed)
            assert path.name in assert_refused(tmp_path)
        path.unlink()
        assert path.name in assert_refused(tmp_path, "no such file")
        path.mkdir()
        assert path.name in assert_refused(tmp_path, "cannot read")
        path.rmdir()
        path.write_bytes(data)
    assert fingerprint(CheckpointManager(tmp_path).load()) == expected


def test_files_of_another_checkpoint(tmp_path):
    paths, _ = fill(tmp_path / "a")
    CheckpointManager(tmp_path / "b").save(make_checkpoint([make_request(1, seed=9)]))
    for path in paths:
        other = tmp_path / "b" / path.name
        if other.exists() and path.name != "manifest.json":
            data = path.read_bytes()
            path.write_bytes(other.read_bytes())
            assert path.name in assert_refused(tmp_path / "a")
            path.write_bytes(data)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"1e999",
        b"NaN",
        b'"manifest"',
        b"{}",
        b'{"format":1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"\xff\xfe{\0}\0",
        b'{"format":"sgljax-engine-checkpoint","version":1}',
        b'{"format":"sgljax-engine-checkpoint","version":1e400}',
        b'{"format":"sgljax-engine-checkpoint"}',
        b"\0" * 4096,
    ],
)
def test_other_contents(tmp_path, content):
    fill(tmp_path)
    (tmp_path / "manifest.json").write_bytes(content)
    assert "manifest.json" in assert_refused(tmp_path)


def test_a_newer_version_is_named(tmp_path):
    fill(tmp_path)
    forge_manifest(tmp_path, lambda body: body.update(version=2))
    assert_refused(tmp_path, r"manifest\.json has version 2, newer than 1")
    # Even if it looks quite different.
    new = {"format": "sgljax-engine-checkpoint", "version": 17, "shards": []}
    (tmp_path / "manifest.json").write_bytes(dump(new))
    assert_refused(tmp_path, r"manifest\.json has version 17, newer than 1")


# ---------------------------------------------------------------------- forgeries


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", "manifest.json"])
def test_names_lead_nowhere_else(tmp_path, name):
    folder = tmp_path / "checkpoint"
    fill(folder)
    secret = (folder / "requests-000001.json").read_bytes()
    (tmp_path / "secret").write_bytes(secret)
    forge_manifest(folder, lambda body: body["segments"][0]["files"][0].__setitem__(0, name))
    assert_refused(folder, "name must be 'requests-000001.json'")
    # A manager that takes the folder over neither follows the name nor removes what it leads to.
    CheckpointManager(folder).save(make_checkpoint([]))
    assert (tmp_path / "secret").read_bytes() == secret
    fill(tmp_path / "again")
    forge_manifest(tmp_path / "again", lambda body: body["prefix"]["file"].__setitem__(0, name))
    assert_refused(tmp_path / "again", r"name must be 'prefix-000002\.safetensors'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(colour=1), "unknown field 'colour'"),
        (lambda b: b.pop("segments"), "lacks segments"),
        (lambda b: b["segments"].append(b["segments"][0]), "a segment is there twice"),
        (lambda b: b["segments"].pop(), "is in no segment"),
        (lambda b: b["requests"][0].__setitem__(2, 1), "is in no segment"),
        (lambda b: b["requests"][0].__setitem__(2, -1), "place must be an integer"),
        (lambda b: b["requests"][0].__setitem__(0, "x"), "the manifest takes request"),
        (lambda b: b["requests"][0].__setitem__(1, 2), "the manifest takes request"),
        (lambda b: b["requests"][0].pop(), "lacks digest"),
        (lambda b: b["requests"].append(b["requests"][0]), "is there twice"),
        (lambda b: b["requests"].pop(), "there is no request"),
        (lambda b: b["scheduler"].update(requests=[]), "scheduler has"),
        (lambda b: b["scheduler"].pop("waiting_queue"), "lacks waiting_queue"),
        (lambda b: b["scheduler"].update(new_token_ratio="1"), "new_token_ratio must be"),
        (lambda b: b["segments"][0].update(num_requests=2), "the manifest says 2"),
        (lambda b: b["segments"][0].update(num_requests=0), "num_requests must be"),
        (lambda b: b["segments"][0].update(compression="gz"), "compression must be"),
        (lambda b: b["segments"][0].update(compression="zstd"), "name must be"),
        (lambda b: b["segments"][0]["files"][0].__setitem__(2, "0" * 64), "is damaged"),
        (lambda b: b["segments"][0]["files"][0].__setitem__(2, "x"), "64 hexadecimal"),
        (lambda b: b["prefix"]["sizes"].update(num_nodes=2**62), "does not hold the arrays"),
        (
            lambda b: b["prefix"]["sizes"].update(kv_shapes=[[2, 4], [2, 8]]),
            "does not hold the arrays",
        ),
        (lambda b: b["prefix"]["sizes"].update(dtype="float32"), "does not hold the arrays"),
        (lambda b: b["prefix"]["sizes"].update(dtype="O"), "dtype must be one of"),
        (lambda b: b["prefix"]["sizes"].update(dtype=[]), "dtype must be a string"),
        (lambda b: b["prefix"]["sizes"].update(kv_shapes=[[2, 8.0]]), "kv_shapes must be"),
        (lambda b: b.update(metadata=[]), "metadata must be a dict"),
        (lambda b: b.update(timestamp=-1), "timestamp must be"),
    ],
)
def test_forged_manifests(tmp_path, change, message):
    fill(tmp_path)
    forge_manifest(tmp_path, lambda body: None)
    assert CheckpointManager(tmp_path).load()  # the checksum is right
    forge_manifest(tmp_path, change)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["requests"].append({}), "has 2 requests"),
        (lambda s: s.update(requests=[1]), "must be a dict with the shapes"),
        (lambda s: s["dtypes"].update(prompt_ids="float32"), "dtypes.prompt_ids must be"),
        (lambda s: s["dtypes"].update(logprobs="O"), "dtypes.logprobs must be"),
        (lambda s: s["dtypes"].update(logprobs="float64"), "does not hold the arrays"),
        (lambda s: s["requests"][0]["shapes"].update(logprobs=[2**62]), "does not hold"),
        (lambda s: s["requests"][0]["shapes"].update(logprobs=[-5]), "can have the shape"),
        (lambda s: s["requests"][0]["shapes"].update(logprobs=[5.0]), "can have the shape"),
        (lambda s: s["requests"][0]["shapes"].update(secrets=[5]), "can have the shape"),
        (lambda s: s["requests"][0]["shapes"].update(logprobs=[5, 1]), "in 1 dimensions"),
        (lambda s: s["requests"][0]["shapes"].pop("logprobs"), "does not hold"),
        (lambda s: s["requests"][0].update(logprobs=[0.0] * 5), "must not be in the JSON"),
        (lambda s: s["requests"][0].update(age_s=1.0, params={"n": 0}), "n must be >= 1"),
        (lambda s: s["requests"][0].update(params={"logits_processors": 1}), "unknown field"),
    ],
)
def test_forged_segments(tmp_path, change, message):
    fill(tmp_path)
    path = tmp_path / "requests-000001.json"
    loaded = json.loads(path.read_bytes())
    forge_file(tmp_path, path.name, dump(loaded))
    assert CheckpointManager(tmp_path).load()
    change(loaded)
    forge_file(tmp_path, path.name, dump(loaded))
    assert_refused(tmp_path, message)


def test_forged_compressed_files(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    paths, expected = fill(tmp_path, "zstd")
    for path in paths:
        if path.name == "manifest.json":
            continue
        data = path.read_bytes()
        raw = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        for forged in (b"", data[:-5], data[: len(data) // 2], raw, b"x" * 50, b"(\xb5/\xfd"):
            forge_file(tmp_path, path.name, forged)
            assert path.name in assert_refused(tmp_path)
        for content in (raw[:-2], raw + b"x", b""):
            forge_file(tmp_path, path.name, zstandard.ZstdCompressor().compress(content))
            assert path.name in assert_refused(tmp_path)
        forge_file(tmp_path, path.name, data)
    assert fingerprint(CheckpointManager(tmp_path).load()) == expected


ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, 1e308, "", "a", "\ud800", [], [[]], {}, [-1]]
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), in_manifest=st.booleans())
def test_no_forgery_does_more_than_be_refused(tmp_path_factory, data, in_manifest):
    """Any one value replaced or removed: it loads, or it is a CheckpointError."""
    folder = tmp_path_factory.getbasetemp() / "forgeries"
    if not folder.exists():
        fill(folder)
    originals = {path: path.read_bytes() for path in folder.iterdir()}

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

    if in_manifest:
        forge_manifest(folder, change)
    else:
        path = folder / "requests-000001.json"
        loaded = json.loads(path.read_bytes())
        change(loaded)
        forge_file(folder, path.name, dump(loaded))
    try:
        CheckpointManager(folder).load()
    except CheckpointError:
        pass
    finally:
        for path, content in originals.items():
            path.write_bytes(content)
