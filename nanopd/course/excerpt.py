"""A part of a CUDA source file, shown in a notebook with its place and in colour."""

from __future__ import annotations

import html
from dataclasses import dataclass

from nanopd.errors import CourseError


@dataclass(frozen=True)
class Excerpt:
    """Some lines of ``csrc/file``. Looks the same on light and dark pages; long lines scroll instead of wrapping."""

    file: str
    first_line: int  # counted from 1
    text: str

    def __repr__(self) -> str:
        return f"csrc/{self.file}, from line {self.first_line}\n{self.text}"

    def _repr_html_(self) -> str:
        style = (
            "background:#f7f7f7;color:#222;border-left:4px solid #3b7dd8;padding:.5em .8em;margin:.2em 0;"
            "overflow-x:auto;white-space:pre;line-height:1.35;font-size:12px"
        )
        place = f"<div><code>csrc/{html.escape(self.file)}</code>, from line {self.first_line}</div>"
        return f'{place}<pre style="{style}">{_coloured(self.text)}</pre>'


def excerpt(file: str, first: str, last: str) -> Excerpt:
    """The lines of ``csrc/file`` from the first that holds ``first`` to the next one that holds ``last``.

    Named by content and not by number, so that an edit elsewhere in the file does not shift the window.

    Raises:
        CourseError: no such file, or no such line.
    """
    from nanopd.ops.compiler import csrc_dir  # imports torch

    path = csrc_dir() / file
    if not path.is_file():
        raise CourseError(
            f"csrc has no file {file}; it has {', '.join(sorted(p.name for p in csrc_dir().glob('*.cu*')))}"
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    start = _find(lines, first, 0, file)
    stop = _find(lines, last, start, file)
    return Excerpt(file, start + 1, "\n".join(lines[start : stop + 1]))


def _find(lines: list[str], words: str, start: int, file: str) -> int:
    found = next((i for i in range(start, len(lines)) if words in lines[i]), None)
    if found is None:
        raise CourseError(
            f"csrc/{file} has no line that holds {words!r}" + (f" after line {start + 1}" if start else "")
        )
    return found


def _coloured(code: str) -> str:
    """HTML of C++ code with its colours inline, since a notebook viewer drops style sheets."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CppLexer

    formatter = HtmlFormatter(nowrap=True, noclasses=True, style="friendly", nobackground=True)
    return highlight(code, CppLexer(stripnl=False), formatter).rstrip("\n")
