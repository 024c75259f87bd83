"""The course map of both READMEs says what is there: notebooks that exist are linked by title, others are planned."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from nanopd.course.texts import Root

ROOT = Root.find(Path(__file__).parent)
ROW = re.compile(r"^\| (?P<number>\d\d) \| (?P<question>.*?) \| .* \| (?P<state>.*?) \|$", re.MULTILINE)


def rows(readme: str) -> dict[str, tuple[str, str]]:
    """Number -> (question cell, state cell) of the course map."""
    text = (ROOT.path / readme).read_text(encoding="utf-8")
    return {match["number"]: (match["question"], match["state"]) for match in ROW.finditer(text)}


def title(notebook: Path) -> str:
    return nbformat.read(notebook, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ").strip()


def wrong_rows(readme: str, planned: str, notebooks: list[Path]) -> list[str]:
    """What the map of one README gets wrong, one line each."""
    found, table = [], rows(readme)
    existing = {notebook.name[:2]: notebook for notebook in notebooks}
    if sorted(table) != [f"{number:02}" for number in range(12)]:
        found.append(f"{readme}: the map has rows {sorted(table)}, not 00 to 11")
    for number, (question, state) in table.items():
        if number not in existing:
            if state != planned or "](" in question:
                found.append(f"{readme} {number}: is not written, so it must be '{planned}' and have no link")
            continue
        link = f"[{title(existing[number])}]({existing[number].relative_to(ROOT.path).as_posix()})"
        if question != link or state == planned:
            found.append(f"{readme} {number}: must be {link} and not '{planned}'")
    return found


@pytest.mark.parametrize(("readme", "planned"), [("README.md", "planned"), ("README.zh.md", "计划中")])
def test_course_map(readme: str, planned: str) -> None:
    notebooks = ROOT.notebooks() if readme == "README.md" else [ROOT.chinese(path) for path in ROOT.notebooks()]
    assert wrong_rows(readme, planned, notebooks) == []


def test_the_map_check_can_fail(tmp_path: Path) -> None:
    missing = [path for path in ROOT.notebooks() if path.name[:2] != "00"]
    without = wrong_rows("README.md", "planned", missing)
    if ROOT.notebooks():
        assert without == ["README.md 00: is not written, so it must be 'planned' and have no link"]
    assert wrong_rows("README.md", "later", ROOT.notebooks())


def test_both_maps_list_the_same_notebooks() -> None:
    english, chinese = rows("README.md"), rows("README.zh.md")
    assert list(english) == list(chinese)
    assert [state == "planned" for _, state in english.values()] == [s == "计划中" for _, s in chinese.values()]


def test_commands_of_the_readme_exist() -> None:
    from nanopd.cli.app import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    text = (ROOT.path / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"^\.venv/bin/nanopd ([a-z-]+)", text, re.MULTILINE))
    assert used
    assert used <= commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT.path / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`?\bmake ([a-z]+)(?=[ `\n])", text)) - {"a", "take"} <= targets
