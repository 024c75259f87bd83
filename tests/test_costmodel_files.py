"""Result files: whole or not at all, and never in the place of something that is no file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanopd.costmodel.files import check_writable, write_whole
from nanopd.errors import ConfigError


def test_a_file_is_written_in_a_new_folder(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "new" / "r.json", ["é", "2"])
    assert path.read_text(encoding="utf-8") == "é2" and os.listdir(path.parent) == ["r.json"]


def test_what_breaks_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "r.json", ["old"])

    def parts() -> Iterator[str]:
        yield "new" * 10_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, parts())
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["r.json"]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "r.json"

    def parts() -> Iterator[str]:
        yield "outer "
        write_whole(path, ["inner"])
        yield "outer"

    assert write_whole(path, parts()).read_text() == "outer outer"
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, ["new"])
    assert link.is_symlink() and real.read_text() == "new"


@pytest.mark.parametrize(
    "act", [lambda p: check_writable("--out", p), lambda p: write_whole(p, ["x"])], ids=["ask", "do"]
)
def test_a_pipe_or_a_device_is_not_replaced(act, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="no regular file"):
        act(pipe)
    assert pipe.is_fifo()
    with pytest.raises(ConfigError, match="is a folder"):
        act(tmp_path)


def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    check_writable("--out", tmp_path / "new" / "r.json")
    assert os.listdir(tmp_path / "new") == []
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "r.json", tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
            check_writable("--out", path)
    check_writable("--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["loop", "loop/r.json"])
def test_links_in_a_circle_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"--out .*loop.* cannot be written: "):
        check_writable("--out", tmp_path / name)
    with pytest.raises(OSError):
        write_whole(tmp_path / name, ["x"])
    assert os.listdir(tmp_path) == ["loop"] and (tmp_path / "loop").is_symlink()
