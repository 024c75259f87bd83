"""The course map of both READMEs: ``python -m nanopd.course.course_map fill | check``

A row ``| NN | question | what you build | state |`` whose notebook exists gets the notebook's title with a link, and
the state "ready"; every other row loses its link and is "planned". The other cells are written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nanopd.course.texts import Root, read_notebook, read_text, write_if_changed
from nanopd.course.translate_docs import source_hash, stamp, stamped_hash
from nanopd.errors import CourseError

_ROW = re.compile(r"^\| (?P<number>\d\d) \| (?P<question>.*?) \| (?P<build>.*?) \| (?P<state>[^|]*?) \|$", re.MULTILINE)
_LINK = re.compile(r"^\[(?P<text>.*)\]\([^)]*\)$")
STATES = {"README.md": ("ready", "planned"), "README.zh.md": ("可用", "计划中")}


def rows(text: str) -> list[str]:
    """The numbers of the map's rows, in order."""
    return [match["number"] for match in _ROW.finditer(text)]


def title(notebook: Path) -> str:
    """The question that a notebook asks: its first line.

    Raises:
        CourseError: it does not begin with a title.
    """
    cells = read_notebook(notebook).cells
    first = cells[0].source.strip().splitlines()[0] if cells and cells[0].source.strip() else ""
    if not first.startswith("# "):
        raise CourseError(f"{notebook.name} does not begin with '# title'")
    return first.removeprefix("# ").strip()


def fill_map(text: str, notebooks: dict[str, Path], root: Root, states: tuple[str, str]) -> str:
    """The README with its rows brought in line. ``notebooks``: number -> file; ``states``: (ready, planned)."""
    ready, planned = states

    def render(match: re.Match[str]) -> str:
        notebook = notebooks.get(match["number"])
        if notebook is not None:
            question, state = f"[{title(notebook)}]({root.show(notebook)})", ready
        else:
            linked = _LINK.match(match["question"])
            question, state = (linked["text"] if linked else match["question"]), planned
        return f"| {match['number']} | {question} | {match['build']} | {state} |"

    return _ROW.sub(render, text)


def filled_readmes(root: Root) -> list[tuple[Path, str, str]]:
    """(path, text now, filled) of both READMEs. The Chinese one links to English notebooks until it has its own."""
    english = {path.name[:2]: path for path in root.notebooks()}
    chinese = {number: twin if (twin := root.chinese(path)).is_file() else path for number, path in english.items()}
    found = []
    for name, notebooks in (("README.md", english), ("README.zh.md", chinese)):
        text = read_text(root.path / name)
        found.append((root.path / name, text, fill_map(text, notebooks, root, STATES[name])))
    return found


def fill(root: Root) -> list[Path]:
    """Writes both READMEs. If the Chinese one was up to date before, it is stamped again: the map is no translation."""
    (readme, before, after), (twin, chinese, filled) = filled_readmes(root)
    current = stamped_hash(chinese) == source_hash(before)
    changed = [path for path, text in ((readme, after), (twin, filled)) if write_if_changed(path, text)]
    if current:
        changed += stamp(root, [twin])
    return sorted(set(changed))


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments not in (["fill"], ["check"]):
        print("usage: python -m nanopd.course.course_map fill|check", file=sys.stderr)
        return 2
    root = Root.find()
    try:
        if arguments == ["fill"]:
            for path in fill(root):
                print(f"filled {root.show(path)}")
            return 0
        stale = [path for path, now, filled in filled_readmes(root) if now != filled]
    except CourseError as error:
        print(f"course_map: {error}", file=sys.stderr)
        return 1
    for path in stale:
        print(f"{root.show(path)}: the course map differs from the notebooks; run fill (make zh)", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
