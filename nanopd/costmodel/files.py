"""Write a result file whole or not at all, and find out beforehand whether that can be done."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanopd.errors import ConfigError


def write_whole(path: str | Path, parts: Iterable[str]) -> Path:
    """Write the texts, one after the other, as UTF-8; the folder is made if need be. Returns the path.

    Into a file beside it that then takes the name: whoever reads finds the old file or the new one, also if this
    process dies half-way, the disk is full, or another process writes the same file at the same time.

    Raises OSError, and ConfigError for something else than a file, such as /dev/null, which would be replaced.
    """
    path = Path(path)
    _check_kind("the file", path)
    target = _target(path)  # a link stays one, also to another file system
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.writelines(parts)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def check_writable(name: str, path: Path) -> None:
    """Raise ConfigError now rather than after an hour of measuring. Leaves nothing behind but the folder of the file.

    ``name``: the option, for the message.
    """
    try:
        _check_kind(name, path)
        folder = _target(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be written: {error.strerror or error}") from error


def _target(path: Path) -> Path:
    """The file behind links. Raises OSError for links in a circle, where ``Path.resolve`` may raise RuntimeError."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _check_kind(name: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a folder: name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} {path} is no regular file and would be replaced: name another")
