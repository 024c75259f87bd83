"""Run notebooks and store their outputs: ``python -m nanopd.course.execute notebooks/00_*.ipynb``

One run from top to bottom in a fresh kernel, written back only when every cell succeeded. What a viewer does not show
and what differs from run to run for no reason is left out, so that a diff of a notebook is a diff of its results.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat

from nanopd.costmodel.checks import check_number
from nanopd.costmodel.files import write_whole
from nanopd.course.texts import read_notebook, read_text
from nanopd.errors import CourseError

CELL_TIMEOUT_S = 900
_WIDGET = "application/vnd.jupyter.widget-view+json"
_BAR = re.compile(r"\d+%\|")  # as in "Converting weights:   0%|          | 0.00/538M"


def execute(path: Path, *, timeout: int = CELL_TIMEOUT_S) -> list[tuple[str, float]]:
    """Runs one notebook in its own folder and rewrites it. Returns (cell id, seconds) of every code cell.

    Raises:
        CourseError: no notebook whose cells all have ids of their own, text that is no Unicode, a cell that failed or
            ran past ``timeout`` seconds; the file is as it was.
        ConfigError: a timeout that is not above 0 (nbclient takes that for none).
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    check_number("timeout", timeout, above=0.0, unit="seconds")
    notebook = _read(path)
    seconds: dict[str, float] = {}
    started: dict[str, float] = {}

    def starting(cell: Any, **_: Any) -> None:
        started[cell.id] = time.perf_counter()

    def ending(cell: Any, **_: Any) -> None:
        seconds[cell.id] = time.perf_counter() - started[cell.id]

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        on_cell_execute=starting,
        on_cell_executed=ending,
    )
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError) as error:  # a failed cell, a cell that took too long, a killed kernel
        where = next((i for i in reversed(started) if i not in seconds), next(reversed(started), "the first cell"))
        raise CourseError(f"{path.name}, cell {where}: {_plain(str(error)).strip()}") from None
    normalise(notebook)
    write_whole(path, [_text(path, notebook)])
    return list(seconds.items())


def _read(path: Path) -> Any:
    """The notebook, if it can be run and written again: found out before a kernel is started."""
    notebook = read_notebook(path)
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise CourseError(f"{path.name} is not a notebook: {str(error).splitlines()[0]}") from None
    given = [cell.get("id") for cell in json.loads(read_text(path)).get("cells", [])]  # nbformat makes up others
    given += [None] * (len(notebook.cells) - len(given))
    if number := next((i for i, name in enumerate(given, 1) if name is None or name in given[: i - 1]), None):
        raise CourseError(f"{path.name}, cell {number} has no id of its own: save it as nbformat 4.5 or later")
    _text(path, notebook)
    return notebook


def _text(path: Path, notebook: Any) -> str:
    """What the file will hold. Raises CourseError for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    text = nbformat.writes(notebook) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CourseError(f"{path.name} cannot be written as UTF-8: {error}") from None
    return text


def normalise(notebook: Any) -> None:
    """Counts cells from 1, leaves out the kernel's Python version, progress bars, and what text overwrote."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        **{key: value for key, value in notebook.metadata.items() if key == "widgets"},
    }
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
        cell.outputs = _merged([output for output in cell.outputs if not _is_progress_bar(output)])
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    if not any(_WIDGET in output.get("data", {}) for output in shown):
        notebook.metadata.pop("widgets", None)


def _is_progress_bar(output: Any) -> bool:
    """Of tqdm as a widget: its text, all that GitHub and nbconvert show, stays at 0 % for ever."""
    data = output.get("data", {})
    return _WIDGET in data and _BAR.search(data.get("text/plain", "")) is not None


def _merged(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream joined, then only what a terminal would still show of each line."""
    merged: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            lines = output.text.split("\n")
            output.text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return [output for output in merged if output.output_type != "stream" or output.text.strip()]


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or any(argument.startswith("-") for argument in arguments):
        print("usage: python -m nanopd.course.execute NOTEBOOK...", file=sys.stderr)
        return 2
    for name in arguments:
        try:
            cells = execute(Path(name))
        except (CourseError, OSError) as error:
            print(f"execute: {error}", file=sys.stderr)
            return 1
        slowest = sorted(cells, key=lambda cell: -cell[1])[:5]
        print(f"{name}: {sum(s for _, s in cells):.0f} s; " + ", ".join(f"{i} {s:.1f} s" for i, s in slowest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
