"""What all widgets have in common: a picture that redraws itself, and actions that report instead of raising."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from typing import Any, TypeVar

import ipywidgets as widgets
from matplotlib.figure import Figure

from nanopd.errors import NanoPDError
from nanopd.viz.style import styled

T = TypeVar("T")


class LiveFigure:
    """A widget made of controls, a picture and a line of text. Subclasses draw into a fresh figure on each `refresh`.

    The picture travels as a PNG inside the widget, so it needs no Matplotlib backend and leaves no figure open.
    """

    def __init__(self) -> None:
        self.image = widgets.Image(format="png")
        self.status = widgets.HTML()
        self.figure: Figure | None = None  # the one shown now

    def draw(self) -> Figure:
        """The picture of the present state."""
        raise NotImplementedError

    def refresh(self) -> None:
        with styled():
            self.figure = self.draw()
            self.image.value = png(self.figure)

    def say(self, text: str, *, problem: bool = False) -> None:
        """Show ``text`` below the picture, in red if something was refused."""
        color, weight = ("#B03A00", "bold") if problem else ("#222222", "normal")
        self.status.value = f'<span style="color:{color};font-weight:{weight}">{html.escape(text)}</span>'

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` and redraw. What nanopd refuses becomes a message; the state is what it was before."""
        try:
            result = action()
        except NanoPDError as error:
            self.say(f"{type(error).__name__}: {error}", problem=True)
            result = None
        self.refresh()
        return result

    def layout(self, *controls: widgets.Widget) -> widgets.Widget:
        """The widget to display: controls above picture above status line."""
        return widgets.VBox([*controls, self.image, self.status])

    @property
    def widget(self) -> widgets.Widget:
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)


def png(figure: Figure) -> bytes:
    """``figure`` as PNG."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return file.getvalue()


def button(label: str, action: Callable[[], Any], tooltip: str = "", style: str = "") -> widgets.Button:
    made = widgets.Button(description=label, tooltip=tooltip, button_style=style)
    made.on_click(lambda _: action())
    return made
