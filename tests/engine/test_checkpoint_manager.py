"""Saves write what changed and nothing else, and little of it."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from sgljax_engine import CheckpointError, CheckpointManager, InvalidConfigError
from sgljax_engine.sampling_params import NO_LOGPROBS
from sgljax_engine.types import RequestStatus
from tests.engine.checkpoint_cases import (
    fingerprint,
    make_checkpoint,
    make_prefix,
    make_request,
)

FINISHED = RequestStatus.FINISHED


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def segment_files(*numbers, end=""):
    files = [f"requests-{n:06}.{kind}{end}" for n in numbers for kind in ("json", "safetensors")]
    return ["manifest.json", *files]


def save_and_check(manager, requests, prefix=None):
    """Saves; the folder must hold just that, whoever reads it."""
    checkpoint = make_checkpoint(requests, prefix)
    report = manager.save(checkpoint)
    assert fingerprint(CheckpointManager(manager.path).load()) == fingerprint(checkpoint)
    assert report.num_requests == len(requests)
    return report


def test_nothing_there(tmp_path):
    manager = CheckpointManager(tmp_path / "a" / "b")
    assert not manager.has_checkpoint()
    assert not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match=r"no such folder of a checkpoint: '.*/a/b'"):
        manager.load()
    with pytest.raises(CheckpointError, match=r"no such file: .*manifest\.json"):
        CheckpointManager(tmp_path).load()
    manager.save(make_checkpoint([]))
    assert manager.has_checkpoint()
    assert manager.load().metadata == {"weight_version": 7}


def test_only_what_changed_is_written(tmp_path):
    manager = CheckpointManager(tmp_path)
    requests = [make_request(i) for i in range(10)]
    assert save_and_check(manager, requests).num_written == 10
    # Time passes for all of them, and is no change.
    requests = [dataclasses.replace(each, age_s=each.age_s + 1.0) for each in requests]
    report = save_and_check(manager, requests)
    assert (report.num_written, report.num_segments) == (0, 1)
    requests[3] = make_request(3, num_tokens=6)
    requests[4] = make_request(4, status=FINISHED)
    requests.append(make_request(10))
    report = save_and_check(manager, requests)
    assert (report.num_written, report.num_segments, report.is_compacted) == (3, 2, False)
    assert names(tmp_path) == segment_files(1, 3)
    assert save_and_check(manager, requests[::-1]).num_written == 0
    # One that is gone leaves its segment; none of the third is left.
    report = save_and_check(manager, [*requests[:3], *requests[5:10]])
    assert (report.num_written, report.num_segments) == (0, 1)
    assert names(tmp_path) == segment_files(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.5] * 5},
        {"output_ids": [1] * 5},
        {"token_versions": [9] * 5},
        {"call": 4},
        {"num_retractions": 3},
        {"num_cached": 5},
        {"num_cache_misses": 5},
        {"first_token_s": 9.5},
        {"prompt_logprobs": None},
        {"is_streaming": False},
        {"seed": 1},
        {"group": "another"},
    ],
)
def test_every_change_is_seen(tmp_path, changes):
    """Even when the numbers of tokens are the same, as after another engine's going on."""
    manager = CheckpointManager(tmp_path)
    save_and_check(manager, [make_request(1), make_request(2)])
    changed = dataclasses.replace(make_request(1), **changes)
    assert save_and_check(manager, [changed, make_request(2)]).num_written == 1


def test_an_id_that_is_used_again(tmp_path):
    manager = CheckpointManager(tmp_path)
    save_and_check(manager, [make_request(1, call=1, status=FINISHED), make_request(2)])
    again = make_request(1, call=2, status=FINISHED, seed=5)
    assert save_and_check(manager, [again, make_request(2)]).num_written == 1


def test_a_folder_that_another_process_left(tmp_path):
    """What is the same is kept, whoever wrote it; what has the same id and counts is not."""
    save_and_check(CheckpointManager(tmp_path), [make_request(i) for i in range(4)])
    others = [make_request(i, seed=1) for i in range(2)]
    ours = [*others, make_request(2), make_request(3)]
    report = save_and_check(CheckpointManager(tmp_path), ours)
    assert (report.num_written, report.num_segments) == (2, 2)


