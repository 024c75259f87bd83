"""The style of pictures ends with its block, and takes nothing else back."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient

from nanopd.kv.block_manager import BlockManager, BlockTable
from nanopd.viz import draw_pool
from nanopd.viz.style import RC, styled


def test_settings_are_the_callers_again_after_the_block() -> None:
    before = {name: matplotlib.rcParams[name] for name in RC}
    with pytest.raises(ZeroDivisionError), styled():
        assert matplotlib.rcParams["axes.titleweight"] == RC["axes.titleweight"]
        raise ZeroDivisionError
    assert {name: matplotlib.rcParams[name] for name in RC} == before


def test_figures_after_the_first_styled_one_are_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first figure of a notebook switches to the inline backend, which must survive the block it is drawn in."""
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel sets its own
    figure = "with styled():\n    plt.subplots()"
    sources = ["import matplotlib.pyplot as plt\nfrom nanopd.viz import styled", figure, figure, "plt.plot([1, 2]);"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    shown = [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in notebook.cells]
    assert shown == [0, 1, 1, 1]


def test_a_legend_with_many_entries_does_not_squeeze_a_small_pool() -> None:
    manager = BlockManager(8, 8, enable_prefix_caching=False)
    first = BlockTable()
    manager.append_slots(first, 12)
    manager.commit(first, range(12))
    second = manager.fork(first)
    copies = manager.append_slots(second, 1)
    ax = draw_pool(manager, {"A": first, "B": second}, copies=copies)
    ax.figure.canvas.draw()
    assert ax.get_position().width > 0.8
    plt.close(ax.figure)
