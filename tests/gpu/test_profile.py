"""The profiler on a GPU: graphs, partitions beside a busy neighbour, and a pool that is as it was before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanopd import LLM, SamplingParams
from nanopd.costmodel import measure_cluster, measure_link, profile_device
from nanopd.costmodel.hardware_profile import BUSY
from nanopd.costmodel.sweep import GPU_QUICK
from nanopd.workers import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_profile_of_a_gpu_leaves_the_engine_as_it_was() -> None:
    with LLM("dummy:tiny", device="cuda", num_blocks=4000, max_num_seqs=64, use_tqdm=False) as llm:
        prompt, params = list(range(1, 100)), SamplingParams(temperature=0.0, max_tokens=8)
        before = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        report = measure_link(llm, "cuda")
        profile = profile_device(llm, quick=True, link_gb_s=report.gb_s, link=report.path, use_tqdm=False)
        assert profile.quality["whole device"].num_held_out >= 20
        assert profile.link == "same-device copy" and profile.bandwidth_gb_s and profile.bandwidth_gb_s > 0
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == before


def test_partitions_are_measured_alone_and_beside_each_other() -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    small = total // 3 // 8 * 8
    few = replace(GPU_QUICK, prefill=(64, 512), batches=(4,), kv_lens=(256,), random=4, held_out=4)
    with Cluster.build(
        "dummy:tiny",
        decode=[f"cuda:0/sm={small}"],
        prefill=[f"cuda:0/sm={total - small}"],
        num_blocks=4000,
        max_num_seqs=64,
        use_tqdm=False,
    ) as cluster:
        points = measure_cluster(cluster, sizes=few, use_tqdm=False)
    names = {f"sm={small}", f"sm={total - small}"}
    assert {point.place for point in points} == names | {name + BUSY for name in names}
