"""Ceilings, the kernel benchmark and the record file, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanopd.errors import ConfigError
from nanopd.ops import measure
from nanopd.ops.benchmark import KernelBenchmark, bench_kernels
from nanopd.ops.ceilings import Ceilings, measure_ceilings
from nanopd.ops.measure import environment, gpu_slug, recorded, time_in_turn, time_op, write_result
from nanopd.ops.reference import ReferenceOps


def test_roofline_has_two_lines() -> None:
    ceilings = Ceilings("cuda", "bfloat16", copy_gb_s=4000.0, matmul_tflop_s=800.0)
    assert ceilings.ridge == 200.0
    assert ceilings.attainable_tflop_s(1.0) == 4.0
    assert ceilings.attainable_tflop_s(200.0) == ceilings.attainable_tflop_s(1e6) == 800.0
    assert json.loads(json.dumps(ceilings.as_dict()))["ridge"] == 200.0


def test_ceilings_of_this_machine() -> None:
    ceilings = measure_ceilings("cpu")
    assert ceilings.dtype == "float32"
    assert 0.05 < ceilings.copy_gb_s < 5_000
    assert 1e-4 < ceilings.matmul_tflop_s < 1_000


class Clock:
    """Time that passes only in ``work``; every unit of work makes the next one take ``drift`` times as long."""

    def __init__(self, drift: float = 1.0) -> None:
        self.now, self.slowness, self.drift = 0.0, 1.0, drift

    def work(self, seconds: float) -> None:
        self.now += seconds * self.slowness
        self.slowness *= self.drift


def test_time_is_divided_by_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    ms = time_op(torch.device("cpu"), clock.work, [(0.001,), (0.003,)], samples=3)
    assert ms == pytest.approx(2.0)


def test_what_takes_turns_is_compared_fairly_on_a_machine_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(drift=1.01)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    cpu = torch.device("cpu")
    alike = {name: (clock.work, [(0.01,)]) for name in ("first", "second")}
    times = time_in_turn(cpu, alike, samples=25)
    assert times["second"] / times["first"] == pytest.approx(1.01)
    one_by_one = [time_op(cpu, *call, samples=25) for call in alike.values()]
    assert one_by_one[1] / one_by_one[0] > 1.25


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {"samples": 0}, "samples must be an int >= 1, got 0"),
        ("cpu", {"samples": 2.5}, "samples must be an int >= 1, got 2.5"),
        ("cpu", {"inputs": ()}, "inputs must hold at least one set of arguments"),
        ("cpu", {"sample_ms": float("nan")}, "sample_ms must be a finite .* >= 0, got nan"),
        ("cpu", {"sample_ms": float("inf")}, "sample_ms must be a finite .* >= 0, got inf"),
        ("cpu", {"sample_ms": -1.0}, "sample_ms must be a finite .* >= 0, got -1.0"),
        ("meta", {}, "device meta cannot be timed"),
        (torch.device("meta"), {}, "device meta cannot be timed"),
    ],
)
def test_what_cannot_be_timed_is_refused(device: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        time_op(device, lambda: pytest.fail("it was called"), **options)


def test_a_device_may_be_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    assert time_op("cpu", clock.work, [(0.002,)], samples=1) == pytest.approx(2.0)


def test_record_holds_values_and_where_they_come_from(tmp_path: Path) -> None:
    values = {"ms": 1.23456789, "list": [0.1 + 0.2, 7], "nested": {"of_copy": 0.9}, "name": "x"}
    path = write_result("kernels", values, device="cpu", command="nanopd bench-kernels", folder=tmp_path)
    assert path == tmp_path / "cpu" / "kernels.json"
    record = json.loads(path.read_text())
    assert record["values"] == {"ms": 1.2346, "list": [0.3, 7], "nested": {"of_copy": 0.9}, "name": "x"}
    assert set(record) == {"gpu", "driver", "torch", "cuda", "python", "commit", "date", "command", "values"}
    assert record["torch"] == torch.__version__ and record["command"] == "nanopd bench-kernels"
    assert recorded("kernels", "cpu", folder=tmp_path) == record
    assert recorded("kernels", "nobody", folder=tmp_path) is None


def test_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOPD_COMMIT", "abc")
    assert environment("cpu")["commit"] == "abc"


def test_slug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
    assert gpu_slug("cuda") == "nvidia-geforce-rtx-4090"
    assert gpu_slug("cpu") == "cpu"


def test_every_row_of_the_benchmark_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(fn, inputs, _: float):
        for args in inputs:
            fn(*args)
        return lambda: 1.0

    monkeypatch.setattr(measure, "_cpu_timer", once)
    results = bench_kernels("cpu", progress=False)
    assert set(results) == {"ceilings", "decode", "prefill", "cache", "elementwise"}
    json.dumps(results)
    decode = results["decode"]["b4_ctx128_h9_3_d64"]
    assert decode["kv_bytes"] == 2 * 4 * 128 * 3 * 64 * 4
    assert decode["reference"]["gb_s"] == pytest.approx(decode["kv_bytes"] / 1e6)
    assert decode["reference"]["of_sdpa"] == 1.0
    assert [row["reference"]["of_sdpa"] for row in results["prefill"].values()] == [1.0] * len(results["prefill"])
    assert results["cache"]["store_kv_2048"]["gb_s"] == pytest.approx(2 * 2 * 2048 * 3 * 64 * 4 / 1e6)


def test_what_is_compared_computes_the_same() -> None:
    """The paged inputs and SDPA's dense ones hold different numbers, but SDPA's causality must be ours."""
    bench = KernelBenchmark(ReferenceOps(), torch.device("cpu"), torch.float32, Ceilings("cpu", "float32", 1.0, 1.0))
    from nanopd.ops.benchmark import Heads, _sdpa

    heads = Heads(4, 2, 64)
    q, k_cache, v_cache, tables, starts, lens, chunk, scale = bench._paged_prefill(heads, 16, 40)
    ours = ReferenceOps().paged_prefill_attention(q, k_cache, v_cache, tables, starts, lens, chunk, scale)
    k, v = (cache[tables[0].long()].flatten(0, 1)[:40].transpose(0, 1)[None] for cache in (k_cache, v_cache))
    dense = _sdpa(q.transpose(0, 1)[None], k, v, causal=True)
    torch.testing.assert_close(ours, dense[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
