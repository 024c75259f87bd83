"""The pool's picture: what is drawn is the state of the manager and its tables. The explorer: buttons and refusals."""

from __future__ import annotations

import random
import re

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

matplotlib.use("Agg")

from nanopd.kv.block_manager import BlockManager, BlockTable
from nanopd.viz import PALETTE, BlockTableExplorer, draw_pool
from nanopd.viz.style import INK, LIGHT, PAPER, bare_figure, tint


def drawn(ax: Axes, pattern: str) -> list[tuple[str, ...]]:
    """The groups of ``pattern`` in the gid of each patch that matches."""
    found = [re.fullmatch(pattern, patch.get_gid() or "") for patch in ax.patches]
    return [match.groups() for match in found if match]


def texts(ax: Axes) -> dict[str, str]:
    return {text.get_gid(): text.get_text() for text in ax.texts if text.get_gid()}


def canvas() -> Axes:
    return bare_figure(10, 5).add_subplot()


def check(ax: Axes, manager: BlockManager, tables: dict[str, BlockTable]) -> None:
    """Everything that the detailed picture says, against the objects."""
    snapshot, labels = manager.snapshot(), texts(ax)
    expected = [(str(block.block_id), block.state) for block in snapshot.blocks]
    assert drawn(ax, r"block (\d+) (\w+)") == expected
    for block in snapshot.blocks:
        assert labels[f"id {block.block_id}"] == str(block.block_id)
        assert labels.get(f"generation {block.block_id}", "g0") == f"g{block.generation}"
        count = labels.get(f"count {block.block_id}", "")
        assert ("pin" in count) == (block.pin_count > 0)
        assert (f"×{block.ref_count}" in count) == (block.ref_count > 1)
    for name, table in tables.items():
        entries = [text for gid, text in labels.items() if gid.startswith(f"entry {name} ")]
        assert entries == [str(block) for block in table.block_ids]
        slots = [state for _, state in drawn(ax, rf"entry slots {re.escape(name)} (\d+) (\w+)")]
        assert slots.count("computed") == table.num_committed
        assert slots.count("reserved") == table.num_tokens - table.num_committed
        assert labels[f"table {name}"].startswith(f"{name}\n{table.num_committed}")
    counts = {state: sum(block.state == state for block in snapshot.blocks) for state in ("used", "cached", "free")}
    summary = next(text.get_text() for text in ax.texts if text.get_text().startswith("pool:"))
    assert summary.endswith(" + ".join(f"{n} {state}" for state, n in counts.items()))


def random_pool(seed: int) -> tuple[BlockManager, dict[str, BlockTable]]:
    rng = random.Random(seed)
    manager = BlockManager(rng.randint(8, 40), rng.choice([1, 4, 8]))
    tables: dict[str, BlockTable] = {}
    for i in range(12):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 3 * manager.block_size))]
        table = manager.match_prefix(prompt)
        if not manager.can_append(table, len(prompt) - table.num_tokens):
            manager.free(table)
            continue
        manager.append_slots(table, len(prompt) - table.num_tokens)
        manager.commit(table, prompt[table.num_committed : rng.randint(table.num_committed, len(prompt))])
        tables[f"t{i}"] = table
        if table.num_committed == table.num_tokens and rng.random() < 0.5:
            tables[f"t{i}'"] = manager.fork(table)
        if rng.random() < 0.3:
            manager.free(tables.pop(rng.choice(list(tables))))
    if tables:
        manager.pin(rng.choice(list(tables.values())))
    return manager, dict(list(tables.items())[:12])


@pytest.mark.parametrize("seed", range(8))
def test_the_picture_is_the_state(seed: int) -> None:
    manager, tables = random_pool(seed)
    before = manager.snapshot()
    check(draw_pool(manager, tables, ax=canvas()), manager, tables)
    assert manager.snapshot() == before, "drawing changed the manager"


def test_a_shared_block_has_the_colours_of_all_its_owners() -> None:
    manager = BlockManager(4, 4)
    one = BlockTable()
    manager.append_slots(one, 4)
    manager.commit(one, range(4))
    two = manager.fork(one)
    ax = draw_pool(manager, {"one": one, "two": two}, ax=canvas())
    boxes = [(p.get_xy(), to_hex(p.get_facecolor())) for p in ax.patches if isinstance(p, Rectangle) and p.get_fill()]
    stripes = [color for (x, y), color in boxes if y == 0 and x < 1]  # within block 0
    assert stripes == [to_hex(tint(color, 0.45)) for color in PALETTE[:2]]


def test_pending_copies_are_arrows() -> None:
    manager = BlockManager(8, 4)
    one = BlockTable()
    manager.append_slots(one, 2)
    manager.commit(one, range(2))
    two = manager.fork(one)
    copies = manager.append_slots(two, 1)
    ax = draw_pool(manager, {"one": one, "two": two}, copies=copies, ax=canvas())
    assert [(int(a), int(b)) for a, b in drawn(ax, r"copy (\d+) (\d+)")] == copies


def test_a_large_pool_is_drawn_without_details() -> None:
    manager = BlockManager(300, 16)
    tables = {}
    for i in range(15):
        tables[f"r{i}"] = BlockTable()
        manager.append_slots(tables[f"r{i}"], 100)
    ax = draw_pool(manager.snapshot(), tables, title="many", ax=canvas())
    assert len(drawn(ax, r"block (\d+) (\w+)")) == 300 and not drawn(ax, r"slots (\d+) (\w+)")
    assert any(text.get_text() == "… and 3 more tables" for text in ax.texts)
    assert ax.get_title(loc="left") == "many"


