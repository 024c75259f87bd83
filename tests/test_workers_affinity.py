"""A worker's thread and its cores: bound while it works, as before afterwards, and nobody else is touched."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanopd.errors import ConfigError
from nanopd.workers import affinity
from nanopd.workers.spec import DeviceSpec

binds = pytest.mark.skipif(not affinity.can_bind(), reason="this system does not bind threads to cores")


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a thread of its own, or what it raised."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


@binds
def test_the_thread_is_bound_and_only_that_thread() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    inside, threads, main = threading.Event(), [], threading.Event()

    def work() -> tuple[set[int], int, set[int]]:
        with affinity.apply(DeviceSpec("cpu", cores=(core,))):
            bound, threads = os.sched_getaffinity(0), torch.get_num_threads()
            inside.set()
            main.wait(10)
        return bound, threads, os.sched_getaffinity(0)

    worker = threading.Thread(target=lambda: threads.append(work()))
    worker.start()
    assert inside.wait(10)
    assert os.sched_getaffinity(0) == before
    main.set()
    worker.join()
    assert threads == [({core}, 1, before)]


def test_torch_uses_no_more_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)  # as on macOS: the number of threads, no binding
    assert affinity.usable_cores() is None

    def work() -> list[int]:
        torch.set_num_threads(3)
        seen = []
        for cores in ((5,), (5, 6), (5, 6, 7, 8), None):
            with affinity.apply(DeviceSpec("cpu", cores=cores)):
                seen.append(torch.get_num_threads())
        return [*seen, torch.get_num_threads()]

    before = torch.get_num_threads()
    try:
        assert in_thread(work) == [1, 2, 3, 3, 3]
    finally:
        torch.set_num_threads(before)


@binds
def test_without_cores_nothing_happens() -> None:
    def work() -> bool:
        before = os.sched_getaffinity(0)
        with affinity.apply(DeviceSpec("cpu")):
            return os.sched_getaffinity(0) == before

    assert in_thread(work) is True


@binds
def test_a_core_that_does_not_exist_is_a_typed_error_and_leaves_the_thread_alone() -> None:
    def work() -> tuple[str, bool]:
        before = os.sched_getaffinity(0)
        with pytest.raises(ConfigError) as caught, affinity.apply(DeviceSpec("cpu", cores=(4000,))):
            pass
        return str(caught.value), os.sched_getaffinity(0) == before

    message, untouched = in_thread(work)
    assert "cpu/cores=4000" in message and untouched


@binds
def test_an_error_inside_unbinds_too() -> None:
    def work() -> bool:
        before = os.sched_getaffinity(0)
        with pytest.raises(ZeroDivisionError), affinity.apply(DeviceSpec("cpu", cores=(min(before),))):
            _ = 1 / 0
        return os.sched_getaffinity(0) == before

    assert in_thread(work) is True
