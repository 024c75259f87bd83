"""Docs pairs and the README: the Chinese file carries the sha256 of the English text that it translates."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from nanopd.course.glossary import Term, violations
from nanopd.course.links import is_relative, links, to_chinese
from nanopd.course.numbers import MARKER, strip_values
from nanopd.course.texts import Root, read_text, write_if_changed
from nanopd.errors import CourseError

# A chapter has front matter; the README has a comment, since front matter would show on its page.
_FRONT_MATTER = re.compile(r"\A---\n(?P<head>.*?)^---\n", re.DOTALL | re.MULTILINE)
_HASH_LINE = re.compile(r"^source_sha256: (?P<hash>\S*)$", re.MULTILINE)
_COMMENT = re.compile(r"\A<!-- source: (?P<source>\S+) sha256: (?P<hash>\S*) -->\n")
_HEADING = re.compile(r"^(#{1,6}) ", re.MULTILINE)
_LANGUAGES = r"python|bash|sh|json|cuda|cpp|c\+\+|c|make|yaml|toml"  # code; `text` and `mermaid` are translated
_CODE_BLOCK = re.compile(rf"^```(?:{_LANGUAGES})\b[^\n]*\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)


def source_hash(text: str) -> str:
    """sha256 of an English text without the values of its result markers and without trailing spaces."""
    lines = [line.rstrip() for line in strip_values(text).strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def stamped_hash(chinese: str) -> str | None:
    """The hash that a Chinese text carries, or None."""
    if match := _COMMENT.match(chinese):
        return match["hash"]
    front = _FRONT_MATTER.match(chinese)
    line = _HASH_LINE.search(front["head"]) if front else None
    return line["hash"] if line else None


def stamp(root: Root, files: list[Path]) -> list[Path]:
    """Writes the hash of the English source into each Chinese file. Returns the files that changed.

    Raises:
        CourseError: no file given, or one that is no Chinese chapter.
    """
    if not files:
        raise CourseError("say which files were translated: stamp docs/zh/engine.md README.zh.md ...")
    twins = {root.chinese(source): source for source in root.docs()}
    changed = []
    for path in files:
        if path not in twins or not path.is_file():
            raise CourseError(f"{path} is not a Chinese chapter with an English source")
        source = twins[path]
        text = _with_stamp(read_text(path), root.show(source), source_hash(read_text(source)))
        if write_if_changed(path, text):
            changed.append(path)
    return changed


def check(root: Root, glossary: list[Term]) -> list[str]:
    """Every complaint about the pairs, one line each."""
    complaints = []
    for source in root.docs():
        twin = root.chinese(source)
        if not twin.is_file():
            complaints.append(f"{root.show(twin)}: missing (translates {root.show(source)})")
            continue
        english, chinese = read_text(source), read_text(twin)
        if stamped_hash(chinese) != source_hash(english):
            complaints.append(f"{root.show(twin)}: stale; translate what changed in {root.show(source)}, then stamp it")
        complaints += [f"{root.show(twin)}: {text}" for text in _check_pair(english, chinese, source, root)]
        if twin.name != "glossary.md":
            complaints += [f"{root.show(twin)}: {text}" for text in violations(chinese, glossary)]
    sources = {root.chinese(source) for source in root.docs()}
    strays = set((root.path / "docs" / "zh").rglob("*.md")) - sources
    complaints += [f"{root.show(stray)}: has no English source" for stray in sorted(strays)]
    return complaints + broken_links(root)


def broken_links(root: Root) -> list[str]:
    """Relative links of the docs that lead to no file."""
    complaints = []
    for path in [*root.docs(), *(root.chinese(source) for source in root.docs())]:
        for target in links(read_text(path)) if path.is_file() else []:
            if is_relative(target) and not (path.parent / target.partition("#")[0]).exists():
                complaints.append(f"{root.show(path)}: link to {target}, which does not exist")
    return complaints


def _check_pair(english: str, chinese: str, source: Path, root: Root) -> list[str]:
    complaints = []
    if _HEADING.findall(_no_code(english)) != _HEADING.findall(_no_code(chinese)):
        complaints.append("headings differ in number or level from the English text")
    if [m["code"] for m in _CODE_BLOCK.finditer(english)] != [m["code"] for m in _CODE_BLOCK.finditer(chinese)]:
        complaints.append("code blocks differ from the English text")
    if sorted(_markers(english)) != sorted(_markers(chinese)):
        complaints.append("result markers differ from the English text")
    wanted, found = _targets(to_chinese(english, source, root)), _targets(chinese)
    if wanted != found:
        complaints.append(f"links differ: missing {sorted(wanted - found)}, added {sorted(found - wanted)}")
    return complaints


def _targets(text: str) -> set[str]:
    """Link targets without anchors, since headings are translated."""
    return {target.partition("#")[0] for target in links(text)} - {""}


def _markers(text: str) -> list[str]:
    return [f"{match['expression']}:{match['format']}" for match in MARKER.finditer(text)]


def _no_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _with_stamp(text: str, source: str, digest: str) -> str:
    if source == "README.md":
        return f"<!-- source: {source} sha256: {digest} -->\n" + _COMMENT.sub("", text)
    front = _FRONT_MATTER.match(text)
    if front is None:
        return f"---\nsource: {source}\nsource_sha256: {digest}\n---\n\n{text.lstrip()}"
    kept = [line for line in front["head"].splitlines() if not line.startswith(("source:", "source_sha256:"))]
    head = "\n".join([f"source: {source}", f"source_sha256: {digest}", *kept])
    return f"---\n{head}\n---\n" + text[front.end() :]
