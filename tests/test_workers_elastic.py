"""A step runs on the whole card when it is alone, and in its partition when it has company."""

from __future__ import annotations

import pytest

from nanopd.engine.plan import StepPlan
from nanopd.workers.elastic import ElasticRunner, Occupancy


class Stub:
    """A runner that writes down what it was given."""

    kv_cache = ops = device = None

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.broken = False

    def launch(self, plan: StepPlan, after_layer: object = None) -> Stub:
        self.log.append(self.name)
        if self.broken:
            raise RuntimeError("no")
        return self

    def wait(self) -> list[list[int]]:
        if self.broken:
            raise RuntimeError("no")
        return [[1]]


def pair(log: list[str]) -> tuple[ElasticRunner, ElasticRunner]:
    occupancy = Occupancy()
    names = ("prefill", "decode")
    first, second = (
        ElasticRunner(name, Stub(log, f"{name} alone"), Stub(log, f"{name} beside"), occupancy) for name in names
    )
    return first, second


def test_the_step_decides_by_who_is_there_at_its_launch() -> None:
    log: list[str] = []
    prefill, decode = pair(log)
    assert decode.execute(StepPlan()) == [[1]]
    pending = prefill.launch(StepPlan())
    decode.execute(StepPlan())
    pending.wait()
    decode.execute(StepPlan())
    prefill.execute(StepPlan())
    assert log == ["decode alone", "prefill alone", "decode beside", "decode alone", "prefill alone"]


def test_a_worker_is_no_company_for_itself() -> None:
    log: list[str] = []
    prefill, _ = pair(log)
    prefill.launch(StepPlan())
    prefill.launch(StepPlan()).wait()
    assert log == ["prefill alone", "prefill alone"]


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_step_that_raises_frees_the_card(where: str) -> None:
    log: list[str] = []
    prefill, decode = pair(log)
    if where == "launch":
        prefill.alone.broken = True
        with pytest.raises(RuntimeError):
            prefill.launch(StepPlan())
    else:
        pending = prefill.launch(StepPlan())
        prefill.alone.broken = True
        with pytest.raises(RuntimeError):
            pending.wait()
    decode.execute(StepPlan())
    assert log[-1] == "decode alone"
