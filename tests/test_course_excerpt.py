"""Parts of CUDA sources that notebooks show."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from nanopd.course.excerpt import excerpt
from nanopd.errors import CourseError
from nanopd.ops.compiler import csrc_dir


def test_excerpt_is_those_lines_of_the_file() -> None:
    part = excerpt("store_kv.cu", "const u32 index", "store16(v_cache")
    lines = (csrc_dir() / "store_kv.cu").read_text().splitlines()
    assert part.text.splitlines() == lines[part.first_line - 1 : part.first_line - 1 + len(part.text.splitlines())]
    assert "const u32 index" in part.text.splitlines()[0] and "store16(v_cache" in part.text.splitlines()[-1]
    assert repr(part) == f"csrc/store_kv.cu, from line {part.first_line}\n{part.text}"


def test_html_shows_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that mean something in HTML, blank lines and leading spaces survive the colouring."""
    source = '  if (a < b && c > d) {\n\n    x = "<b>";\n  }\n// end'
    (tmp_path / "demo.cu").write_text(source)
    monkeypatch.setattr("nanopd.ops.compiler.csrc_dir", lambda: tmp_path)
    shown = excerpt("demo.cu", "if (a", "// end")._repr_html_()
    body = re.search(r"<pre[^>]*>(.*)</pre>", shown, re.DOTALL)
    assert body and html.unescape(re.sub(r"<[^>]+>", "", body.group(1))) == source
    assert "<b>" not in shown and "<style" not in shown and "class=" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing.cu", "a", "b"), "csrc has no file nothing.cu"),
        (("store_kv.cu", "no such words", "b"), "no line that holds 'no such words'"),
        (("store_kv.cu", "const u32 index", "#include"), "no line that holds '#include' after line"),
    ],
)
def test_what_is_missing_is_named(arguments: tuple[str, str, str], says: str) -> None:
    with pytest.raises(CourseError, match=says):
        excerpt(*arguments)