def test_compaction(tmp_path):
    manager = CheckpointManager(tmp_path)
    requests = [make_request(i) for i in range(10)]
    report = save_and_check(manager, requests)
    for step in range(5):
        requests[step] = make_request(step, num_tokens=6)
        report = save_and_check(manager, requests)
        assert (report.num_written, report.is_compacted) == (1, False)
    for step in range(5, 10):
        requests[step] = make_request(step, num_tokens=6)
        report = save_and_check(manager, requests)
    assert report.num_segments == 10  # the first one went when its last request did
    assert not report.is_compacted
    requests[1:] = [make_request(i, num_tokens=7) for i in range(1, 10)]
    assert save_and_check(manager, requests).num_segments == 2
    requests = requests[8:]
    report = save_and_check(manager, requests)
    assert (report.num_written, report.is_compacted) == (2, True)
    assert names(tmp_path) == segment_files(13)


def test_garbage_never_outweighs_what_is_needed(tmp_path):
    manager = CheckpointManager(tmp_path)
    requests = [make_request(i, num_tokens=1) for i in range(40)]
    manager.save(make_checkpoint(requests))
    num_compacted = 0
    for step in range(50):
        place = step * 7 % 39  # the last one never changes
        requests[place] = make_request(place, num_tokens=1, seed=step + 1)
        report = manager.save(make_checkpoint(requests))
        num_compacted += report.is_compacted
        assert report.num_written == (40 if report.is_compacted else 1)
        assert report.num_segments <= 32
        records = [path.read_bytes() for path in tmp_path.glob("requests-*.json")]
        assert sum(record.count(b'"rid":') for record in records) <= 80
    assert 1 <= num_compacted <= 2
    assert fingerprint(manager.load()) == fingerprint(make_checkpoint(requests))


def test_old_files_are_removed_and_others_are_left(tmp_path):
    manager = CheckpointManager(tmp_path)
    save_and_check(manager, [make_request(1)], make_prefix())
    garbage = (
        "requests-000007.json",
        "requests-000007.safetensors.zst.tmp",
        "prefix-000008.safetensors",
        "manifest.json.tmp",
    )
    foreign = ("notes.txt", "requests-1.json", "requests-000001.json.bak", "other.tmp")
    for name in (*garbage, *foreign):
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "requests-000001").mkdir()
    manager = CheckpointManager(tmp_path)
    assert manager.load().scheduler_state.requests
    save_and_check(manager, [make_request(2)])
    assert names(tmp_path) == sorted([*segment_files(2), *foreign, "requests-000001"])
    # Without a manifest nobody knows what is garbage; nothing is overwritten before there is one.
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "prefix-000008.safetensors").write_text("x", encoding="utf-8")
    save_and_check(CheckpointManager(tmp_path), [make_request(2)])
    assert names(tmp_path) == sorted([*segment_files(9), *foreign, "requests-000001"])


def test_damaged_segments_are_written_anew(tmp_path):
    """A new checkpoint never refers to files that are not sound."""
    for reopen in (False, True):
        for damage in ("missing", "shorter", "changed"):
            if not reopen and damage == "changed":
                continue  # a manager trusts what it wrote itself, but for its size
            folder = tmp_path / f"{reopen}-{damage}"
            manager = CheckpointManager(folder)
            requests = [make_request(1), make_request(2)]
            save_and_check(manager, requests[:1])
            save_and_check(manager, requests)
            path = folder / "requests-000001.json"
            if damage == "missing":
                path.unlink()
            else:
                data = path.read_bytes()
                path.write_bytes(data[:-1] if damage == "shorter" else data[:-1] + b" ")
            with pytest.raises(CheckpointError, match=r"requests-000001\.json"):
                manager.load()
            manager = CheckpointManager(folder) if reopen else manager
            assert save_and_check(manager, requests).num_written == 1


