"""What the learner has solved, in ``$NANOPD_CACHE/progress.json``.

Several notebooks, each with a kernel of its own, write this file: every change is a read-modify-write under a file
lock, and the new file replaces the old one in one step, so that a killed kernel leaves the old one whole.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: one kernel at a time
    fcntl = None  # type: ignore[assignment]


def cache_dir() -> Path:
    """The folder of everything nanopd keeps between runs (the same rule as the kernel and model caches)."""
    return Path(os.environ.get("NANOPD_CACHE") or "~/.cache/nanopd").expanduser()


@dataclass
class Record:
    """One exercise of one notebook."""

    attempts: int = 0  # checks that ran to a verdict; "not attempted" does not count
    hints: int = 0  # how many hints were revealed
    solved_at: str | None = None  # UTC, ISO 8601: the first time that every case passed

    @property
    def solved(self) -> bool:
        return self.solved_at is not None


def _record(data: dict[str, Any]) -> Record:
    """Fields of a later version are left out. Raises TypeError for a value of another type."""
    record = Record(**{key: value for key, value in data.items() if key in {field.name for field in fields(Record)}})
    if (
        type(record.attempts) is not int
        or type(record.hints) is not int
        or not isinstance(record.solved_at, str | None)
    ):
        raise TypeError(f"not a record of an exercise: {data}")
    return record


class Progress:
    """Records by notebook ("00") and exercise name. An unreadable file is set aside, never overwritten."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_dir() / "progress.json"

    def read(self) -> dict[str, dict[str, Record]]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            return {
                str(notebook): {str(name): _record(record) for name, record in records.items()}
                for notebook, records in data["notebooks"].items()
            }
        except (FileNotFoundError, NotADirectoryError):  # the latter: the cache "folder" is a file
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.path.replace(self.path.with_suffix(".unreadable.json"))
            return {}

    def get(self, notebook: str, name: str) -> Record:
        return self.read().get(notebook, {}).get(name, Record())

    def count_attempt(self, notebook: str, name: str, *, solved: bool) -> Record:
        """Adds one attempt; the first solved one sets the date. Raises OSError when the folder is not writable."""
        with self._changing(notebook, name) as record:
            record.attempts += 1
            if solved and record.solved_at is None:
                record.solved_at = datetime.now(UTC).isoformat(timespec="seconds")
        return record

    def reveal_hint(self, notebook: str, name: str, available: int) -> int:
        """Counts one more hint and returns how many are revealed now (at most ``available``)."""
        with self._changing(notebook, name) as record:
            record.hints = min(record.hints + 1, available)
        return record.hints

    def reset(self) -> None:
        with self._locked(), suppress(FileNotFoundError):
            self.path.unlink()

    @contextmanager
    def _changing(self, notebook: str, name: str) -> Iterator[Record]:
        with self._locked():
            records = self.read()
            record = records.setdefault(notebook, {}).setdefault(name, Record())
            yield record
            self._write(records)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The lock is a file of its own: progress.json is replaced, and a lock on it would go with the old file.
        with open(self.path.with_suffix(".lock"), "w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when the process dies
            yield

    def _write(self, records: dict[str, dict[str, Record]]) -> None:
        data: dict[str, Any] = {
            "version": 1,
            "notebooks": {nb: {name: asdict(r) for name, r in rs.items()} for nb, rs in sorted(records.items())},
        }
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=2)
            os.replace(temporary, self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
