"""Relative links of a text, and how they change in its Chinese twin."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from nanopd.course.texts import Root
from nanopd.errors import CourseError

# [text](target "title"), ![alt](target), <img src="target">, <a href="target">, [label]: target
_LINK = re.compile(
    r"""(?P<head>\]\(\s*|\b(?:src|href)=["']|^[ ]{0,3}\[[^\]\n]+\]:[ ]*)(?P<target>[^\s)"'<>]+)""", re.MULTILINE
)
# ```fenced``` and `inline` code: what looks like a link in there is none
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)", re.M | re.S)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Applies ``change`` to the stretches of Markdown that are not code."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def links(text: str) -> list[str]:
    """Every link target outside code, in order."""
    found: list[str] = []

    def collect(part: str) -> str:
        found.extend(match["target"] for match in _LINK.finditer(part))
        return part

    outside_code(text, collect)
    return found


def is_relative(target: str) -> bool:
    return not re.match(r"[a-z][a-z0-9+.-]*:|//|#|/", target, re.IGNORECASE)


def to_chinese(text: str, source: Path, root: Root) -> str:
    """Rewrites the relative links of an English text for its Chinese twin's folder.

    A link to a text that has a Chinese edition goes to that edition; every other one (code, pictures, results) goes to
    the same file as before. A link to the twin itself ("中文") becomes one to the source ("English").
    """
    twin = root.chinese(source)

    def rewrite(match: re.Match[str]) -> str:
        target = match["target"]
        if not is_relative(target):
            return match.group()
        path, _, anchor = target.partition("#")
        # Anchors are made from headings, and headings are translated: only the file part survives.
        file = Path(os.path.normpath(source.parent / path))
        try:
            chinese = source if file == twin else root.chinese(file)
        except (CourseError, ValueError):  # no text of the course, or outside the checkout
            chinese = file
        relative = PurePosixPath(os.path.relpath(chinese, twin.parent)).as_posix()
        return match["head"] + relative + (f"#{anchor}" if anchor and chinese == file else "")

    return outside_code(text, lambda part: _LINK.sub(rewrite, part))
