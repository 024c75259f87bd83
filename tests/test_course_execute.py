"""Stored outputs: one whole run, normalised, or the file as it was."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from nanopd.course.execute import execute, main
from nanopd.errors import ConfigError, CourseError

PROGRESS = (
    'import sys\nfor i in range(3):\n    print(f"\\r{i} of 2", end="", file=sys.stderr)\nprint("a")\nprint("b")\n41 + 1'
)


def write(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_markdown_cell("# Why?", id="title")]
    cells += [nbformat.v4.new_code_cell(s, id=f"cell-{i}", execution_count=90 + i) for i, s in enumerate(sources)]
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)) + "\n")
    return path


def test_outputs_are_stored_and_normalised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "00_why.ipynb", "import os; here = os.getcwd()", PROGRESS)
    assert main([str(path)]) == 0
    assert "cell-1" in capsys.readouterr().out
    notebook = nbformat.read(path, as_version=4)
    first, second = notebook.cells[1:]
    assert (first.execution_count, second.execution_count) == (1, 2)
    streams = {o.name: o.text for o in second.outputs if o.output_type == "stream"}
    assert streams == {"stderr": "2 of 2", "stdout": "a\nb\n"}
    (result,) = [o for o in second.outputs if o.output_type == "execute_result"]
    assert (result.execution_count, result.data["text/plain"]) == (2, "42")
    assert "version" not in notebook.metadata.language_info
    once = path.read_text()
    execute(path)
    assert path.read_text() == once


@pytest.mark.parametrize("also", [False, True])
def test_a_progress_bar_is_not_stored(tmp_path: Path, also: bool) -> None:
    """Not even one that is drawn as a widget; other widgets stay."""
    bar = "from tqdm.notebook import tqdm\nfor i in tqdm(range(3)): pass\nprint('done')"
    path = write(tmp_path / "00_why.ipynb", bar, "from ipywidgets import IntSlider; IntSlider()" if also else "1 + 1")
    execute(path)
    notebook = nbformat.read(path, as_version=4)
    assert [output.output_type for output in notebook.cells[1].outputs] == ["stream"]
    assert len(notebook.cells[2].outputs) == 1
    assert ("widgets" in notebook.metadata) is also


def test_a_failed_cell_leaves_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "00_why.ipynb", "print(1)", "1 / 0")
    before = path.read_text()
    with pytest.raises(CourseError, match=r"(?s)cell-1.*ZeroDivisionError"):
        execute(path)
    assert path.read_text() == before
    assert main([str(path)]) == 1
    assert main([]) == 2


def test_a_cell_that_hangs_is_ended(tmp_path: Path) -> None:
    path = write(tmp_path / "00_why.ipynb", "while True: pass")
    with pytest.raises(CourseError, match="cell-0"):
        execute(path, timeout=3)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_would_be_none_is_refused(tmp_path: Path, timeout: int) -> None:
    with pytest.raises(ConfigError, match="timeout must be a finite number of seconds > 0"):
        execute(write(tmp_path / "00_why.ipynb", "1"), timeout=timeout)


def cells(*cells: object, **changes: object) -> bytes:
    return json.dumps({"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": cells, **changes}).encode()


TEXT = {"cell_type": "markdown", "metadata": {}, "source": "x"}
CODE = {"cell_type": "code", "metadata": {}, "source": "1", "outputs": [], "execution_count": None}


@pytest.mark.filterwarnings("ignore:(Cell is missing an|Non-unique cell) id")  # nbformat's, which makes up others
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a notebook"),
        (b"\xff\xfe", "cannot read"),
        (b"[]", "is not a notebook"),
        (b"{}", "is not a notebook"),
        (cells(nbformat=5), "is not a notebook"),
        (cells(5), "is not a notebook"),
        (cells({**CODE, "outputs": 3}), "is not a notebook"),
        (cells(TEXT, CODE), "cell 1 has no id of its own"),
        (cells({**TEXT, "id": "a"}, CODE, nbformat_minor=5), "cell 2 has no id of its own"),
        (cells({**TEXT, "id": "a"}, {**CODE, "id": "a"}, nbformat_minor=5), "cell 2 has no id of its own"),
        (cells({**TEXT, "id": "a", "source": "x \ud800"}, nbformat_minor=5), "cannot be written as UTF-8"),
        (cells({**CODE, "id": "a", "source": "'\ud800'"}, nbformat_minor=5), "cannot be written as UTF-8"),
    ],
    ids=[
        "empty", "binary", "list", "object", "version", "no-cell", "outputs", "no-id", "an-id", "same-id", "surrogate",
        "in-code",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_run_is_named_and_left_alone(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nbclient.NotebookClient.execute", lambda _: pytest.fail("a kernel was started"))
    path = tmp_path / "00_why.ipynb"
    path.write_bytes(content)
    assert main([str(path)]) == 1
    error = capsys.readouterr().err
    assert "00_why.ipynb" in error and says in error and path.read_bytes() == content


def test_an_output_that_cannot_be_written_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "00_why.ipynb", "1")
    before = path.read_text()
    half = nbformat.v4.new_output("stream", text="\ud800")
    monkeypatch.setattr("nbclient.NotebookClient.execute", lambda client: client.nb.cells[1].outputs.append(half))
    with pytest.raises(CourseError, match=r"00_why\.ipynb cannot be written as UTF-8"):
        execute(path)
    assert path.read_text() == before
