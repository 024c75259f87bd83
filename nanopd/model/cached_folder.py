"""A folder built once and trusted afterwards: built beside its place, moved there whole, checked before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

MANIFEST = "manifest.json"
_HASH_LIMIT = 16 << 20  # bytes; larger files are checked by size alone, hashing them would cost a second per start


def cached_folder(folder: Path, build: Callable[[Path], None], *, version: int = 1) -> Path:
    """``folder``, built by ``build(empty_folder)`` unless a complete one of this version is there already.

    * Killed at any moment, a build leaves nothing at ``folder`` that a later call takes for complete.
    * Two processes that come at once build it once: the second waits for the first.
    * A file that was cut short, changed (if small) or removed later is noticed, and the folder is built anew.

    Raises: whatever ``build`` raises, and OSError. Both leave ``folder`` as it was.
    """
    if is_complete(folder, version):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # the system drops the lock of a process that dies
        if is_complete(folder, version):
            return folder
        for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        building = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            building.mkdir()
            build(building)
            _write_manifest(building, version)
            if folder.exists():
                os.replace(folder, folder.with_name(f".{folder.name}.broken.tmp"))
            os.replace(building, folder)
        finally:
            for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
    return folder


def is_complete(folder: Path, version: int = 1) -> bool:
    """Whether ``folder`` holds exactly what its manifest says a build of this version wrote."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != version:
            return False
        return all(_describe(folder / name) == described for name, described in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_manifest(folder: Path, version: int) -> None:
    """Flush every file to the disk first, so that a power cut cannot keep the names and lose the contents."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    content = {"version": version, "files": {path.name: _describe(path) for path in files}}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(content, indent=2), encoding="utf-8")
    for path in (*files, manifest):
        with open(path, "rb+") as stream:
            os.fsync(stream.fileno())


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _HASH_LIMIT:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
