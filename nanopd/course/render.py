"""HTML of exercises and verdicts: colours that read on light and dark pages, no script, no style sheet."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

_COLOURS = {"SOLVED": "#2e9e5b", "WRONG": "#d9822b", "NOT_ATTEMPTED": "#7a8699", "SKIPPED": "#7a8699"}
_SIGNS = {"SOLVED": "✓", "WRONG": "✗", "NOT_ATTEMPTED": "○", "SKIPPED": "–"}


def result_html(exercise: str, status: str, label: str, message: str) -> str:
    colour = _COLOURS[status]
    head = f'<b style="color:{colour}">{_SIGNS[status]} {html.escape(label)}</b>'
    return _box(colour, f"{head} &nbsp;<code>{html.escape(exercise)}</code><br>{inline(message)}")


def hint_html(number: int, of: int, text: str) -> str:
    return _box("#3b7dd8", f"<b>Hint {number} of {of}</b><br>{inline(text)}")


def exercise_html(exercise: str, title: str, solved: bool, hints: Sequence[str]) -> str:
    status = "SOLVED" if solved else "NOT_ATTEMPTED"
    state = "solved" if solved else "open"
    folded = "".join(
        f"<details><summary>Hint {number}</summary>{inline(text)}</details>" for number, text in enumerate(hints, 1)
    )
    head = f"<b>{_SIGNS[status]} {inline(title)}</b> ({state}) &nbsp;<code>{html.escape(exercise)}</code>"
    return _box(_COLOURS[status], head + folded)


def inline(text: str) -> str:
    """Escapes ``text``; `code` becomes <code>, a *word* outside of code <em>, a line break <br>."""
    parts = re.split(r"`([^`\n]+)`", html.escape(text, quote=False))  # every second part was in backticks
    parts[::2] = [re.sub(r"(?<![\w*])\*([a-z]+)\*(?![\w*])", r"<em>\1</em>", part) for part in parts[::2]]
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return "".join(parts).replace("\n", "<br>")


def _box(colour: str, body: str) -> str:
    style = f"border-left:4px solid {colour};padding:.4em .8em;margin:.3em 0;max-width:60em"
    return f'<div style="{style}">{body}</div>'
