"""An exercise: a stub to fill in, a check that says precisely what is wrong, hints in tiers, a known solution.

A module ``nanopd/course/exercises/nbNN.py`` holds the exercises of notebook NN as plain module-level objects. There is
no registry and no decorator: the notebook imports the object and calls ``check`` on the learner's function.
"""

from __future__ import annotations

import dis
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanopd.course.compare import Wrong, describe, expect_close, expect_equal
from nanopd.course.progress import Progress
from nanopd.course.render import exercise_html, hint_html, result_html
from nanopd.engine.options import is_int
from nanopd.errors import ConfigError

__all__ = ["CheckResult", "Exercise", "Hint", "Mistake", "Status", "Wrong", "describe", "expect_close", "expect_equal"]


class Status(Enum):
    SOLVED = "solved"
    WRONG = "not yet"
    NOT_ATTEMPTED = "not attempted"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one answer. True in a condition when the exercise is solved."""

    exercise: str
    status: Status
    message: str

    def __bool__(self) -> bool:
        return self.status is Status.SOLVED

    def __repr__(self) -> str:
        return f"[{self.status.value}] {self.exercise}: {self.message}"

    def _repr_html_(self) -> str:
        return result_html(self.exercise, self.status.name, self.status.value, self.message)


@dataclass(frozen=True)
class Hint:
    """One revealed hint, shown by the notebook."""

    number: int
    of: int
    text: str

    def __repr__(self) -> str:
        return f"Hint {self.number} of {self.of}: {self.text}"

    def _repr_html_(self) -> str:
        return hint_html(self.number, self.of, self.text)


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that learners give. The check must refuse it with a message that holds ``says``."""

    answer: Any
    says: str


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    ``test(answer, rng)`` is called ``trials`` times with a ``random.Random`` of its own, so that each trial sees other
    shapes (draw ragged ones: tails that fill no block, a length of 1, a batch of 1). It raises :class:`Wrong`, mostly
    through ``expect_equal`` and ``expect_close``, and returns nothing when the answer is right.

    ``stub`` and ``solution`` are what the notebook's cells define, so that tests can hold both together.
    """

    notebook: str  # "00"
    name: str  # the function that the learner writes, e.g. "decode_intensity"
    title: str
    test: Callable[[Any, random.Random], None]
    stub: Any
    solution: Any
    hints: Sequence[str]
    mistakes: Sequence[Mistake] = ()
    trials: int = 8
    needs_gpu: bool = False
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)

    def check(self, answer: Any) -> CheckResult:
        """Runs every trial on the learner's answer and saves the verdict. Never raises for a wrong answer."""
        result = self.judge(answer)
        if result.status in (Status.SOLVED, Status.WRONG):
            try:
                self.progress.count_attempt(self.notebook, self.name, solved=bool(result))
            except OSError as error:
                note = f"{result.message} (progress was not saved: {error})"
                return CheckResult(result.exercise, result.status, note)
        return result

    def verify(self, answer: Any) -> None:
        """Proves that the folded solution of a notebook passes; no progress is saved.

        Raises:
            AssertionError: it does not pass.
        """
        result = self.judge(answer)
        if result.status is not Status.SKIPPED and not result:
            raise AssertionError(repr(result))

    def judge(self, answer: Any) -> CheckResult:
        """The verdict alone: nothing is saved."""
        if self.needs_gpu and not _has_gpu():
            return self._result(Status.SKIPPED, "this exercise runs a kernel, and no NVIDIA GPU was found")
        if answer is None or answer is Ellipsis or is_empty(answer):
            return self._result(Status.NOT_ATTEMPTED, "the stub is still empty")
        for trial in range(self.trials):
            watched = _Watched(answer) if callable(answer) else answer
            try:
                self.test(watched, random.Random(f"{self.notebook}/{self.name}/{trial}"))
            except NotImplementedError:
                return self._result(Status.NOT_ATTEMPTED, "the stub still raises NotImplementedError")
            except Wrong as wrong:
                if isinstance(watched, _Watched) and watched.returned_ellipsis:
                    return self._result(Status.NOT_ATTEMPTED, "the function still returns `...`")
                return self._result(Status.WRONG, str(wrong))
            except (Exception, SystemExit) as error:  # `sys.exit()` in an answer is one more way to be wrong
                if "ellipsis" in str(error):
                    return self._result(Status.NOT_ATTEMPTED, "a `...` of the stub is still there")
                return self._result(Status.WRONG, _explain(error, answer))
        return self._result(Status.SOLVED, f"all {self.trials} random cases pass")

    def hint(self, number: int | None = None) -> Hint:
        """Reveals the next hint (the last one again when all are out), or the hint with this number.

        Raises ConfigError for a number that is no int; one out of range gives the nearest hint.
        """
        if number is not None and not is_int(number):
            raise ConfigError(f"a hint's number is an int from 1 to {len(self.hints)}, got {number!r:.60}")
        if not self.hints:
            return Hint(0, 0, "this exercise has no hints")
        if number is None:
            try:
                number = self.progress.reveal_hint(self.notebook, self.name, len(self.hints))
            except OSError:
                number = len(self.hints)  # a count that cannot be kept must not hide the hints
        number = max(1, min(number, len(self.hints)))
        return Hint(number, len(self.hints), self.hints[number - 1])

    @property
    def id(self) -> str:
        return f"{self.notebook}/{self.name}"

    def __repr__(self) -> str:
        state = "solved" if self._solved_before() else "open"
        stop = "" if self.title.endswith(("?", "!", ".")) else "."
        # The learner's function has the exercise's name in the notebook, hence the module before it.
        hint = f"nb{self.notebook}.{self.name}.hint()"
        return f"Exercise {self.id} ({state}): {self.title}{stop} {len(self.hints)} hints: {hint}"

    def _repr_html_(self) -> str:
        return exercise_html(self.id, self.title, self._solved_before(), self.hints)

    def _solved_before(self) -> bool:
        try:
            return self.progress.get(self.notebook, self.name).solved
        except OSError:  # a file that cannot be read must not hide the exercise
            return False

    def _result(self, status: Status, message: str) -> CheckResult:
        return CheckResult(self.id, status, message)


class _Watched:
    """Calls the answer and remembers whether it handed back a literal ``...``."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.returned_ellipsis = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.answer(*args, **kwargs)
        self.returned_ellipsis |= value is Ellipsis
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.answer, name)


def is_empty(answer: Any) -> bool:
    """Whether a function's body is only a docstring, ``...`` or ``pass``: it returns None and does nothing else."""
    code = getattr(answer, "__code__", None)
    if code is None:
        return False
    doing_nothing = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "POP_TOP", "CACHE"}
    steps = list(dis.get_instructions(code))
    loaded = [step.argval for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST")]
    return all(step.opname in doing_nothing for step in steps) and loaded in ([None], [Ellipsis])


def _explain(error: BaseException, answer: Any) -> str:
    """The exception as one line, with the line of the learner's own code that raised it."""
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" in line {frames[-1].lineno} of its cell: {(frames[-1].line or '').strip()}" if frames else ""
    return f"{type(error).__name__}{place.rstrip(': ')}: {error}"


def _has_gpu() -> bool:
    import torch  # only exercises that run a kernel get here

    return torch.cuda.is_available()
