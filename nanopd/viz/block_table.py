"""The KV pool and the block tables that point into it, drawn from a live BlockManager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from nanopd.kv.block_manager import BlockManager
from nanopd.kv.block_table import BlockInfo, BlockTable, PoolSnapshot
from nanopd.viz.pool_image import draw_pool_image
from nanopd.viz.style import ALERT_COLOR, GREY, INK, LIGHT, PALETTE, PAPER, axes_for, hide_axes, styled, tint

CELL, STRIP = 0.86, 0.17  # size of a block, and height of its strip of slots, in units of the grid
DETAILED = 96  # pools up to this size show ids, counts, generations and slots
LARGEST = 1024  # pools beyond this size are an image, one pixel per block
MOST_ROWS = 12  # tables drawn


@dataclass(frozen=True)
class Fill:
    """How much of a block is in use: the first ``computed`` slots hold KV, those up to ``reserved`` are promised."""

    computed: int
    reserved: int


def draw_pool(
    pool: BlockManager | PoolSnapshot,
    tables: Mapping[str, BlockTable] | None = None,
    *,
    copies: Sequence[tuple[int, int]] = (),
    arrows: bool | None = None,
    columns: int | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw every physical block, and below each table the blocks it lists.

    A block has the colour of its owner, the colours of all its owners if it is shared, a dashed edge if it is only
    cached. In it: its id, ``xN`` if N tables share it, ``gN`` for generation N, and its slots.

    Args:
        tables: name -> table; names become labels.
        copies: pending copy-on-write copies (source, destination), drawn as red arrows.
        arrows: lines from table entries to blocks; default: if there are at most 16 entries.
        columns: blocks per row; default 16, 32 or 128, by the size of the pool.

    Pools of more than 96 blocks are drawn without details, pools of more than 1,024 as an image.
    """
    snapshot = pool.snapshot() if isinstance(pool, BlockManager) else pool
    tables = tables or {}
    with styled():
        picture = _Picture(snapshot, tables, columns)
        if len(snapshot.blocks) > LARGEST:
            ax = axes_for(ax, (10, 4.5))
            ax.text(0, 1.02, picture.summary(), transform=ax.transAxes, va="bottom")
            draw_pool_image(ax, snapshot, tables, picture.colors, columns or 128)
        else:
            ax = axes_for(ax, picture.size)
            picture.draw(ax, copies, arrows)
        if title:
            ax.set_title(title, pad=24 if len(snapshot.blocks) > LARGEST else None)
    return ax


