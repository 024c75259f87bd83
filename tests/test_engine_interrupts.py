"""An interrupt between two lines of the guard itself must not leave its handler behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from nanopd.engine.interrupts import InterruptGuard


@pytest.fixture(autouse=True)
def ordinary_handler() -> Iterator[None]:
    """Background jobs ignore SIGINT; here it shall raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", ["on the way in", "on the way out"])
def test_an_interrupt_beside_the_guards_door_is_delivered_and_the_handler_goes(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = InterruptGuard()
    install, calls = signal.signal, []

    def interrupted(number: int, handler: object) -> object:
        """The interrupt comes right after the handler was put in place, or right before it is taken away."""
        calls.append(handler)
        if moment == "on the way out" and len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        result = install(number, handler)  # type: ignore[arg-type]
        if moment == "on the way in" and len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), guard:
        pass
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), guard:  # and so it is once more, without end
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
