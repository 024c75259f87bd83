"""The Chinese edition: ``python -m nanopd.course.translate update | build | check | stamp FILE...``

Notebooks: English is the source. ``locales/zh/<notebook>.po`` holds one entry per Markdown cell, keyed by cell id
(msgctxt). ``update`` brings new and changed cells into the PO files (changed ones become fuzzy), ``build`` writes
``notebooks/zh`` from English notebook + PO, and nobody edits that folder by hand.

Docs and README: pairs of files. The Chinese one carries the hash of the English text that it translates; ``stamp``
renews it after a translator has looked at the change.

``check`` is what CI runs: it fails on a missing, fuzzy or stale translation and on a built notebook that differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanopd.course import translate_docs, translate_notebooks
from nanopd.course.glossary import read_glossary
from nanopd.course.texts import Root
from nanopd.errors import CourseError

USAGE = "usage: python -m nanopd.course.translate update | build | check | stamp FILE..."


def check(root: Root) -> list[str]:
    """Every complaint about the Chinese edition, one line each; empty when it is complete and up to date."""
    glossary = read_glossary(root)
    return translate_notebooks.check(root, glossary) + translate_docs.check(root, glossary)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    command, files = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command not in ("update", "build", "check", "stamp") or (files and command != "stamp"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        root = Root.find()
        if command == "check":
            return _report(check(root))
        for path in _run(command, root, [Path(file).resolve() for file in files]):
            print(f"{command}: {root.show(path)}")
    except CourseError as error:
        print(f"translate: {error}", file=sys.stderr)
        return 1
    return 0


def _run(command: str, root: Root, files: list[Path]) -> list[Path]:
    if command == "update":
        return translate_notebooks.update(root)
    if command == "build":
        return translate_notebooks.build(root)
    return translate_docs.stamp(root, files)


def _report(complaints: list[str]) -> int:
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if complaints:
        print(
            f"{len(complaints)} complaints about the Chinese edition (CONTRIBUTING.md: Translations)", file=sys.stderr
        )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
