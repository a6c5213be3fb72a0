"""How XLA calls foreign functions: the layout of its C structures, from its header.

This holds only the byte offsets needed here. The header comes with jaxlib; `problem` compares it
with the layout assumed here, so that a different layout is found before it is used.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jax

# Structures begin with their size and a pointer to extensions, 8 bytes each.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT = 8, 16, 24
FRAME_NUM_ARGUMENTS, FRAME_ARGUMENTS = 40 + 16, 40 + 32
FRAME_RESULTS, FRAME_ATTRIBUTES = 80 + 32, 120 + 40
BUFFER_DATA, ARRAY_DATA = 24, 16
EXTENSION_KIND, EXTENSION_METADATA = 8, 24
METADATA_KIND = 1
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS = 24, 28, 32
API_FUNCTIONS = 48

SCHEDULE = ("struct_size", "extension_start", "ctx", "task", "data")
COUNT = ("struct_size", "extension_start", "ctx", "num_threads")
DESTROY = ("struct_size", "extension_start", "error")

_EXPECTED = {
    "XLA_FFI_Extension_Base": ("struct_size", "type", "next"),
    "XLA_FFI_Api_Version": ("struct_size", "extension_start", "major_version", "minor_version"),
    "XLA_FFI_Api": ("struct_size", "extension_start", "api_version", "internal_api"),
    "XLA_FFI_Buffer": ("struct_size", "extension_start", "dtype", "data", "rank", "dims"),
    "XLA_FFI_Args": ("struct_size", "extension_start", "size", "types", "args"),
    "XLA_FFI_Rets": ("struct_size", "extension_start", "size", "types", "rets"),
    "XLA_FFI_Attrs": ("struct_size", "extension_start", "size", "types", "names", "attrs"),
    "XLA_FFI_Array": ("dtype", "size", "data"),
    "XLA_FFI_CallFrame": (
        "struct_size",
        "extension_start",
        "api",
        "ctx",
        "stage",
        "args",
        "rets",
        "attrs",
    ),
    "XLA_FFI_Metadata": ("struct_size", "api_version", "traits"),
    "XLA_FFI_Metadata_Extension": ("extension_base", "metadata"),
    "XLA_FFI_ThreadPool_Schedule_Args": SCHEDULE,
    "XLA_FFI_ThreadPool_NumThreads_Args": COUNT,
    "XLA_FFI_Error_Destroy_Args": DESTROY,
}
"""Members of structures in order; more may follow."""

_NEW_NAMES = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}
"""New names of some structures, from version 0.5 of the interface on."""


class Api(NamedTuple):
    """The facts that differ between versions: the version, and offsets of XLA's functions."""

    major: int
    minor: int
    schedule: int
    num_threads: int
    destroy_error: int


@functools.cache
def load_api() -> Api | str:
    """The API of the installed XLA, or why it cannot be used."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return "jaxlib lacks the header of XLA's foreign functions"
    return parse_api(header.read_text(encoding="utf-8"))


def parse_api(header: str) -> Api | str:
    """The API that a header declares, or why it cannot be used.

    Args:
        header: The text of `xla/ffi/api/c_api.h`.
    """
    text = re.sub(r"//[^\n]*", "", header)
    for name, members in _EXPECTED.items():
        names = f"{name}|{_NEW_NAMES.get(name, name)}"
        found = re.search(rf"struct (?:{names}) \{{(.*?)\}}", text, re.DOTALL)
        listed = re.findall(r"(\w+)\s*;", found[1]) if found else []
        if tuple(listed[: len(members)]) != members:
            return f"XLA's structure {name} has another layout"
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\)", text)
    wanted = ("ThreadPool_Schedule", "ThreadPool_NumThreads", "Error_Destroy")
    missing = [name for name in wanted if f"XLA_FFI_{name}" not in functions]
    if missing or len(versions) != 2 or versions["MAJOR"] != "0":
        return f"XLA lacks {', '.join(missing) or 'a version'} of foreign functions"
    offsets = [API_FUNCTIONS + 8 * functions.index(f"XLA_FFI_{name}") for name in wanted]
    return Api(int(versions["MAJOR"]), int(versions["MINOR"]), *offsets)
