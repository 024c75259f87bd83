"""Numbers in prose come from docs/results, and a number that does not is caught."""

from __future__ import annotations

import json
import math
from pathlib import Path

import nbformat
import pytest

from nanopd.course import numbers
from nanopd.course.numbers import fill_values, filled_files, strip_values
from nanopd.course.texts import Root
from nanopd.errors import CourseError


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "docs" / "results" / "card"
    folder.mkdir(parents=True)
    values = {"a": {"b": [4.961, {"c": 12}]}, "kv0.5": {"x": 3}, "driver": "580.1", "dead": {"n": 1}}
    values |= {"zero": 0, "yes": True, "nan": math.nan, "huge": 10**400, "two words": {"x": 7}}
    (folder / "step.json").write_text(json.dumps({"gpu": "Card", "values": values}))
    (folder / "cut.json").write_text("{")
    (folder / "binary.json").write_bytes(b"\xff")
    return tmp_path / "docs" / "results"


def marker(expression: str, value: str = "") -> str:
    return f"<!--r:{expression}-->{value}<!--/r-->"


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("card/step.json#a.b.0:.2f", "4.96"),
        ("card/step.json#a.b.1.c:d", "12"),
        ("card/step.json#kv0.5.x:d", "3"),
        ("card/step.json#two%20words.x:d", "7"),
        ("card/step.json#driver:", "580.1"),
        ("card/step.json#gpu:", "Card"),
        ("card/step.json#a.b.1.c / card/step.json#a.b.0:.1f", "2.4"),
        ("card/step.json#a.b.1.c * 1000 / 4:,.0f", "3,000"),
        ("card/step.json#a.b.1.c - 2 + 1:.0f", "11"),
    ],
)
def test_fill(results: Path, expression: str, shown: str) -> None:
    filled = fill_values(f"| {marker(expression, 'old')} ms |", results)
    assert filled == f"| {marker(expression, shown)} ms |"
    assert fill_values(filled, results) == filled
    assert strip_values(filled) == f"| {marker(expression)} ms |"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (marker("card/none.json#a:.2f", "1"), "card/none.json does not exist"),
        (marker("card/step.json#a.z:.2f", "1"), "no number at 'a.z'"),
        (marker("card/step.json#a.b.7:.2f", "1"), "no number at 'a.b.7'"),
        (marker("card/step.json#a:.2f", "1"), "no number at 'a'"),
        (marker("card/step.json#driver:.2f", "1"), "Unknown format code"),
        (marker("card/step.json#a.b.0 % 2:.2f", "1"), "unknown operator"),
        (marker("card/step.json#a.b.0 /:.2f", "1"), "ends in an operator"),
        (marker("two:.2f", "1"), "neither a number nor"),
        (marker("1e400:.2f", "1"), "neither a number nor"),
        (
            marker("card/step.json#kv0.5.x / card/step.json#zero:.2f", "1"),
            "cannot be computed: float division|division",
        ),
        (marker("card/step.json#driver * 2:.2f", "1"), "cannot be computed"),
        (marker("card/step.json#huge * 2:.2f", "1"), "cannot be computed"),
        (marker("card/step.json#huge:.2f", "1"), "too large"),
        (marker("card/step.json#yes:.2f", "1"), "no number at 'yes'"),
        (marker("card/step.json#nan:.2f", "1"), "nan at 'nan'"),
        (marker("card/cut.json#a:.2f", "1"), "cut.json is not JSON"),
        (marker("card/binary.json#a:.2f", "1"), "cannot read binary.json"),
        ("<!--r:card/step.json#a.b.0-->1<!--/r-->", "malformed"),
        ("It takes\n<!--r:card/step.json#a.b.0:.2f-->1<!--/r--> ms.", "begins with a marker"),
        ("<!--r:card/step.json#a.b.0:.2f-->1", "malformed"),
        ("<!--r:card/step.json#a.b.0:.2f-->1 " + marker("card/step.json#a.b.0:.2f", "1"), "malformed"),
        ("<!-- r:card/step.json#a.b.0:.2f-->1<!--/r-->", "malformed"),
    ],
)
def test_what_is_refused(results: Path, text: str, says: str) -> None:
    with pytest.raises(CourseError, match=says):
        fill_values(text, results)


def test_an_example_in_code_is_left_alone(results: Path) -> None:
    text = f"write `{marker('card/none.json#a:.2f', '1')}`"
    assert fill_values(text, results) == text


def test_fill_and_check_over_a_checkout(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    top = results.parents[1]
    for folder in ("notebooks/zh", "nanopd", "docs/en", "docs/zh"):
        (top / folder).mkdir(parents=True)
    old = f"takes {marker('card/step.json#a.b.0:.2f', '5.00')} ms"
    (top / "README.md").write_text(old)
    (top / "docs/zh/engine.md").write_text(old)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(old, id="result")])
    (top / "notebooks/00_why.ipynb").write_text(nbformat.writes(notebook) + "\n")
    monkeypatch.chdir(top)
    assert numbers.main(["check"]) == 1
    complaints = capsys.readouterr().err
    assert all(name in complaints for name in ("README.md", "docs/zh/engine.md", "notebooks/00_why.ipynb"))
    assert numbers.main(["fill"]) == 0
    assert numbers.main(["check"]) == 0
    assert "-->4.96<!--/r-->" in (top / "README.md").read_text()
    assert "-->4.96<!--/r-->" in nbformat.read(top / "notebooks/00_why.ipynb", as_version=4).cells[0].source
    assert numbers.main([]) == 2


def test_every_number_of_the_project_agrees_with_its_source() -> None:
    stale = [str(path) for path, now, filled in filled_files(Root.find()) if now != filled]
    assert stale == [], "run: python -m nanopd.course.numbers fill"