class _Picture:
    """Where things go. One unit is one block; y runs downwards."""

    def __init__(self, snapshot: PoolSnapshot, tables: Mapping[str, BlockTable], columns: int | None) -> None:
        self.snapshot = snapshot
        self.detailed = len(snapshot.blocks) <= DETAILED
        self.columns = columns or min(len(snapshot.blocks), 16 if self.detailed else 32)
        self.pool_rows = -(-len(snapshot.blocks) // self.columns)
        self.tables = dict(list(tables.items())[:MOST_ROWS])
        self.num_hidden = len(tables) - len(self.tables)
        self.colors = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(tables)}
        self.owners: dict[int, list[str]] = {}
        self.fill: dict[int, Fill] = {}
        for name, table in tables.items():
            for block, fill in _fills(table, snapshot.block_size):
                self.owners.setdefault(block, []).append(name)
                self.fill[block] = max(fill, self.fill.get(block, fill), key=lambda f: (f.reserved, f.computed))
        self.table_top = self.pool_rows + 0.9
        self.rows = [-(-max(len(table.block_ids), 1) // self.columns) for table in self.tables.values()]

    @property
    def height(self) -> float:
        below = sum(self.rows) + 0.15 * len(self.rows) + (0.6 if self.num_hidden else 0)
        return self.table_top + below if self.tables else self.pool_rows

    @property
    def size(self) -> tuple[float, float]:
        unit = 0.62 if self.detailed else 0.3
        return (max(unit * (self.columns + 2.4), 6.5), unit * self.height + 1.3)

    def place(self, block: int) -> tuple[float, float]:
        return (block % self.columns, block // self.columns)

    def draw(self, ax: Axes, copies: Sequence[tuple[int, int]], arrows: bool | None) -> None:
        hide_axes(ax)
        ax.set_aspect("equal")
        ax.set_xlim(-2.3 if self.tables else -0.1, self.columns)
        ax.set_ylim(self.height, -0.75)
        ax.text(0, -0.2, self.summary(), va="bottom", fontsize=11)
        for info in self.snapshot.blocks:
            self._block(ax, info)
        entries = self._table_rows(ax)
        if arrows if arrows is not None else len(entries) <= 16 and self.detailed:
            for (x, y), block, name in entries:
                self._arrow(ax, (x + CELL / 2, y), block, self.colors[name])
        for source, destination in copies:
            self._copy(ax, source, destination)
        self._legend(ax, bool(copies))

    def summary(self) -> str:
        states = [block.state for block in self.snapshot.blocks]
        return (
            f"pool: {len(states)} blocks of {self.snapshot.block_size} tokens = {states.count('used')} used"
            f" + {states.count('cached')} cached + {states.count('free')} free"
        )

    def _block(self, ax: Axes, info: BlockInfo) -> None:
        x, y = self.place(info.block_id)
        owners = self.owners.get(info.block_id, [])
        colors = [self.colors[name] for name in owners] or [GREY if info.state == "used" else LIGHT]
        for i, color in enumerate(colors):
            width, face = CELL / len(colors), PAPER if info.state == "free" else tint(color, 0.45)
            ax.add_patch(Rectangle((x + i * width, y), width, CELL, facecolor=face, linewidth=0))
        edge = Rectangle(
            (x, y),
            CELL,
            CELL,
            fill=False,
            edgecolor=INK if info.pin_count else GREY,
            linewidth=2.4 if info.pin_count else 1.0,
            linestyle="--" if info.state == "cached" else "-",
        )
        edge.set_gid(f"block {info.block_id} {info.state}")
        ax.add_patch(edge)
        if not self.detailed:
            return
        _label(ax, x + CELL / 2, y + 0.36, str(info.block_id), f"id {info.block_id}", size=11)
        if info.generation:
            gid = f"generation {info.block_id}"
            _label(ax, x + CELL - 0.04, y + 0.03, f"g{info.generation}", gid, size=7, where="top right")
        counts = ([f"×{info.ref_count}"] if info.ref_count > 1 else []) + (["pin"] if info.pin_count else [])
        if counts:
            text, gid = " ".join(counts), f"count {info.block_id}"
            _label(ax, x + 0.04, y + 0.03, text, gid, size=7, where="top left", weight="bold")
        full = Fill(self.snapshot.block_size, self.snapshot.block_size)
        fill = self.fill.get(info.block_id, full if info.tokens else Fill(0, 0))
        if info.state != "free":
            self._slots(ax, x, y, fill, colors[0] if info.state == "used" else GREY, f"slots {info.block_id}")

    def _slots(self, ax: Axes, x: float, y: float, fill: Fill, color: str, gid: str) -> None:
        width = CELL / self.snapshot.block_size
        for i in range(fill.reserved):
            computed = i < fill.computed
            slot = Rectangle(
                (x + i * width, y + CELL - STRIP),
                width,
                STRIP,
                facecolor=color if computed else PAPER,
                edgecolor=PAPER if computed else color,
                linewidth=0.6,
                hatch=None if computed else "/////",
            )
            slot.set_gid(f"{gid} {'computed' if computed else 'reserved'}")
            ax.add_patch(slot)

    def _table_rows(self, ax: Axes) -> list[tuple[tuple[float, float], int, str]]:
        """Draw the tables; (position, block, table name) of each entry."""
        entries: list[tuple[tuple[float, float], int, str]] = []
        y = self.table_top
        for (name, table), rows in zip(self.tables.items(), self.rows, strict=True):
            color = self.colors[name]
            reserved = table.num_tokens - table.num_committed
            break_ = "\n" if self.detailed else ": "
            text = f"{name}{break_}{table.num_committed}{f'+{reserved}' if reserved else ''} tokens"
            _label(ax, -0.15, y + CELL / 2, text, f"table {name}", size=9, where="right")
            for index, (block, fill) in enumerate(_fills(table, self.snapshot.block_size)):
                at = (index % self.columns, y + index // self.columns)
                ax.add_patch(Rectangle(at, CELL, CELL, facecolor=tint(color, 0.18), edgecolor=color, linewidth=1.2))
                if self.detailed:
                    _label(ax, at[0] + CELL / 2, at[1] + 0.36, str(block), f"entry {name} {index}", size=11)
                    self._slots(ax, *at, fill, color, f"entry slots {name} {index}")
                entries.append((at, block, name))
            y += rows + 0.15
        if self.num_hidden:
            ax.text(0, y + 0.4, f"… and {self.num_hidden} more tables", fontsize=10, color=GREY)
        return entries

    def _arrow(self, ax: Axes, start: tuple[float, float], block: int, color: str) -> None:
        x, y = self.place(block)
        end = (x + CELL / 2, y + CELL)
        # Below the blocks, which hide the part of a line that crosses them.
        ax.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color=color, linewidth=1.0, zorder=0.5)
        )

    def _copy(self, ax: Axes, source: int, destination: int) -> None:
        (x0, y0), (x1, y1) = self.place(source), self.place(destination)
        middle, distance = CELL / 2, max(abs(x1 - x0) + abs(y1 - y0), 1)
        arrow = FancyArrowPatch(
            (x0 + middle, y0 + middle),
            (x1 + middle, y1 + middle),
            connectionstyle=f"arc3,rad={-min(0.35, 1.2 / distance)}",
            arrowstyle="-|>",
            mutation_scale=16,
            color=ALERT_COLOR,
            linewidth=2.2,
            shrinkA=8,
            shrinkB=8,
            zorder=5,
            clip_on=False,
        )
        arrow.set_gid(f"copy {source} {destination}")
        ax.add_patch(arrow)

    def _legend(self, ax: Axes, with_copies: bool) -> None:
        states = {block.state for block in self.snapshot.blocks}
        handles = [Patch(facecolor=PAPER, edgecolor=GREY, label="free")]
        if "cached" in states:
            handles.append(Patch(facecolor=tint(LIGHT, 0.6), edgecolor=GREY, linestyle="--", label="cached, nobody's"))
        if any(block.ref_count > 1 for block in self.snapshot.blocks):
            handles.append(Patch(facecolor=PAPER, edgecolor=PAPER, label="×N: shared by N tables"))
        if self.detailed and any(block.generation for block in self.snapshot.blocks):
            handles.append(Patch(facecolor=PAPER, edgecolor=PAPER, label="gN: content given up N times"))
        if self.detailed and any(fill.reserved > fill.computed for fill in self.fill.values()):
            handles.append(Patch(facecolor=PAPER, edgecolor=GREY, hatch="/////", label="slot reserved, not computed"))
        if any(block.pin_count for block in self.snapshot.blocks):
            handles.append(Patch(facecolor=PAPER, edgecolor=INK, linewidth=2.4, label="pinned"))
        if with_copies:
            handles.append(Patch(facecolor=ALERT_COLOR, label="copy to run"))
        # As many columns as fit: a legend wider than the figure would squeeze the picture above it.
        ncols = max(1, int(ax.figure.bbox.width / ax.figure.dpi // 2.6))
        ax.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=ncols, handlelength=1.4, columnspacing=1.2
        )


def _fills(table: BlockTable, block_size: int) -> Iterator[tuple[int, Fill]]:
    for index, block in enumerate(table.block_ids):
        start = index * block_size
        computed = max(0, min(table.num_committed - start, block_size))
        yield block, Fill(computed, min(table.num_tokens - start, block_size))


def _label(ax: Axes, x: float, y: float, text: str, gid: str, size: float, where: str = "center", **style: Any) -> None:
    """``where``: "center", or the corner or side of the text that stands at (x, y)."""
    va, ha = {"center": ("center", "center"), "right": ("center", "right")}.get(where) or where.split()
    ax.text(x, y, text, ha=ha, va=va, fontsize=size, **style).set_gid(gid)
