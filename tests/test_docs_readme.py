"""The course map of both READMEs follows the notebooks, and the commands they show exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from nanopd.course import course_map
from nanopd.course.texts import Root
from nanopd.course.translate_docs import source_hash, stamp, stamped_hash
from nanopd.errors import CourseError

ROOT = Root.find(Path(__file__).parent)
ENGLISH = "# nanopd\n\n| | question | build | state |\n|---|---|---|---|\n| 00 | Old? | a roofline | planned |\n"
ENGLISH += "| 01 | [Gone?](notebooks/01_gone.ipynb) | paging | ready |\n"
CHINESE = "# nanopd\n\n| | 问题 | 写出 | 状态 |\n|---|---|---|---|\n| 00 | 旧？ | 屋顶线 | 计划中 |\n"
CHINESE += "| 01 | [没了？](notebooks/zh/01_gone.ipynb) | 分页 | 可用 |\n"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    for folder in ("notebooks/zh", "nanopd", "docs/en", "docs/zh"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text(ENGLISH)
    (tmp_path / "README.zh.md").write_text(CHINESE)
    write(tmp_path / "notebooks/00_why.ipynb", "# Why?\n\nText")
    root = Root(tmp_path)
    stamp(root, [tmp_path / "README.zh.md"])
    return root


def write(path: Path, source: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source, id="title")])
    path.write_text(nbformat.writes(notebook) + "\n")


def test_fill(root: Root, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(root.path)
    assert course_map.main(["check"]) == 1
    assert "README.zh.md: the course map differs" in capsys.readouterr().err
    assert course_map.main(["fill"]) == 0
    assert course_map.main(["check"]) == 0
    english, chinese = (root.path / "README.md").read_text(), (root.path / "README.zh.md").read_text()
    assert "| 00 | [Why?](notebooks/00_why.ipynb) | a roofline | ready |\n| 01 | Gone? | paging | planned |" in english
    assert "| 00 | [Why?](notebooks/00_why.ipynb) | 屋顶线 | 可用 |\n| 01 | 没了？ | 分页 | 计划中 |" in chinese
    assert stamped_hash(chinese) == source_hash(english), "the map is no translation: the stamp follows"
    write(root.path / "notebooks/zh/00_why.ipynb", "# 为什么？")
    assert course_map.main(["fill"]) == 0
    assert "| 00 | [为什么？](notebooks/zh/00_why.ipynb) |" in (root.path / "README.zh.md").read_text()


def test_a_stale_translation_stays_stale(root: Root) -> None:
    (root.path / "README.md").write_text(ENGLISH + "\nA new sentence.\n")
    course_map.fill(root)
    english, chinese = (root.path / "README.md").read_text(), (root.path / "README.zh.md").read_text()
    assert stamped_hash(chinese) != source_hash(english)


def test_a_notebook_without_a_title_is_named(root: Root) -> None:
    write(root.path / "notebooks/00_why.ipynb", "No title")
    with pytest.raises(CourseError, match=r"00_why.ipynb does not begin"):
        course_map.fill(root)


def test_the_maps_follow_the_notebooks() -> None:
    stale = [ROOT.show(path) for path, now, filled in course_map.filled_readmes(ROOT) if now != filled]
    assert stale == [], "run: python -m nanopd.course.course_map fill"


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_maps_list_the_whole_course(name: str) -> None:
    text = (ROOT.path / name).read_text(encoding="utf-8")
    assert course_map.rows(text) == [f"{number:02}" for number in range(12)]


def test_commands_of_the_readme_exist() -> None:
    from nanopd.cli.app import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    text = (ROOT.path / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"^\.venv/bin/nanopd ([a-z-]+)", text, re.MULTILINE))
    assert used
    assert used <= commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT.path / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("number", [0, 1], ids=["route", "simulate"])
@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_output_that_the_readme_shows_is_what_the_command_prints(name: str, number: int) -> None:
    """Two commands that measure nothing, so that they print the same everywhere."""
    text = (ROOT.path / name).read_text(encoding="utf-8")
    command = ("nanopd route --profile h200", "nanopd simulate --hardware h200")[number]
    (line,) = [line for line in text.splitlines() if line.startswith(f".venv/bin/{command}")]
    words = line.partition("#")[0].split()[1:]
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    shown = [row.split() for row in blocks[number].splitlines() if row.strip()]
    printed = subprocess.run(
        [sys.executable, "-c", "from nanopd.cli import main; main()", *words],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
    ).stdout  # fmt: skip
    rows = [row.split() for row in printed.splitlines()]
    assert [row for row in shown if row not in rows] == []
