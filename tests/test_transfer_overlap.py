"""The overlap and link benchmarks on the CPU: what they run is right, whatever it takes."""

from __future__ import annotations

import pytest

from nanopd.transfer.benchmark import bench_links, table
from nanopd.transfer.overlap import OverlapBench, measure_overlap


@pytest.mark.parametrize("path", ["same-device copy", "peer copy", "pinned relay"])
def test_a_streamed_prefill_arrives_whole(tiny, path: str) -> None:
    result = measure_overlap(tiny, path=path, num_tokens=45, repeats=1, verify=True)
    assert result["verified"] is True
    assert result["bytes"] == 3 * 16 * tiny.config.kv_bytes_per_token(4)
    assert {"prefill_ms", "transfer_ms", "serial_ms", "streamed_ms", "hidden_share"} <= set(result)


def test_a_timeline_is_in_order(tiny) -> None:
    result = measure_overlap(tiny, num_tokens=33, repeats=1, gb_s=0.05, timelines=True)
    assert result["path"] == "throttled(pinned relay, 0.05 GB/s)"
    for name in ("streamed", "serial"):
        line = result["timeline"][name]
        assert len(line["compute"]) == len(line["transfer"]) == tiny.config.num_layers
        ends = [end for _, end in line["compute"]]
        assert ends == sorted(ends)
        for layer, (begin, end) in enumerate(line["transfer"]):
            assert begin < end
            assert begin >= (ends[layer] if name == "streamed" else ends[-1]), "a layer left before it was computed"


def test_the_check_can_fail(tiny) -> None:
    bench = OverlapBench(tiny, 20, "pinned relay")
    bench.link.destination_ops.scatter_blocks = lambda staged, cache, ids: None
    assert not bench.verified()
    bench.close()


def test_the_benchmark_of_all_paths(tiny) -> None:
    sizes = (1 << 16, 1 << 18)
    result = bench_links("cpu", model=tiny, sizes=sizes, handoff_tokens=40, overlap_tokens=40, repeats=1)
    block = 2 * 16 * tiny.config.num_kv_heads * tiny.config.head_dim * 4
    for path in ("same-device copy", "pinned relay"):
        assert [point["bytes"] for point in result["curves"][path]] == [size // block * block for size in sizes]
        assert result["handoff"][path]["bytes"] == 3 * 16 * tiny.config.kv_bytes_per_token(4)
    assert result["overlap"]["path"] == "pinned relay" and result["overlap"]["verified"] is True
    copy, ceiling = result["handoff"]["same-device copy"], result["ceilings"]["copy_gb_s"]
    assert copy["of_copy_bandwidth"] == pytest.approx(2 * copy["bytes"] / copy["ms"] / 1e6 / ceiling)
    assert copy["queued_of_copy_bandwidth"] == pytest.approx(2 * copy["queued_gb_s"] / ceiling)
    assert copy["behind_of_copy_bandwidth"] == pytest.approx(2 * copy["behind_gb_s"] / ceiling)
    assert result["longer_handoff"]["tokens"] == 4 * result["handoff"]["tokens"]
    text = table(result)
    assert "handoff of 40 tokens" in text and "bits equal" in text and "DIFFER" not in text
