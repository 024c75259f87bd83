"""Notebooks: English cells + ``locales/zh/*.po`` -> ``notebooks/zh``. Code, outputs and cell ids are never touched."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import polib

from nanopd.course.glossary import Term, violations
from nanopd.course.links import links, to_chinese
from nanopd.course.numbers import MARKER, strip_values
from nanopd.course.texts import Root, read_notebook, write_if_changed
from nanopd.errors import CourseError

_CHINESE = re.compile(r"[\u4e00-\u9fff]")


def update(root: Root) -> list[Path]:
    """Brings the PO files in line with the English notebooks. Returns the files that changed.

    A new cell gets an empty entry. A changed cell keeps its old translation, is marked fuzzy and remembers the text
    that was translated (shown as ``#|``). The entry of a deleted cell goes.
    """
    changed = []
    for notebook in root.notebooks():
        path = root.po(notebook)
        old = _entries(path, obsolete=True)
        po = polib.POFile(wrapwidth=0, encoding="utf-8")
        po.header = f"Chinese texts of {root.show(notebook)}, one entry per Markdown cell, keyed by cell id."
        po.metadata = {"Language": "zh_CN", "MIME-Version": "1.0", "Content-Type": "text/plain; charset=UTF-8",
                       "Content-Transfer-Encoding": "8bit"}  # fmt: skip
        po.extend(_entry(cell, old.get(cell.id)) for cell in _markdown(read_notebook(notebook)))
        if write_if_changed(path, str(po).rstrip("\n") + "\n"):
            changed.append(path)
    known = {root.po(notebook) for notebook in root.notebooks()}
    for stray in set(root.locale.glob("[0-9]*.po")) - known:
        stray.unlink()
        changed.append(stray)
    return sorted(changed)


def build(root: Root) -> list[Path]:
    """Writes notebooks/zh; an untranslated cell shows its English text. Returns the files that changed."""
    changed = []
    for notebook in root.notebooks():
        path = root.chinese(notebook)
        if write_if_changed(path, render(root, notebook)):
            changed.append(path)
    known = {root.chinese(notebook) for notebook in root.notebooks()}
    for stray in set((root.path / "notebooks" / "zh").glob("*.ipynb")) - known:
        stray.unlink()
        changed.append(stray)
    return sorted(changed)


def render(root: Root, notebook: Path) -> str:
    """The Chinese notebook's JSON text, made from the English one and its PO file."""
    entries = _entries(root.po(notebook))
    chinese = copy.deepcopy(read_notebook(notebook))
    for cell in _markdown(chinese):
        entry = entries.get(cell.id)
        text = entry.msgstr if entry is not None and entry.msgstr else strip_values(cell.source)
        cell.source = _restore_values(to_chinese(text, notebook, root), cell.source)
    chinese.metadata["nanopd"] = {"language": "zh", "generated_from": root.show(notebook)}
    return nbformat.writes(chinese) + "\n"


def check(root: Root, glossary: list[Term]) -> list[str]:
    """Every complaint about the translated notebooks, one line each."""
    complaints = []
    for notebook in root.notebooks():
        complaints += _check_entries(root, notebook, glossary)
        twin = root.chinese(notebook)
        if not twin.is_file():
            complaints.append(f"{root.show(twin)}: missing; run build (make zh)")
        elif twin.read_text(encoding="utf-8", errors="replace") != render(root, notebook):
            complaints.append(f"{root.show(twin)}: differs from {root.show(notebook)} + PO; run build (make zh)")
    for stray in set((root.path / "notebooks" / "zh").glob("*.ipynb")) - {root.chinese(n) for n in root.notebooks()}:
        complaints.append(f"{root.show(stray)}: has no English source")
    return complaints


def _check_entries(root: Root, notebook: Path, glossary: list[Term]) -> list[str]:
    name = root.show(root.po(notebook))
    entries = _entries(root.po(notebook))
    cells = list(_markdown(read_notebook(notebook)))
    complaints = [
        f"{name}: entry {key!r} has no cell; run update" for key in set(entries) - {cell.id for cell in cells}
    ]
    for cell in cells:
        where, source, entry = f"{name}: cell {cell.id!r}", strip_values(cell.source), entries.get(cell.id)
        if entry is None or not entry.msgstr.strip():
            complaints.append(f"{where} is not translated" + ("; run update" if entry is None else ""))
        elif entry.msgid != source:
            complaints.append(f"{where} is stale: the English text changed; run update, then translate")
        elif entry.fuzzy:
            complaints.append(f"{where} is fuzzy: translate the change and remove the flag")
        else:
            complaints += [f"{where}: {text}" for text in _check_text(source, entry.msgstr, glossary)]
    return complaints


def _check_text(source: str, translated: str, glossary: list[Term]) -> list[str]:
    complaints = violations(translated, glossary)
    if sorted(links(source)) != sorted(links(translated)):
        complaints.append(f"links differ: {sorted(links(source))} in English, {sorted(links(translated))} in Chinese")
    if sorted(_markers(source)) != sorted(_markers(translated)):
        complaints.append("result markers differ from the English text")
    if translated == source and len(re.findall(r"[a-z]{3,}", source)) > 8 and not _CHINESE.search(translated):
        complaints.append("the translation is the English text")
    return complaints


def _entry(cell: Any, old: polib.POEntry | None) -> polib.POEntry:
    source = strip_values(cell.source)
    entry = polib.POEntry(msgctxt=cell.id, msgid=source)
    if old is not None:
        entry.msgstr, entry.flags, entry.previous_msgid = old.msgstr, list(old.flags), old.previous_msgid
        entry.tcomment = old.tcomment
        if old.msgid != source and old.msgstr:
            entry.previous_msgid = old.previous_msgid if old.fuzzy and old.previous_msgid else old.msgid
            entry.flags = ["fuzzy"]
        if not entry.fuzzy:
            entry.previous_msgid = None
    return entry


def _entries(path: Path, *, obsolete: bool = False) -> dict[str, polib.POEntry]:
    if not path.exists():
        return {}
    try:
        entries = polib.pofile(str(path), encoding="utf-8")
        return {entry.msgctxt: entry for entry in entries if obsolete or not entry.obsolete}
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"{path.name}: {error}") from None


def _markdown(notebook: Any) -> list[Any]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in cells:
        if not cell.get("id") or not cell.source.strip():
            raise CourseError(f"a Markdown cell is empty or has no id: {cell.get('id')!r} {cell.source[:60]!r}")
    return cells


def _markers(text: str) -> list[str]:
    return [f"{match['expression']}:{match['format']}" for match in MARKER.finditer(text)]


def _restore_values(text: str, source: str) -> str:
    """Puts the values of the English cell's markers into the same markers of the translation."""
    values = {(m["expression"], m["format"]): m.group() for m in MARKER.finditer(source)}
    return MARKER.sub(lambda m: values.get((m["expression"], m["format"]), m.group()), text)
