"""Every exercise of the course: the stub is not attempted, the solution passes, known mistakes are told what is wrong.

The notebook that shows an exercise is held against its module: the same stub, the same solution, folded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import types

import nbformat
import pytest

import nanopd.course.exercises
from nanopd.course.exercise import Exercise, Mistake, Status
from nanopd.course.texts import Root

MODULES = sorted(m.name for m in pkgutil.iter_modules(nanopd.course.exercises.__path__) if re.match(r"nb\d\d$", m.name))
EXERCISES = [
    exercise
    for name in MODULES
    for exercise in vars(importlib.import_module(f"nanopd.course.exercises.{name}")).values()
    if isinstance(exercise, Exercise)
]
MISTAKES = [(exercise, mistake) for exercise in EXERCISES for mistake in exercise.mistakes]


def skip_without_gpu(exercise: Exercise) -> None:
    if exercise.needs_gpu and exercise.judge(exercise.solution).status is Status.SKIPPED:
        pytest.skip("runs a kernel; no NVIDIA GPU")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_stub_is_not_attempted(exercise: Exercise) -> None:
    skip_without_gpu(exercise)
    assert exercise.judge(exercise.stub).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_solution_passes(exercise: Exercise) -> None:
    skip_without_gpu(exercise)
    result = exercise.judge(exercise.solution)
    assert result.status is Status.SOLVED, result.message
    exercise.verify(exercise.solution)


@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES, ids=lambda x: getattr(x, "id", None) or str(x.says))
def test_known_mistakes_are_told_what_is_wrong(exercise: Exercise, mistake: Mistake) -> None:
    skip_without_gpu(exercise)
    result = exercise.judge(mistake.answer)
    assert result.status is Status.WRONG
    assert mistake.says in result.message
    with pytest.raises(AssertionError, match="not yet"):
        exercise.verify(mistake.answer)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_exercise_is_complete(exercise: Exercise) -> None:
    module = importlib.import_module(f"nanopd.course.exercises.nb{exercise.notebook}")
    assert getattr(module, exercise.name) is exercise, "the module-level name and the exercise's name must agree"
    assert len(exercise.hints) >= 2, "hints come in tiers"
    assert len(exercise.mistakes) >= 2, "list the mistakes that learners make"
    assert exercise.trials >= 3


def test_exercise_ids_are_unique() -> None:
    ids = [exercise.id for exercise in EXERCISES]
    assert len(ids) == len(set(ids))


# --- the notebooks that show them ------------------------------------------------------------------------------


def function(tree: ast.AST, name: str) -> ast.FunctionDef | None:
    return next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name), None)


def same(one: ast.FunctionDef, other: ast.FunctionDef) -> bool:
    """The same function but for its name."""
    return ast.dump(ast.Module([*one.body, one.args], [])) == ast.dump(ast.Module([*other.body, other.args], []))


def defined(source: types.FunctionType) -> ast.FunctionDef:
    found = function(ast.parse(inspect.getsource(source)), source.__name__)
    assert found is not None
    return found


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_notebook_shows_the_stub_and_the_folded_solution(exercise: Exercise) -> None:
    notebooks = [path for path in Root.find().notebooks() if path.name.startswith(exercise.notebook + "_")]
    if not notebooks:
        pytest.skip(f"notebook {exercise.notebook} is not written yet")
    cells = [c for c in nbformat.read(notebooks[0], as_version=4).cells if c.cell_type == "code"]

    def tagged(tag: str) -> list:
        word = re.compile(rf"\b{re.escape(exercise.name)}\.(check|verify)\(")
        return [c for c in cells if tag in c.metadata.get("tags", []) and word.search(c.source)]

    stubs, solutions = tagged("exercise"), tagged("solution")
    assert len(stubs) == 1, f"one cell tagged 'exercise' must call {exercise.name}.check(...)"
    assert len(solutions) == 1, f"one cell tagged 'solution' must call {exercise.name}.verify(...)"
    assert solutions[0].metadata.get("jupyter", {}).get("source_hidden") is True, "the solution must be folded"
    if inspect.isfunction(exercise.stub) and inspect.isfunction(exercise.solution):
        shown = function(ast.parse(stubs[0].source), exercise.name)
        assert shown is not None, f"the exercise cell must define {exercise.name}"
        assert same(shown, defined(exercise.stub)), "the notebook's stub differs from the module's"
        solved = function(ast.parse(solutions[0].source), exercise.solution.__name__)
        assert solved is not None, f"the solution cell must define {exercise.solution.__name__}"
        assert same(solved, defined(exercise.solution)), "the notebook's solution differs from the module's"
