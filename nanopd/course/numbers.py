"""Numbers in prose that come from ``docs/results``: written by a tool, checked by a test, invisible when rendered.

In any Markdown text (docs, README, notebook cells) a measured number is written as ::

    <!--r:nvidia-h200/engine.json#decode_ms:.2f-->4.96<!--/r-->

``file#key`` names a JSON file under docs/results and a dotted key (looked up under "values" first, then at the top;
list items by index). Terms can be joined with ``* / + -`` (spaces around; evaluated left to right) and plain numbers:
``a.json#x / a.json#y:.1f``. The format after the last colon is Python's. A marker right after a backtick is an example
in code and is left alone. ``python -m nanopd.course.numbers fill`` writes the values in; ``check`` fails when one
differs from its source or names something that does not exist.
"""

from __future__ import annotations

import json
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat

from nanopd.course.texts import Root, markdown_files, read_notebook, read_text, write_if_changed
from nanopd.errors import CourseError

MARKER = re.compile(r"(?<!`)<!--r:(?P<expression>[^>]*?):(?P<format>[^:>]*)-->(?P<value>.*?)<!--/r-->", re.DOTALL)
_OPENING = re.compile(r"(?<!`)<!--\s*r\b")
_AT_LINE_START = re.compile(r"^ {0,3}(<!--r:.{0,60})", re.MULTILINE)
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "*": operator.mul,
    "/": operator.truediv,
    "+": operator.add,
    "-": operator.sub,
}


def strip_values(text: str) -> str:
    """The text with every marked value emptied: what a translation depends on (a new measurement does not stale it)."""
    return MARKER.sub(lambda m: f"<!--r:{m['expression']}:{m['format']}--><!--/r-->", text)


def fill_values(text: str, results: Path, where: str = "text") -> str:
    """The text with every marked value computed from the JSON files under ``results``.

    Raises:
        CourseError: a file or key does not exist, is no number, or the marker is malformed or begins a line.
    """
    if len(_OPENING.findall(text)) != len(MARKER.findall(text)):
        raise CourseError(f"{where}: malformed result marker; write <!--r:file.json#key:.2f-->value<!--/r-->")

    def render(match: re.Match[str]) -> str:
        value = evaluate(match["expression"], results, where)
        try:
            shown = format(value, match["format"])
        except (ValueError, OverflowError) as error:
            raise CourseError(f"{where}: {match['expression']}: {error}") from None
        return f"<!--r:{match['expression']}:{match['format']}-->{shown}<!--/r-->"

    filled = MARKER.sub(render, text)
    if found := _AT_LINE_START.search(text):  # Markdown takes that for the start of a block, and ends the paragraph
        raise CourseError(f"{where}: a line begins with a marker; begin it with a word: {found[1]}")
    return filled


def evaluate(expression: str, results: Path, where: str) -> Any:
    """``term (op term)*`` from left to right. A single term may also be a string, such as a driver version."""
    parts = expression.strip().split(" ")
    value = _term(parts[0], results, where)
    for symbol, term in zip(parts[1::2], parts[2::2], strict=False):
        if symbol not in _OPERATORS:
            raise CourseError(f"{where}: unknown operator {symbol!r} in {expression!r}; use * / + - with spaces around")
        try:
            value = _OPERATORS[symbol](value, _term(term, results, where))
        except (TypeError, ArithmeticError) as error:  # a text, a division by zero
            raise CourseError(f"{where}: {expression!r} cannot be computed: {error}") from None
    if len(parts) % 2 == 0:
        raise CourseError(f"{where}: {expression!r} ends in an operator")
    return value


def _term(term: str, results: Path, where: str) -> Any:
    if "#" not in term:
        try:
            number = float(term)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise CourseError(f"{where}: {term!r} is neither a number nor file.json#key")
        return number
    name, key = term.split("#", 1)
    key = unquote(key)  # a space in a key is written %20: in the expression it parts the terms
    path = results / name
    if not path.is_file():
        raise CourseError(f"{where}: docs/results/{name} does not exist")
    try:
        data = json.loads(read_text(path))
    except ValueError as error:
        raise CourseError(f"{where}: docs/results/{name} is not JSON: {error}") from None
    for top in (data.get("values"), data) if isinstance(data, dict) else (data,):
        found = _lookup(top, key)
        if isinstance(found, int | float | str) and not isinstance(found, bool):
            if isinstance(found, float) and not math.isfinite(found):
                raise CourseError(f"{where}: docs/results/{name} has {found} at {key!r}")
            return found
    raise CourseError(f"{where}: docs/results/{name} has no number at {key!r}")


def _lookup(data: Any, key: str) -> Any:
    """The value at a dotted key; a key that holds dots itself ("kv0.5") is found too. None when there is none."""
    if isinstance(data, list):
        head, _, rest = key.partition(".")
        if not head.isdigit() or int(head) >= len(data):
            return None
        return _lookup(data[int(head)], rest) if rest else data[int(head)]
    if not isinstance(data, dict):
        return None
    if key in data:
        return data[key]
    for cut in (i for i, character in enumerate(key) if character == "."):
        if key[:cut] in data and (found := _lookup(data[key[:cut]], key[cut + 1 :])) is not None:
            return found
    return None


def filled_files(root: Root) -> Iterator[tuple[Path, str, str]]:
    """(path, text now, text filled) of every Markdown file and English notebook. notebooks/zh is built, not filled."""
    for path in markdown_files(root):
        now = read_text(path)
        yield path, now, fill_values(now, root.results, root.show(path))
    for path in root.notebooks():
        now, notebook = read_text(path), read_notebook(path)
        changed = False
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                filled = fill_values(cell.source, root.results, f"{root.show(path)} cell {cell.get('id')}")
                changed |= filled != cell.source
                cell.source = filled
        yield path, now, nbformat.writes(notebook) + "\n" if changed else now


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments not in (["fill"], ["check"]):
        print("usage: python -m nanopd.course.numbers fill|check", file=sys.stderr)
        return 2
    root = Root.find()
    try:
        files = list(filled_files(root))
    except CourseError as error:
        print(f"numbers: {error}", file=sys.stderr)
        return 1
    stale = [(path, filled) for path, now, filled in files if now != filled]
    for path, filled in stale:
        if arguments == ["fill"]:
            write_if_changed(path, filled)
            print(f"filled {root.show(path)}")
        else:
            print(f"{root.show(path)}: a number differs from docs/results; run the fill command", file=sys.stderr)
    return 1 if stale and arguments == ["check"] else 0


if __name__ == "__main__":
    sys.exit(main())
