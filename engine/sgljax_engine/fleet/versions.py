"""Finds the versions of a store, and tells them from those of another."""

from __future__ import annotations

import logging

from sgljax_engine.errors import WeightStoreError
from sgljax_engine.fleet.files import MANIFEST, STORE_FILE, StoreFiles
from sgljax_engine.fleet.manifest import Manifest, read_signed, signed

logger = logging.getLogger(__name__)

_STORE_FORMAT = "sgljax-weight-store-1"


def load_manifest(files: StoreFiles, version: int) -> Manifest:
    """The manifest of a version.

    Raises:
        WeightStoreError: names the file that is missing, damaged, or of another version or store.
    """
    path = files.path(version, MANIFEST)
    manifest = Manifest.from_bytes(files.read(path), files.shown(path))
    if manifest.version != version:
        raise WeightStoreError(
            f"{files.shown(path)} is of version {manifest.version}, expected {version}"
        )
    store = parse_store_file(files.read(STORE_FILE), files.shown(STORE_FILE))
    if manifest.store != store:
        raise WeightStoreError(
            f"{files.shown(path)} is of the store {manifest.store}, expected {store}, which "
            f"{STORE_FILE} names"
        )
    return manifest


def newest_manifest(files: StoreFiles) -> Manifest | None:
    """The manifest of the newest version that has a valid one; None if none has."""
    for version in reversed(files.versions()):
        try:
            return load_manifest(files, version)
        except WeightStoreError as error:
            if files.has_manifest(version):  # else it is being written, or its writer has died
                logger.warning("version %d is passed over: %s", version, error)
    return None


def parse_store_file(data: bytes, shown: str) -> str:
    """The random id of a store, which all its versions have; raises as `Manifest.from_bytes`."""
    return str(read_signed(data, shown, _STORE_FORMAT).get("id"))


def store_file(store: str) -> bytes:
    """Contents of the file that names a store."""
    return signed({"format": _STORE_FORMAT, "id": store})
