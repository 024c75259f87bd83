"""BlockTableExplorer: play scheduler on a live BlockManager, one action at a time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import ipywidgets as widgets
from matplotlib.figure import Figure

from nanopd.errors import BlockAccountingError
from nanopd.kv.block_manager import BlockManager, BlockTable
from nanopd.viz.block_table import draw_pool
from nanopd.viz.live import LiveFigure, button
from nanopd.viz.style import bare_figure

TEXTS = ("story", "poem", "recipe")  # prompts from the same text have the same beginning


class BlockTableExplorer(LiveFigure):
    """Buttons over a block manager; what each does is one call of it.

    * **add request**: ``match_prefix``, then ``append_slots`` for the rest of the prompt
    * **append token**: ``append_slots(table, 1)``, which may ask for a copy (red arrow)
    * **write**: the copies have run and every reserved slot is computed: ``commit``
    * **fork** and **free** of the selected table

    Works on any manager, also one that an engine is using; tables that it did not make can be passed in ``tables``.
    Every method can be called from code. A refused action shows its error and changes nothing.
    """

    def __init__(
        self,
        manager: BlockManager | None = None,
        tables: Mapping[str, BlockTable] | None = None,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
    ) -> None:
        super().__init__()
        self.manager = manager or BlockManager(num_blocks, block_size)
        self.tables: dict[str, BlockTable] = dict(tables or {})
        self.copies: list[tuple[int, int]] = []  # handed out, to run before the next write
        self._tokens: dict[str, list[int]] = {}  # of the slots that are reserved and not computed
        self._names = (f"r{i}" for i in count())
        self._new_token = count(1_000_000)  # output tokens: all different, so forks differ
        longest = self.manager.block_size * self.manager.num_blocks + self.manager.block_size
        whole_label = {"description_width": "initial"}
        self.prompt_length = widgets.IntSlider(
            value=min(2 * self.manager.block_size + 2, longest),
            min=1,
            max=longest,
            description="prompt length",
            style=whole_label,
        )
        self.text = widgets.Dropdown(
            options=TEXTS, description="prompt from", layout={"width": "200px"}, style=whole_label
        )
        self.selected = widgets.Dropdown(options=list(self.tables), description="table", layout={"width": "200px"})
        self.buttons = {
            "add request": button("add request", self.add, "match_prefix + append_slots", "primary"),
            "append token": button("append token", self.append, "append_slots(table, 1)"),
            "write": button("write", self.write, "run the copies, compute the reserved slots, commit"),
            "fork": button("fork", self.fork, "fork(table)"),
            "free": button("free", self.free, "free(table)", "warning"),
        }
        self._widget = self.layout(
            widgets.HBox([self.prompt_length, self.text, self.buttons["add request"]]),
            widgets.HBox([self.selected, *(self.buttons[name] for name in ("append token", "write", "fork", "free"))]),
        )
        self.say("Add a request, then write it: its blocks go from reserved to computed.")
        self.refresh()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    def draw(self) -> Figure:
        rows = -(-self.manager.num_blocks // 16) + 1.2 * len(self.tables)
        figure = bare_figure(11, min(1.9 + 0.62 * rows, 14))
        draw_pool(self.manager, self.tables, copies=self.copies, ax=figure.add_subplot())
        return figure

    # --- actions ---------------------------------------------------------------------------------------------

    def add(self, prompt_length: int | None = None, text: str | None = None) -> str | None:
        """A new request; its name, or None if there was no room. Default prompt: what the controls say."""
        return self.attempt(lambda: self._add(prompt_length or self.prompt_length.value, text or self.text.value))

    def append(self, name: str | None = None, num_tokens: int = 1) -> list[tuple[int, int]] | None:
        """Reserve slots for output tokens of table ``name`` (default: the selected one); the copies to run."""
        return self.attempt(lambda: self._append(self._name(name), num_tokens))

    def write(self) -> None:
        """Compute all reserved slots of all tables, as one step of an engine does."""
        self.attempt(self._write)

    def fork(self, name: str | None = None) -> str | None:
        """A second table with the same content; its name."""
        return self.attempt(lambda: self._fork(self._name(name)))

    def free(self, name: str | None = None) -> None:
        self.attempt(lambda: self._free(self._name(name)))

    # --- inside ----------------------------------------------------------------------------------------------

    def _name(self, name: str | None) -> str:
        name = self.selected.value if name is None else name
        if name not in self.tables:
            raise BlockAccountingError("add a request first" if name is None else f"there is no table {name!r}")
        return name

    def _keep(self, name: str, table: BlockTable) -> None:
        self.tables[name] = table
        self.selected.options = list(self.tables)
        self.selected.value = name

    def _add(self, prompt_length: int, text: str) -> str:
        start = 1000 * (1 + TEXTS.index(text))
        prompt = list(range(start, start + prompt_length))
        table = self.manager.match_prefix(prompt)
        found = table.num_tokens
        try:
            self.manager.append_slots(table, prompt_length - found)
        except Exception:
            self.manager.free(table)
            raise
        name = next(n for n in self._names if n not in self.tables)
        self._tokens[name] = prompt[found:]
        self._keep(name, table)
        hit = f"{found} of its tokens were found in the prefix cache" if found else "nothing of it was cached"
        self.say(f"{name}: a prompt of {prompt_length} tokens; {hit}. {prompt_length - found} slots are reserved.")
        return name

    def _append(self, name: str, num_tokens: int) -> list[tuple[int, int]]:
        table = self.tables[name]
        copies = self.manager.append_slots(table, num_tokens)
        self.copies += copies
        self._tokens.setdefault(name, []).extend(next(self._new_token) for _ in range(num_tokens))
        copied = "".join(f" Block {a} is shared, so {name} gets a copy of it: block {b}." for a, b in copies)
        self.say(f"{name}: {num_tokens} more slot{'s' if num_tokens > 1 else ''} reserved.{copied}")
        return copies

    def _write(self) -> None:
        self.manager.copies_done()
        num_copies, self.copies = len(self.copies), []
        written = 0
        for name, table in self.tables.items():
            tokens = self._tokens.pop(name, [])
            self.manager.commit(table, tokens)
            written += len(tokens)
        self.say(f"One step: {num_copies} block copies, then the KV of {written} tokens was written.")

    def _fork(self, name: str) -> str:
        table = self.manager.fork(self.tables[name])
        fork = next(n for n in self._names if n not in self.tables)
        self._keep(fork, table)
        self.say(f"{fork} is a fork of {name}: it shares all {len(table.block_ids)} blocks, and nothing was copied.")
        return fork

    def _free(self, name: str) -> None:
        before = self.manager.num_free_blocks
        self.manager.free(self.tables[name])
        del self.tables[name]
        self._tokens.pop(name, None)
        self.selected.options = list(self.tables)
        gained = self.manager.num_free_blocks - before
        self.say(f"{name} is freed: {gained} blocks can be had again. Full ones stay cached until they are needed.")