def test_a_huge_pool_is_an_image() -> None:
    manager = BlockManager(2000, 16)
    tables = {}
    for i in range(20):
        tables[f"r{i}"] = BlockTable()
        manager.append_slots(tables[f"r{i}"], 160)
        manager.commit(tables[f"r{i}"], range(i, i + 160))
    tables["fork"] = manager.fork(tables["r0"])
    manager.free(tables.pop("r1"))
    ax = draw_pool(manager, tables, title="huge", ax=canvas())
    pixels = ax.images[0].get_array().reshape(-1, 3)
    seen = [to_hex(tuple(pixel)).upper() for pixel in pixels[:2000]]
    assert [seen.count(color.upper()) for color in (PAPER, LIGHT, INK)] == [1800, 10, 10]
    assert seen[20] == PALETTE[1].upper(), "the second table has the second colour"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[3] == "r0: 160 tokens" and labels[-1] == "… and 8 more tables"
    assert any(text.get_text().endswith("190 used + 10 cached + 1800 free") for text in ax.texts)


def test_a_new_figure_is_made_when_no_axes_are_given() -> None:
    import matplotlib.pyplot as plt

    settings = dict(matplotlib.rcParams)
    ax = draw_pool(BlockManager(4, 4))
    assert ax.figure.number in plt.get_fignums()  # type: ignore[union-attr]
    plt.close(ax.figure)  # type: ignore[arg-type]
    assert dict(matplotlib.rcParams) == settings, "the caller's settings were changed"


# --- explorer -------------------------------------------------------------------------------------------------------


def consistent(explorer: BlockTableExplorer) -> None:
    assert explorer.figure is not None
    check(explorer.figure.axes[0], explorer.manager, explorer.tables)
    explorer.manager.check_integrity(explorer.tables.values())
    assert bytes(explorer.image.value).startswith(b"\x89PNG")
    assert list(explorer.selected.options) == list(explorer.tables)


def test_explorer_buttons_call_the_manager_and_redraw() -> None:
    explorer = BlockTableExplorer(num_blocks=12, block_size=4)
    click = {name: button.click for name, button in explorer.buttons.items()}
    explorer.prompt_length.value = 10
    click["add request"]()
    consistent(explorer)
    assert [(t.num_tokens, t.num_committed) for t in explorer.tables.values()] == [(10, 0)]
    click["write"]()
    consistent(explorer)
    assert explorer.tables["r0"].num_committed == 10
    click["fork"]()
    consistent(explorer)
    assert explorer.tables["r1"].block_ids == explorer.tables["r0"].block_ids
    assert explorer.selected.value == "r1"
    click["append token"]()
    consistent(explorer)
    assert len(explorer.copies) == 1 and "is shared" in explorer.status.value
    assert drawn(explorer.figure.axes[0], r"copy (\d+) (\d+)")  # type: ignore[union-attr]
    click["write"]()
    consistent(explorer)
    assert explorer.copies == [] and not drawn(explorer.figure.axes[0], r"copy (\d+) (\d+)")  # type: ignore[union-attr]
    click["free"]()
    consistent(explorer)
    click["add request"]()  # the same text: its beginning is there already
    consistent(explorer)
    assert explorer.tables["r2"].num_committed == 8 and "8 of its tokens were found" in explorer.status.value


def test_explorer_shows_refusals_and_changes_nothing() -> None:
    explorer = BlockTableExplorer(num_blocks=4, block_size=4)
    for action in ("append token", "fork", "free"):
        explorer.buttons[action].click()
        assert "add a request first" in explorer.status.value
    explorer.add(10)
    before = explorer.manager.snapshot()
    for refused, message in (
        (lambda: explorer.add(10), "OutOfBlocksError"),
        (lambda: explorer.append("r0", 7), "OutOfBlocksError"),
        (lambda: explorer.fork(), "cannot fork"),
        (lambda: explorer.free("r9"), "no table"),
    ):
        assert refused() is None
        assert message in explorer.status.value and "#B03A00" in explorer.status.value
        assert explorer.manager.snapshot() == before
        consistent(explorer)
    explorer.write()
    assert "#B03A00" not in explorer.status.value
    consistent(explorer)


def test_explorer_gives_back_the_prefix_of_a_request_that_does_not_fit() -> None:
    explorer = BlockTableExplorer(num_blocks=4, block_size=4)
    explorer.add(9)
    explorer.write()
    assert explorer.add(16) is None and "OutOfBlocksError" in explorer.status.value
    consistent(explorer)


def test_explorer_on_the_manager_and_tables_of_somebody_else() -> None:
    manager = BlockManager(16, 8)
    table = BlockTable()
    manager.append_slots(table, 20)
    manager.commit(table, range(20))
    explorer = BlockTableExplorer(manager, {"mine": table})
    consistent(explorer)
    assert explorer.fork("mine") == "r0"
    explorer.append("mine")
    explorer.write()
    consistent(explorer)
    assert table.num_committed == 21 and explorer.manager is manager


def test_widgets_can_be_displayed() -> None:
    explorer = BlockTableExplorer()
    bundle = explorer._repr_mimebundle_(include=None, exclude=None)
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
