"""Stored outputs: one whole run, normalised, or the file as it was."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from nanopd.course.execute import execute, main
from nanopd.errors import CourseError

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