def test_a_damaged_manifest_is_replaced(tmp_path):
    save_and_check(CheckpointManager(tmp_path), [make_request(1)])
    (tmp_path / "manifest.json").write_bytes(b"{")
    assert save_and_check(CheckpointManager(tmp_path), [make_request(1)]).num_written == 1
    assert names(tmp_path) == segment_files(2)


def test_what_is_not_ours_is_not_replaced(tmp_path):
    for content in (b'{"name":"my app"}', b'{"format":"sgljax-engine-checkpoint","version":2}'):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"not the manifest|newer than 1"):
            CheckpointManager(tmp_path).save(make_checkpoint([]))
        assert (tmp_path / "manifest.json").read_bytes() == content
        assert names(tmp_path) == ["manifest.json"]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    manager = CheckpointManager(tmp_path / "file")
    assert not manager.has_checkpoint()
    with pytest.raises(CheckpointError, match="cannot save a checkpoint"):
        manager.save(make_checkpoint([]))
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json"):
        manager.load()


# ---------------------------------------------------------------------- compression


def test_compression(tmp_path):
    requests = [make_request(i, num_tokens=50) for i in range(10)]
    plain = CheckpointManager(tmp_path / "plain")
    small = CheckpointManager(tmp_path / "small", compression="zstd")
    for manager in (plain, small):
        manager.save(make_checkpoint(requests))
    assert names(small.path) == segment_files(1, end=".zst")
    size = {m: sum(path.stat().st_size for path in m.path.iterdir()) for m in (plain, small)}
    assert size[small] < 0.8 * size[plain]
    # Either reads what the other wrote, and keeps it.
    requests[0] = make_request(0, num_tokens=51)
    report = save_and_check(CheckpointManager(small.path), requests)
    assert report.num_written == 1
    assert names(small.path) == [*segment_files(1, end=".zst")[:2], *names(small.path)[2:]]
    assert "requests-000002.json" in names(small.path)
    requests[1] = make_request(1, num_tokens=51)
    report = save_and_check(CheckpointManager(small.path, compression="zstd"), requests)
    assert (report.num_written, report.num_segments) == (1, 3)


def test_without_the_package(tmp_path, monkeypatch):
    CheckpointManager(tmp_path, compression="zstd").save(make_checkpoint([make_request(1)]))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InvalidConfigError, match="pip install zstandard"):
        CheckpointManager(tmp_path, compression="zstd")
    with pytest.raises(CheckpointError, match="pip install zstandard"):
        CheckpointManager(tmp_path).load()
    CheckpointManager(tmp_path).save(make_checkpoint([]))
    with pytest.raises(InvalidConfigError, match="compression must be 'zstd' or None, got 'gz'"):
        CheckpointManager(tmp_path, compression="gz")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("num_requests", [64, 1000])
def test_a_request_without_its_tokens_takes_little(tmp_path, num_requests):
    """Under 2 KB each, its part of the manifest included. The tokens are in files of their own."""
    requests = [
        make_request(i, num_tokens=2, status=FINISHED if i % 2 else RequestStatus.WAITING)
        for i in range(num_requests)
    ]
    report = CheckpointManager(tmp_path).save(make_checkpoint(requests))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert report.num_bytes == sum(sizes.values())
    per_request = (sizes["manifest.json"] + sizes["requests-000001.json"]) / num_requests
    assert 500 < per_request < 2000
    # And the tokens take what int32 and float32 need, the header apart.
    arrays = sum(
        array.nbytes
        for request in requests
        for array in request.to_dict().values()
        if hasattr(array, "nbytes")
    )
    assert arrays <= sizes["requests-000001.safetensors"] <= arrays + 2000


def test_a_plain_request_takes_less(tmp_path):
    plain = [
        dataclasses.replace(
            make_request(i, num_tokens=0),
            prompt_logprobs=None,
            logprob_options=NO_LOGPROBS,
            params=dataclasses.replace(make_request(i).params, stop=(), logit_bias=None),
        )
        for i in range(64)
    ]
    report = CheckpointManager(tmp_path).save(make_checkpoint(plain))
    assert report.num_bytes / 64 < 1200
