"""A pool of thousands of blocks as an image: one pixel per block, nothing else to read but its colour."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from nanopd.kv.block_table import BlockInfo, BlockTable, PoolSnapshot
from nanopd.viz.style import GREY, INK, LIGHT, PAPER, hide_axes

MOST_TABLES = 12  # in the legend


def draw_pool_image(
    ax: Axes, snapshot: PoolSnapshot, tables: Mapping[str, BlockTable], colors: Mapping[str, str], columns: int
) -> None:
    """Draw ``snapshot`` row by row, ``columns`` blocks to a row; ``colors``: table name -> colour."""
    owner = {block: colors[name] for name, table in tables.items() for block in table.block_ids}
    pixels = [to_rgb(block_color(block, owner.get(block.block_id, GREY))) for block in snapshot.blocks]
    rows = -(-len(pixels) // columns)
    pixels += [to_rgb(PAPER)] * (rows * columns - len(pixels))
    ax.imshow(np.array(pixels).reshape(rows, columns, 3), interpolation="nearest", aspect="auto")
    hide_axes(ax)
    for spine in ax.spines.values():
        spine.set_visible(True)
    handles = [
        Patch(facecolor=PAPER, edgecolor=GREY, label="free"),
        Patch(facecolor=LIGHT, label="cached, nobody's"),
        Patch(facecolor=INK, label="shared"),
    ]
    listed = list(tables.items())[:MOST_TABLES]
    handles += [Patch(facecolor=colors[name], label=f"{name}: {table.num_tokens:,} tokens") for name, table in listed]
    if len(tables) > MOST_TABLES:
        handles.append(Patch(facecolor=PAPER, label=f"… and {len(tables) - MOST_TABLES} more tables"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=4, handlelength=1.4, columnspacing=1.2)


def block_color(block: BlockInfo, owner: str) -> str:
    if block.state != "used":
        return PAPER if block.state == "free" else LIGHT
    return INK if block.ref_count > 1 else owner
