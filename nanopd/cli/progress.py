"""``nanopd progress``: the exercises of every notebook, and which of them are solved."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import nanopd.course.exercises
from nanopd.course.exercise import Exercise
from nanopd.course.progress import Progress


def exercises() -> Iterator[Exercise]:
    """Every exercise, in course order and in the order in which its module defines them."""
    names = sorted(m.name for m in pkgutil.iter_modules(nanopd.course.exercises.__path__))
    for name in names:
        if re.fullmatch(r"nb\d\d", name):
            module = importlib.import_module(f"nanopd.course.exercises.{name}")
            yield from (value for value in vars(module).values() if isinstance(value, Exercise))


def show(console: Console | None = None) -> None:
    records = Progress().read()
    table = Table(box=None, pad_edge=False)
    for heading in ("notebook", "exercise", "", "attempts", "hints", "solved"):
        table.add_column(heading, justify="right" if heading in ("attempts", "hints") else "left")
    solved = total = 0
    for exercise in exercises():
        record = records.get(exercise.notebook, {}).get(exercise.name)
        done = record is not None and record.solved
        solved, total = solved + done, total + 1
        when = escape((record.solved_at or "")[:10]) if record else ""
        table.add_row(
            exercise.notebook,
            exercise.name,
            "[green]✓[/]" if done else "[dim]○[/]",
            str(record.attempts) if record else "0",
            f"{record.hints if record else 0}/{len(exercise.hints)}",
            when,
        )
    console = console or Console()
    console.print(table)
    console.print(f"\n{solved} of {total} exercises solved")


def forget() -> None:
    Progress().reset()
