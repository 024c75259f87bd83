"""A folder of compiled kernels that several processes may use at once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_MAGIC = b"nanopd-1"
_DIGEST_BYTES = 32


class DiskCache:
    """Maps a key (hex digest) to a pair (binary, text).

    An entry is written to a temporary file and renamed, so a reader sees all of it or nothing, and two processes that
    compile the same kernel merely do the work twice. Each entry carries its SHA-256: one cut short or damaged by a
    full disk or a crash is treated as absent and replaced. A folder that cannot be written only costs the caching.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.bin"

    def get(self, key: str) -> tuple[bytes, str] | None:
        """The entry, or None when there is none or it is damaged."""
        try:
            raw = self.path(key).read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + _DIGEST_BYTES
        digest, body = raw[len(_MAGIC) : start], raw[start:]
        if raw[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != digest:
            return None
        text_bytes = int.from_bytes(body[:8], "little")
        return body[8 + text_bytes :], body[8 : 8 + text_bytes].decode()

    def put(self, key: str, binary: bytes, text: str) -> None:
        """Store an entry, replacing any that is there."""
        encoded = text.encode()
        body = len(encoded).to_bytes(8, "little") + encoded + binary
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        except OSError:
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
