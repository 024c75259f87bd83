"""The glossary that both editions follow, read from the table in ``docs/zh/glossary.md``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanopd.course.links import outside_code
from nanopd.course.texts import Root, read_text


@dataclass(frozen=True)
class Term:
    english: str
    chinese: str
    avoid: tuple[str, ...]  # translations that must not appear in a Chinese text


def read_glossary(root: Root) -> list[Term]:
    """The rows of the table ``| English | 中文 | 不用 | … |``; none when the file does not exist."""
    path = root.path / "docs" / "zh" / "glossary.md"
    if not path.is_file():
        return []
    terms = []
    for line in read_text(path).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or len(cells) < 3 or cells[0] == "English" or set(cells[0]) <= {"-", ":"}:
            continue
        avoid = tuple(word for word in re.split(r"[、，,]\s*", cells[2]) if word and word not in ("—", "-"))
        terms.append(Term(cells[0], cells[1], avoid))
    return terms


def violations(text: str, glossary: list[Term]) -> list[str]:
    """Which terms a Chinese text renders with a variant that the glossary rules out. Code is not looked at."""
    prose = ""

    def collect(part: str) -> str:
        nonlocal prose
        prose += part
        return part

    outside_code(text, collect)
    return [
        f"{term.english} is {term.chinese} in the glossary, not {word}"
        for term in glossary
        for word in term.avoid
        if word in prose
    ]
