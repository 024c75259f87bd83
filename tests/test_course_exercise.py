"""The exercise framework: verdicts, messages, hints, progress."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanopd.course.compare import Wrong, expect_close, expect_equal
from nanopd.course.exercise import Exercise, Status, is_empty
from nanopd.course.progress import Progress, cache_dir
from nanopd.course.render import inline
from nanopd.errors import ConfigError


def double(x: int) -> int:
    return 2 * x


def judge_double(answer: Any, rng: random.Random) -> None:
    x = rng.randint(1, 100)
    expect_equal(answer(x), 2 * x, f"x = {x}")


@pytest.fixture
def exercise(tmp_path: Path) -> Exercise:
    return Exercise(
        notebook="00",
        name="double",
        title="Twice `x` < 3",
        test=judge_double,
        stub=None,
        solution=double,
        hints=("think", "add it to itself", "`x + x`"),
        progress=Progress(tmp_path / "progress.json"),
    )


def stub_raises(x: int) -> int:
    """Docstring."""
    raise NotImplementedError


def stub_dots(x: int) -> int: ...


def stub_docstring(x: int) -> int:
    """Only words."""


def stub_returns_dots(x: int) -> Any:
    return ...


def stub_half_filled(x: int) -> Any:
    factor: Any = ...
    return x * factor


def stub_through_a_name(x: int) -> Any:
    result: Any = ...
    return result


@pytest.mark.parametrize(
    "stub",
    [stub_raises, stub_dots, stub_docstring, stub_returns_dots, stub_half_filled, stub_through_a_name, None, ...],
)
def test_stub_is_not_attempted_and_not_counted(exercise: Exercise, stub: Any) -> None:
    result = exercise.check(stub)
    assert result.status is Status.NOT_ATTEMPTED
    assert not result
    assert exercise.progress.get("00", "double").attempts == 0


def test_a_function_that_does_something_is_not_empty() -> None:
    assert is_empty(stub_dots)
    assert not is_empty(double)
    assert not is_empty(lambda x: 3)
    assert not is_empty(lambda x: print(x))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda x: x, "2 times too little"),
        (lambda x: 3 * x if x > 20 else 2 * x, "expected"),  # right for small inputs only
        (lambda x: None, "expected"),
        (lambda x: "many", "got 'many'"),
        (lambda x: 1 // 0, "ZeroDivisionError"),
        (lambda: 1, "TypeError"),
        (lambda x: sys.exit(3), "SystemExit in line"),
        (7, "TypeError"),
    ],
)
def test_wrong_answers_are_told_why(exercise: Exercise, answer: Any, says: str) -> None:
    result = exercise.check(answer)
    if result.status is Status.NOT_ATTEMPTED:
        assert answer(1) is None  # `return None` and an empty body are the same code
        return
    assert result.status is Status.WRONG
    assert says in result.message
    assert exercise.progress.get("00", "double").attempts == 1
    assert not exercise.progress.get("00", "double").solved


def test_an_exception_names_the_line_of_the_learner(exercise: Exercise) -> None:
    def broken(x: int) -> int:
        return [x][5]

    assert "return [x][5]" in exercise.check(broken).message


def test_solved_is_saved_once_and_stays(exercise: Exercise) -> None:
    assert exercise.check(double)
    first = exercise.progress.get("00", "double")
    assert first.solved
    assert first.attempts == 1
    exercise.check(lambda x: 0)
    assert exercise.progress.get("00", "double").solved_at == first.solved_at
    assert "(solved)" in repr(exercise)
    assert not Progress(exercise.progress.path.parent / "other.json").get("00", "double").solved


def test_same_cases_every_time(exercise: Exercise) -> None:
    seen: list[list[int]] = [[], []]
    for calls in seen:

        def answer(x: int, calls: list[int] = calls) -> int:
            calls.append(x)
            return 2 * x

        exercise.judge(answer)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 4


def test_verify_saves_nothing(exercise: Exercise) -> None:
    exercise.verify(double)
    assert not exercise.progress.path.exists()
    with pytest.raises(AssertionError, match="not attempted"):
        exercise.verify(stub_raises)


def test_hints_come_one_by_one_and_survive_a_restart(exercise: Exercise) -> None:
    assert exercise.hint().text == "think"
    assert Progress(exercise.progress.path).get("00", "double").hints == 1
    assert [exercise.hint().number for _ in range(4)] == [2, 3, 3, 3]
    assert exercise.hint(1).text == "think"
    assert repr(exercise.hint(2)) == "Hint 2 of 3: add it to itself"


@pytest.mark.parametrize("number", ["1", 2.5, True])
def test_a_hint_has_a_whole_number(exercise: Exercise, number: Any) -> None:
    with pytest.raises(ConfigError, match=rf"an int from 1 to 3, got '?{number}"):
        exercise.hint(number)
    assert [exercise.hint(n).number for n in (-1, 0, 9)] == [1, 1, 3]


def test_text_form_says_where_the_hints_are(exercise: Exercise) -> None:
    """The notebook's `double` is the learner's own function, which has none."""
    assert repr(exercise) == "Exercise 00/double (open): Twice `x` < 3. 3 hints: nb00.double.hint()"
    asked = Exercise(**{**vars(exercise), "title": "Why?"})
    assert repr(asked) == "Exercise 00/double (open): Why? 3 hints: nb00.double.hint()"


def test_html_is_escaped(exercise: Exercise) -> None:
    page = exercise._repr_html_()
    assert "Twice <code>x</code> &lt; 3" in page
    assert page.count("<details>") == 3
    assert inline("this *may* be `2*x*3`, 2 * x * 3") == "this <em>may</em> be <code>2*x*3</code>, 2 * x * 3"
    assert "<script>" not in exercise.check(lambda x: "<script>")._repr_html_()


def test_unwritable_folder_does_not_stop_the_course(exercise: Exercise, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lost = Exercise(**{**vars(exercise), "progress": Progress(blocked / "progress.json")})
    assert lost.check(double)
    assert "was not saved" in lost.check(double).message
    assert lost.hint().number == 3


# --- comparisons -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        ([1, 2, 3], [1, 2, 4], "index 2, expected 4, got 3"),
        ([1, 2], [1, 2, 4], r"expected shape \(3,\), got \(2,\)"),
        (["a", "c"], ["a", "b"], "index 1, expected 'b', got 'c'"),
        (["a"], ["a", "b"], "expected 2 items, got 1; the first 1 agree"),
        ([(0, 1)], [(0, 2)], r"index \(0, 1\), expected 2, got 1"),
        (None, [1], "is a `return` missing"),
        (1, "b", "expected 'b', got 1"),
        ([[1], [1, 2]], [1, 2], "regular shape"),
        (torch.tensor([1, 2]), np.array([1, 3]), "index 1, expected 3, got 2"),
    ],
)
def test_first_difference(got: Any, want: Any, says: str) -> None:
    with pytest.raises(Wrong, match=says):
        expect_equal(got, want, "case")


def test_close() -> None:
    want = torch.zeros(2, 3)
    got = want.clone()
    expect_close(got, want, "case")
    expect_close(got.to(torch.bfloat16), want, "case")
    got[1, 2] = 0.5
    with pytest.raises(Wrong, match=r"case: first difference at index \(1, 2\), expected 0, got 0.5 \(1 of 6 elements"):
        expect_close(got, want, "case")
    got[1, 2] = torch.nan
    with pytest.raises(Wrong, match="got nan"):
        expect_close(got, want, "case")
    with pytest.raises(Wrong, match="1000 times too much"):
        expect_close(5000.0, 5.0, "ms")
    expect_close(1.00001, 1.0, "case")


# --- progress --------------------------------------------------------------------------------------------------


def test_two_kernels_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    code = (
        "import sys; from pathlib import Path; from nanopd.course.progress import Progress\n"
        "p = Progress(Path(sys.argv[1]))\n"
        "for _ in range(40): p.count_attempt('00', 'x', solved=False); p.count_attempt('01', sys.argv[2], solved=True)"
    )
    kernels = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [kernel.wait(timeout=60) for kernel in kernels] == [0, 0, 0]
    records = Progress(path).read()
    assert records["00"]["x"].attempts == 120
    assert {name: r.attempts for name, r in records["01"].items()} == {"a": 40, "b": 40, "c": 40}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["progress.json", "progress.lock"]


@pytest.mark.parametrize("content", ['{"notebooks": {"00":', "[" * 100_000], ids=["cut", "nested"])
def test_unreadable_file_is_set_aside(content: str, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text(content)
    progress = Progress(path)
    assert progress.read() == {}
    progress.count_attempt("00", "x", solved=True)
    assert progress.get("00", "x").solved
    assert (tmp_path / "progress.unreadable.json").read_text() == content


@pytest.mark.parametrize("record", [{"attempts": "x"}, {"hints": None}, {"solved_at": 5}, {"attempts": True}, 3, []])
def test_a_record_of_other_types_is_unreadable(tmp_path: Path, record: Any) -> None:
    path = tmp_path / "progress.json"
    path.write_text(json.dumps({"notebooks": {"00": {"double": record}}}))
    assert Progress(path).count_attempt("00", "double", solved=True).attempts == 1
    assert path.with_suffix(".unreadable.json").is_file()


def test_a_newer_file_with_more_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text(json.dumps({"notebooks": {"00": {"x": {"attempts": 2, "mood": "good"}}}}))
    assert Progress(path).get("00", "x").attempts == 2


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanopd.ops import compiler

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANOPD_CACHE", "~/elsewhere")  # a quoted ~ reaches us as it is
    assert cache_dir() == compiler.cache_dir() == tmp_path / "elsewhere"
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path == compiler.cache_dir()
    monkeypatch.delenv("NANOPD_CACHE")
    assert cache_dir() == compiler.cache_dir()
