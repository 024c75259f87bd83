"""Sphinx: `make docs`. The source folder is the checkout itself, so that relative links mean the same everywhere."""

project = "nanopd"
author = "nanopd authors"
copyright = "nanopd authors"

extensions = ["myst_nb"]
root_doc = "docs/index"
include_patterns = ["README*.md", "CONTRIBUTING.md", "docs/index.md", "docs/en/**", "docs/zh/**", "notebooks/**"]
exclude_patterns = [".venv", ".git", "**/.ipynb_checkpoints", "build", "dist", "docs/_build"]

html_theme = "furo"
html_title = "nanopd"

# Notebooks show their stored outputs: real runs, many of them on a GPU that the machine building the docs may lack.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.xref_missing",  # links to folders and source files; the translation check proves that they exist
    "misc.highlighting_failure",  # %%cuda cells are C++ in a Python notebook
    "mystnb.unknown_mime_type",  # widget state
    "myst.header",
    "toc.not_included",
]
