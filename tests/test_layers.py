"""The order of the layers, who may import torch, and what a notebook may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from nanopd.course.texts import Root

ROOT = Root.find(Path(__file__).parent)
PACKAGE = ROOT.path / "nanopd"

# Lowest first: a layer imports itself and what stands before it.
LAYERS = (
    "errors", "ops", "kv", "model", "engine", "transfer", "workers", "costmodel", "router", "bench", "sim", "viz",
    "course", "cli",
)  # fmt: skip

# Modules that must work without torch: policy, metrics, drawing, the command line. `*` stands for any module.
NO_TORCH = (
    "nanopd", "nanopd.errors", "nanopd.ops", "nanopd.kv", "nanopd.kv.*",
    "nanopd.model", "nanopd.model.config", "nanopd.model.presets",
    "nanopd.engine", "nanopd.engine.*",
    "nanopd.transfer", "nanopd.transfer.*",
    "nanopd.workers", "nanopd.workers.spec", "nanopd.workers.pools", "nanopd.workers.worker", "nanopd.workers.curves",
    "nanopd.workers.affinity", "nanopd.workers.wire",
    "nanopd.costmodel", "nanopd.costmodel.*",
    "nanopd.router", "nanopd.router.*", "nanopd.bench", "nanopd.bench.*", "nanopd.sim", "nanopd.sim.*",
    "nanopd.viz", "nanopd.viz.*", "nanopd.course", "nanopd.course.*", "nanopd.cli", "nanopd.cli.*",
)  # fmt: skip
# The mechanism in those layers: it touches tensors.
TORCH = (
    "nanopd.kv.cache",
    "nanopd.engine.runner", "nanopd.engine.sampler", "nanopd.engine.inputs", "nanopd.engine.cuda_graphs",
    "nanopd.engine.pending", "nanopd.engine.warm_up",
    "nanopd.engine.llm",
    "nanopd.engine.beam",
    "nanopd.engine.kv_budget", "nanopd.engine.benchmark", "nanopd.engine.benchmark_peer",
    "nanopd.transfer.cache_link", "nanopd.transfer.pipeline", "nanopd.transfer.streams",
    "nanopd.transfer.shared_pool", "nanopd.transfer.same_device", "nanopd.transfer.peer",
    "nanopd.transfer.pinned_relay", "nanopd.transfer.probe", "nanopd.transfer.benchmark", "nanopd.transfer.overlap",
    "nanopd.costmodel.profiler", "nanopd.costmodel.places",
    "nanopd.course.magic",
)  # fmt: skip

# What each notebook introduces, beside errors and the top-level names.
INTRODUCED = {
    0: ("ops", "viz", "course", "model.config", "model.presets"),
    1: ("kv",),
    2: (),
    3: (),
    4: ("engine", "model"),
    5: ("transfer", "workers", "router.central", "router.server", "router.decision", "router.policies"),
    6: (),
    7: ("costmodel",),
    8: ("router",),
    9: ("bench",),
    10: ("sim",),
    11: (),
}
CONFIG_NAMES = {"ModelConfig", "preset", "presets", "config"}  # of nanopd.model, before notebook 04


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST, package: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) of every import statement, wherever it stands; relative ones are resolved against ``package``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])]), tuple(a.name for a in node.names)


def layers_imported(source: str, package: str = "") -> set[str]:
    found = set()
    for module, names in imports(ast.parse(source), package):
        parts = module.split(".")
        if parts[0] == "nanopd":
            found |= {parts[1]} if len(parts) > 1 else {name for name in names if name in LAYERS}
    return found


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern.replace(".", r"\.").replace("*", ".+"), module) for pattern in patterns)


def test_every_module_belongs_to_a_layer() -> None:
    strangers = [m for m in MODULES if m != "nanopd" and m.split(".")[1] not in LAYERS]
    assert strangers == []


@pytest.mark.parametrize("module", [m for m in MODULES if m != "nanopd"])
def test_a_layer_imports_only_what_stands_above_it(module: str) -> None:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    layer = module.split(".")[1]
    wrong = {found for found in layers_imported(path.read_text(), package) if LAYERS.index(found) > LAYERS.index(layer)}
    assert not wrong, f"{module} ({layer}) must not import {sorted(wrong)}"


def test_the_import_scan_sees_every_form() -> None:
    source = """
from nanopd.engine import LLM
from nanopd import viz
def later():
    import nanopd.bench.metrics
from ..kv import cache
from . import scheduler
"""
    assert layers_imported(source, "nanopd.router") == {"engine", "viz", "bench", "kv", "router"}
    assert layers_imported("from nanopd import LLM") == set()
    assert layers_imported("import torch") == set()


def test_modules_without_torch_never_import_it() -> None:
    """One process in which importing torch raises imports all of them, so that one late import cannot hide another."""
    wanted = [m for m in MODULES if matches(m, NO_TORCH) and not matches(m, TORCH)]
    assert {"nanopd.kv.block_manager", "nanopd.engine.scheduler", "nanopd.model.config"} <= set(wanted)
    code = """
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, NoTorch())
bad = []
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        bad.append(f"{module}: {error}")
print("\\n".join(bad))
sys.exit(bool(bad))
"""
    done = subprocess.run([sys.executable, "-c", code, *wanted], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_nanopd_is_cheap() -> None:
    heavy = {"torch", "transformers", "numpy", "matplotlib", "typer", "rich"}
    code = f"import sys, nanopd; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# --- notebooks -------------------------------------------------------------------------------------------------


def allowed_for(number: int) -> tuple[str, ...]:
    return tuple(layer for n in range(number + 1) for layer in INTRODUCED[n])


def forbidden_imports(source: str, number: int) -> list[str]:
    """What a notebook cell imports that no notebook up to this one has introduced."""
    allowed, wrong = allowed_for(number), []
    for module, names in imports(ast.parse(source)):
        parts = module.split(".")
        if parts[0] != "nanopd":
            continue
        inner = ".".join(parts[1:])
        targets = [inner] if inner else [name for name in names if name in LAYERS]
        for target in targets:
            if target.split(".")[0] in ("errors", *allowed) or target in allowed:
                continue
            if target == "model" and names and set(names) <= CONFIG_NAMES:
                continue
            wrong.append(module + (f" ({', '.join(names)})" if names else ""))
    return wrong


@pytest.mark.parametrize("path", ROOT.notebooks(), ids=lambda p: p.stem)
def test_a_notebook_imports_only_layers_introduced_so_far(path: Path) -> None:
    number = int(path.name[:2])
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and not cell.source.lstrip().startswith("%%"):
            source = re.sub(r"^(\s*)[%!].*$", r"\1pass", cell.source, flags=re.MULTILINE)
            assert forbidden_imports(source, number) == [], f"cell {cell.id}"


def test_the_notebook_scan_can_fail() -> None:
    assert forbidden_imports("from nanopd.engine import Engine", 3) == ["nanopd.engine (Engine)"]
    assert forbidden_imports("from nanopd.engine import Engine", 4) == []
    assert forbidden_imports("from nanopd import LLM, SamplingParams", 0) == []
    assert forbidden_imports("from nanopd.model import ModelConfig, presets", 0) == []
    assert forbidden_imports("from nanopd.model import Transformer", 0) == ["nanopd.model (Transformer)"]
    assert forbidden_imports("import nanopd.kv.block_manager", 0) == ["nanopd.kv.block_manager"]
    assert forbidden_imports("from nanopd import sim", 4) == ["nanopd (sim)"]
