"""The documentation builds without a warning: every chapter, both READMEs, every notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanopd.course.texts import Root

ROOT = Root.find(Path(__file__).parent)


@pytest.mark.slow
@pytest.mark.skipif(not ROOT.notebooks(), reason="no notebook yet")
def test_sphinx_has_no_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs"]
    command += ["-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "html")]
    done = subprocess.run(command, cwd=ROOT.path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    sources = [*ROOT.docs(), *ROOT.notebooks()]
    for source in [*sources, *(ROOT.chinese(source) for source in sources)]:
        page = tmp_path / "html" / source.relative_to(ROOT.path).with_suffix(".html")
        assert page.is_file(), f"{ROOT.show(source)} has no page"
