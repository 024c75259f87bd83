"""Documents that requests share, schedules in a row, and the comparison on one card, small and on the CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nanopd.bench import cards, one_card, two_cards
from nanopd.bench.hardware import Hardware
from nanopd.bench.lengths import Uniform
from nanopd.bench.raw import read_records
from nanopd.bench.records import Outcome, RequestRecord
from nanopd.bench.workload import DOCUMENT_BLOCK, Documents, Part, Workload, chain, poisson
from nanopd.costmodel.hardware_profile import BUSY, WHOLE, preset
from nanopd.errors import ConfigError
from nanopd.model.loader import load_model
from nanopd.ops.measure import recorded

QUESTIONS = Workload("questions", (Part(1.0, Uniform(10, 60), Uniform(4, 8), Documents(3, 1000)),))
CHATS = Workload("chats", (Part(1.0, Uniform(10, 60), Uniform(4, 8)),))


def test_questions_begin_with_one_of_the_documents() -> None:
    schedule = poisson(QUESTIONS, 20.0, 5.0, seed=3)
    documents = schedule.documents(1000)
    assert len(documents) == 3 and all(len(document) == 2 * DOCUMENT_BLOCK for document in documents)
    beginnings: Counter[tuple[int, ...]] = Counter()
    for arrival in schedule.arrivals:
        prompt = schedule.prompt(arrival, 1000)
        assert len(prompt) == arrival.prompt_tokens and 10 <= len(prompt) - 2 * DOCUMENT_BLOCK <= 60
        beginnings[tuple(prompt[: 2 * DOCUMENT_BLOCK])] += 1
    assert set(beginnings) == set(map(tuple, documents))
    assert max(beginnings.values()) < 0.6 * len(schedule)  # all of them are asked about


def test_documents_are_the_same_at_every_rate_and_questions_are_not() -> None:
    slow, fast = (poisson(QUESTIONS, rate, 5.0, seed=3) for rate in (5.0, 50.0))
    assert sorted(slow.documents(1000)) == sorted(fast.documents(1000))
    assert sorted(poisson(QUESTIONS, 5.0, 5.0, seed=4).documents(1000)) != sorted(slow.documents(1000))
    one, other = (s.prompt(s.arrivals[0], 1000)[2 * DOCUMENT_BLOCK :] for s in (slow, fast))
    assert len(one) == len(other) and one != other


def test_workloads_without_documents_have_none() -> None:
    assert poisson(CHATS, 20.0, 2.0, seed=3).documents(1000) == []
    shrunk = QUESTIONS.scaled(0.5).parts[0].documents
    assert shrunk == Documents(3, 500)
    for bad in ((0, 10), (1, 0)):
        with pytest.raises(ConfigError, match=r"document.* >= 1, got 0"):
            Documents(*bad)


def test_a_chain_is_its_parts_one_after_the_other() -> None:
    parts = [poisson(CHATS, 20.0, 2.0, seed=3), poisson(QUESTIONS, 10.0, 3.0, seed=3)]
    made = chain("both", parts)
    assert made.duration_s == 5.0 and len(made) == sum(map(len, parts))
    assert [a.index for a in made.arrivals] == list(range(len(made)))
    times = [a.time_s for a in made.arrivals]
    assert times == sorted(times)
    assert times[len(parts[0]) :] == pytest.approx([2.0 + a.time_s for a in parts[1].arrivals])
    assert sorted(made.documents(1000)) == sorted(parts[1].documents(1000))
    with pytest.raises(ConfigError, match="one seed"):
        chain("mixed up", [parts[0], poisson(CHATS, 20.0, 2.0, seed=4)])
    with pytest.raises(ConfigError, match="needs parts"):
        chain("nothing", [])


PLAN = one_card.Plan(light=(6.0,), heavy=(6.0,), phases=(0.3,), duration_s=1.0, heavy_s=1.0, phase_s=0.5)
OPTIONS = {"num_blocks": 600, "collocated_chunk": 64, "max_model_len": 1200, "use_tqdm": False}


def test_all_strategies_run_the_same_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(one_card, "LIGHT", CHATS)
    monkeypatch.setattr(one_card, "HEAVY", QUESTIONS)
    profile = preset("h200")
    profile = replace(profile, step_time={**profile.step_time, WHOLE + BUSY: profile.step_time[WHOLE]})
    places = dict.fromkeys(("whole", "prefill", "decode"), "cpu")
    ways = one_card.strategies(load_model("dummy:tiny", device="cpu"), places, profile, OPTIONS)
    names = [way.name for way in ways]
    assert names == ["chunked", "partitions", "adaptive"]
    lines: list[str] = []
    result = cards.compare(
        ways, list(PLAN.schedules()), drain_s=PLAN.drain_s, about=PLAN.to_json(), raw=tmp_path, show=lines.append
    )
    assert len(lines) == 9
    for workload, by_rate in result["runs"].items():
        for rate, by_strategy in by_rate.items():
            assert list(by_strategy) == names
            offered = {summary["counters"]["offered"] for summary in by_strategy.values()}
            assert len(offered) == 1 and offered != {0}
            records = [read_records(tmp_path / f"{workload}-{rate}-{name}.jsonl") for name in names]
            sent = [[(r.time_s, r.prompt_tokens, r.output_tokens) for r in run] for run in records]
            assert sent[0] == sent[1] == sent[2]
            if workload == "heavy":  # the documents were there before the run
                assert min(summary["cached_share"] for summary in by_strategy.values()) > 0.8


def test_two_cards_each_know_all_documents_and_promises_are_counted(tmp_path: Path) -> None:
    """Two pools on the CPU stand for two cards: which of the two a question goes to, it finds its document there."""
    model = load_model("dummy:tiny", device="cpu")
    links: dict[str, Any] = {}
    options = {**OPTIONS, "shared_pool": False}
    made = two_cards.strategies(model, "cpu", "cpu", options, links)
    load = Workload("questions", (Part(1.0, Uniform(10, 60), Uniform(4, 8), Documents(8, 1000)),))
    ways = [replace(way, hardware=Hardware(("card 0", "card 1"))) for way in made]
    questions = [("heavy", 12.0, poisson(load, 12.0, 1.0, seed=3))]
    result = cards.compare(
        ways,
        questions,
        drain_s=4.0,
        about={"links": links},
        tpots_s=(1e-9, 100.0),
        raw=tmp_path,
        show=lambda line: None,
    )
    (runs,) = result["runs"]["heavy"].values()
    assert list(runs) == ["chunked", "apart"] and set(result["links"]) == {"prefill0 to decode0"}
    for name, run in runs.items():
        records = read_records(tmp_path / f"heavy-12-{name}.jsonl")
        assert run["cached_share"] > 0.8
        assert run["kept"] == {"1e-06": 0, "100000": sum(r.ttft_s <= 1.0 for r in records if r.ttft_s is not None)}
        assert run["attained_rate_per_gpu"] == pytest.approx(run["attained"] / run["window_s"] / 2, rel=1e-3)


def calls_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> dict[str, dict[str, Any]]:
    """name -> what `serving_strategy` is called with."""
    calls: dict[str, dict[str, Any]] = {}

    def record(name: str, model: Any, policy: Any, **options: Any) -> Any:
        calls[name] = {"policy": policy(), **options}

    monkeypatch.setattr(module, "serving_strategy", record)
    return calls


def test_what_serves_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, one_card)
    places = {"whole": "cuda:0", "prefill": "cuda:0/sm=68", "decode": "cuda:0/sm=64"}
    one_card.strategies("model", places, preset("h200"), {"collocated_chunk": 512, "num_blocks": 9})
    parts = {"prefill": ["cuda:0/sm=68"], "decode": ["cuda:0/sm=64"], "shared_pool": True}
    made = {name: {k: v for k, v in call.items() if k != "policy"} for name, call in calls.items()}
    common = {"collocated_chunk": 512, "num_blocks": 9}
    assert made == {
        "chunked": {"collocated": ["cuda:0"], **common},
        "partitions": {**parts, **common},
        "adaptive": {**parts, "elastic": True, **common},
    }
    assert [call["policy"].name for call in calls.values()] == ["collocated", "disaggregated", "adaptive"]
    assert (calls["adaptive"]["policy"].tpot_ms, calls["adaptive"]["policy"].chunk_size) == (20.0, 512)


def test_what_serves_on_two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, two_cards)
    links: dict[str, Any] = {}
    two_cards.strategies("model", "cuda:0", "cuda:1", {"num_blocks": 9}, links)
    note = calls["apart"].pop("on_open")
    assert [call.pop("policy").name for call in calls.values()] == ["collocated", "disaggregated"]
    assert calls == {
        "chunked": {"collocated": ["cuda:0", "cuda:1"], "num_blocks": 9},
        "apart": {"prefill": ["cuda:0"], "decode": ["cuda:1"], "num_blocks": 9},
    }
    report = SimpleNamespace(path="peer copy", gb_s=80.0)
    note(SimpleNamespace(links={("a", "b"): SimpleNamespace(report=report)}), None)
    assert links == {"a to b": {"path": "peer copy", "gb_s": 80.0}}


def test_both_promises_count() -> None:
    def record(ttft: float, tpot: float | None, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
        return RequestRecord(0, 0.0, 10, 5, outcome, ttft_s=ttft, tpot_s=tpot, e2e_s=2.0)

    records = [record(0.9, 0.009), record(1.1, 0.009), record(0.9, 0.011), record(0.9, None)]
    records.append(record(0.9, 0.009, Outcome.UNFINISHED))
    assert cards.kept(records, 0.010) == 2 and cards.kept(records, 0.012) == 3


def test_what_there_is_so_far_is_saved_after_each_run_and_an_impossible_folder_is_said_first(tmp_path: Path) -> None:
    model = load_model("dummy:tiny", device="cpu")
    (way,) = [way for way in two_cards.strategies(model, "cpu", "cpu", OPTIONS, {}) if way.name == "chunked"]
    runs = [("light", rate, poisson(CHATS, rate, 0.5, seed=3)) for rate in (4.0, 8.0)]
    saved: list[list[str]] = []

    def save(found: dict[str, Any]) -> None:
        saved.append([*found["runs"]["light"]])

    cards.compare(
        [way],
        runs,
        drain_s=4.0,
        about={},
        show=lambda line: None,
        save=save,
    )
    assert saved == [["4"], ["4", "8"]]
    (tmp_path / "file").write_text("")
    for main in (one_card.main, two_cards.main):
        with pytest.raises(ConfigError, match="--out"):
            main(["--out", str(tmp_path / "file")])


def test_loads_of_two_cards_all_have_rates() -> None:
    plan = two_cards.Plan(heavy=(1.0,), long=(2.0, 3.0), light=(4.0,))
    runs = [(name, rate, schedule.duration_s) for name, rate, schedule in plan.schedules()]
    assert runs == [("heavy", 1.0, 5.0), ("long", 2.0, 8.0), ("long", 3.0, 8.0), ("light", 4.0, 5.0)]


@pytest.mark.parametrize("places", [["--peer", "cuda:0"], ["--device", "cuda", "--peer", "cuda:0"], ["--peer", "gpu"]])
def test_one_card_is_no_pair(places: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--device cuda(:0)? and --peer cuda:0 are one|gpu"):
        two_cards.main(places)


def test_highest_rates_by_hand_and_in_the_records() -> None:
    def run(rate: float, kept: int) -> dict[str, Any]:
        return {"offered_rate": rate, "kept": {"8": kept}, "counters": {"offered": 10}}

    runs = {"light": {"1": {"a": run(1.5, 9), "b": run(1.5, 8)}, "2": {"a": run(2.5, 10), "b": run(2.5, 3)}}}
    assert cards.highest_rates(runs) == {"light": {"8": {"a": 2.5, "b": None}}}
    for name in ("one_card", "two_cards"):
        record = recorded(name)
        assert record is not None and record["values"]["highest"] == cards.highest_rates(record["values"]["runs"])
