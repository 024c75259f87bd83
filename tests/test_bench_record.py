"""Reports that are kept with the course's records come back as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import single_server

from nanopd.bench import SLO, Hardware, Report, Result, Workload, make_report, poisson, summarize
from nanopd.bench.record import main, record, recorded_reports
from nanopd.bench.report import samples
from nanopd.errors import ReportError


def report(workload: str = "light", gpu: str = "NVIDIA H200") -> Report:
    slo, schedule = SLO(0.5, 0.05), poisson(Workload.fixed(16, 8), 20.0, 30.0, 1)
    records = single_server(schedule, 0.02)
    summary = summarize(records, slo, offered=len(schedule), duration_s=30.0)
    results = [Result("a", 20.0, summary, schedule.fingerprint(), samples(records))]
    return make_report(
        results, {"a": Hardware(("cuda:0",), 132, "cuda:0")}, allow_unequal=False, workload=workload, note="", slo=slo,
        seed=1, options={}, environment={"gpu": gpu, "date": "2026-01-01"},
    )  # fmt: skip


def test_a_record_comes_back_with_fewer_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOPD_RESULTS", str(tmp_path))
    made = [report("light"), report("heavy")]
    paths = [str(r.save(tmp_path / f"{r.workload}.json")) for r in made]
    assert main(paths) == 0
    assert capsys.readouterr().out == "written: nvidia-h200/serving.json\n"
    found = json.loads((tmp_path / "nvidia-h200" / "serving.json").read_text())
    assert (found["gpu"], found["date"]) == ("NVIDIA H200", "2026-01-01")
    back = recorded_reports(found)
    assert list(back) == ["light", "heavy"]
    kept, whole = back["light"].results[0], Report.from_json(made[0].to_json()).results[0]
    assert kept.summary == whole.summary
    assert 100 <= len(kept.samples["ttft_s"]) <= 200 < len(whole.samples["ttft_s"])
    assert set(kept.samples["ttft_s"]) <= set(whole.samples["ttft_s"])
    assert kept.samples["ttft_s"][0] == min(whole.samples["ttft_s"])


def test_what_cannot_be_one_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for reports in ([], [report(), report()], [report("a"), report("b", "NVIDIA A100")]):
        with pytest.raises(ReportError, match="a record needs"):
            record(reports)
    assert main([str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(ReportError, match="values"):
        recorded_reports({})
    broken = record([report()])
    broken["values"]["reports"]["light"].pop("slo")
    with pytest.raises(ReportError, match="record of light is damaged"):
        recorded_reports(broken)


def test_a_cpu_has_its_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOPD_RESULTS", str(tmp_path))
    made = replace(report(), environment={"gpu": "CPU (some, 2 threads)"})
    assert main([str(made.save(tmp_path / "r.json"))]) == 0
    assert (tmp_path / "cpu" / "serving.json").is_file()
