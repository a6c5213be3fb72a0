"""Reads TensorBoard's event files back."""

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import Any

EVENTS: Any = importlib.import_module("tensorboardX.proto.event_pb2")


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every tag in the event files of a folder."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (size,) = struct.unpack_from("<Q", data, start)  # then 4 bytes of its checksum
            event = EVENTS.Event.FromString(data[start + 12 : start + 12 + size])
            start += 12 + size + 4
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
