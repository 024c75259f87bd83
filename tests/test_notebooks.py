"""What every notebook must have, beside running (nbval runs them): a question, ids, outputs, no traces of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nanopd.course.links import is_relative, links
from nanopd.course.texts import Root

ROOT = Root.find(Path(__file__).parent)
NOTEBOOKS = ROOT.notebooks()
CHINESE = re.compile(r"[\u3400-\u9fff]")
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(home|root|Users|tmp|work|mnt|workspace|opt|var)/[\w./-]+")
CELL_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
NBVAL_MARKER = re.compile(r"#.*\b(NBVAL_\w+|PYTEST_VALIDATE_\w+)")
# "must be the whole comment line": nbval ignores a marker with text behind it
WHOLE_MARKER = re.compile(r"^# (NBVAL_\w+)$", re.MULTILINE)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def output_texts(cell: Any) -> Iterator[str]:
    """Everything textual that a reader sees of a cell's outputs."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        for kind, data in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield data


def complaints(notebook: Any) -> list[str]:
    """Every rule that a notebook breaks, one line each."""
    found = []
    cells = notebook.cells
    ids = [cell.get("id", "") for cell in cells]
    title = cells[0].source.strip().splitlines()[0] if cells and cells[0].source.strip() else ""
    if not (cells and cells[0].cell_type == "markdown" and title.startswith("# ") and title.endswith("?")):
        found.append(f"the first cell must be a title that asks a question, not {title!r}")
    found += [f"cell id {i!r} is used twice" for i in sorted({i for i in ids if ids.count(i) > 1})]
    for cell in cells:
        name = cell.get("id", "")
        if not CELL_ID.fullmatch(name) or len(name) < 3 or re.fullmatch(r"[0-9a-f]{8}", name):
            found.append(f"cell id {name!r} must say what the cell does: lower-case words joined by dashes")
        if CHINESE.search(cell.source):
            found.append(f"{name}: English notebooks hold no Chinese text")
        if MACHINE_PATH.search(cell.source):
            found.append(f"{name}: absolute path {MACHINE_PATH.search(cell.source).group()}")
        if cell.cell_type == "code":
            found += code_complaints(cell, name)
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    if None not in counts and counts != list(range(1, len(counts) + 1)):
        found.append(
            "execution counts are not 1, 2, 3, ...: the stored outputs are not from one run from top to bottom"
        )
    return found


def code_complaints(cell: Any, name: str) -> list[str]:
    found = []
    if cell.execution_count is None:
        found.append(f"{name}: was not run (no stored outputs)")
    if any(output.output_type == "error" for output in cell.outputs):
        if "raises-exception" not in cell.metadata.get("tags", []):
            found.append(f"{name}: the stored output is an error")
    for text in output_texts(cell):
        if match := MACHINE_PATH.search(text):
            found.append(f"{name}: output holds the absolute path {match.group()}")
        if "Traceback (most recent call last)" in text and "raises-exception" not in cell.metadata.get("tags", []):
            found.append(f"{name}: output holds a traceback")
    if len(NBVAL_MARKER.findall(cell.source)) != len(WHOLE_MARKER.findall(cell.source)):
        found.append(f"{name}: an nbval marker must be a whole comment line, '# NBVAL_CHECK_OUTPUT'")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_keeps_the_rules(path: Path) -> None:
    assert complaints(read(path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_written_as_nbformat_writes_it(path: Path) -> None:
    """Else every tool that saves it makes a diff of the whole file."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.nbformat_minor >= 5
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    for file in filter(Path.is_file, (path, ROOT.chinese(path))):  # a missing twin is the translation check's business
        for cell in read(file).cells:
            for target in links(cell.source) if cell.cell_type == "markdown" else []:
                exists = not is_relative(target) or (file.parent / target.partition("#")[0]).exists()
                assert exists, f"{file.name}, cell {cell.id}: {target}"


def test_course_order() -> None:
    numbers = [int(path.name[:2]) for path in NOTEBOOKS]
    assert numbers == list(range(len(numbers)))
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in NOTEBOOKS)


# --- the rules can fail ----------------------------------------------------------------------------------------


def good() -> Any:
    output = nbformat.v4.new_output("stream", text="132 SMs\n")
    return nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Why two phases?", id="title"),
            nbformat.v4.new_code_cell("print(1)", id="measure-copy", outputs=[output], execution_count=1),
        ]
    )


def test_a_good_notebook_has_no_complaints() -> None:
    assert complaints(good()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda nb: nb.cells[0].update(source="# Two phases"), "asks a question"),
        (lambda nb: nb.cells[0].update(id="measure-copy"), "used twice"),
        (lambda nb: nb.cells[1].update(id="3f2a9c1e"), "must say what the cell does"),
        (lambda nb: nb.cells[1].update(id="Measure copy"), "must say what the cell does"),
        (lambda nb: nb.cells[1].update(execution_count=None), "was not run"),
        (lambda nb: nb.cells[1].update(execution_count=7), "not 1, 2, 3"),
        (lambda nb: nb.cells[1].update(source="# 说明"), "no Chinese"),
        (lambda nb: nb.cells[1].update(source="open('/home/me/x')"), "absolute path /home/me/x"),
        (lambda nb: nb.cells[1].outputs[0].update(text="/root/a/b.py: warning"), "absolute path /root/a/b.py"),
        (lambda nb: nb.cells[1].outputs[0].update(text="Traceback (most recent call last):"), "traceback"),
        (
            lambda nb: nb.cells[1].outputs.append(nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])),
            "is an error",
        ),
        (lambda nb: nb.cells[1].update(source="# NBVAL_CHECK_OUTPUT exact\n1"), "whole comment line"),
        (lambda nb: nb.cells[1].update(source="1  # NBVAL_SKIP"), "whole comment line"),
    ],
)
def test_a_broken_rule_is_named(change: Any, says: str) -> None:
    notebook = good()
    change(notebook)
    assert any(says in complaint for complaint in complaints(notebook)), complaints(notebook)
