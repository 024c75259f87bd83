"""The profiler: on a device whose step time is known exactly, in virtual time; and on a real engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanopd import LLM, SamplingParams
from nanopd.cli.app import run
from nanopd.costmodel import (
    StepFeatures,
    StepTimeModel,
    fit_step_time,
    load_profile,
    measure_cluster,
    measure_link,
    measure_place,
    profile_device,
)
from nanopd.costmodel.hardware_profile import BUSY
from nanopd.costmodel.places import split_specs
from nanopd.costmodel.step_timer import StepTimer
from nanopd.costmodel.sweep import CPU, CPU_QUICK, GPU, GPU_QUICK, PHASES, Limits, Setup, Sizes, fits, plan_sweep
from nanopd.engine import SchedulerConfig, StepPlan
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.workers import Cluster

SMALL = Sizes(
    prefill=(8, 16, 32),
    batches=(1, 2, 4),
    kv_lens=(16, 64),
    mixed_batches=(2,),
    mixed_kv_lens=(32,),
    chunks=(8, 16),
    behind=((32, 64),),
    random=10,
    held_out=6,
    warm_up=0,
)
TRUE = StepTimeModel(
    4.0, 0.005, 0.015, 128, pair_ms=6e-7, kv_token_ms=4e-5, chunk_ms=0.2, sequence_ms=0.01, launch_ms=6.0
)


@dataclass
class KnownDevice:
    """A runner whose clock advances by what a known model says of each step. It computes nothing."""

    model: StepTimeModel
    now: float = 0.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kv_cache: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(tensor=torch.zeros(2, 2, 1, 8, 1, 4)))
    seen: list[StepFeatures] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        self.seen.append(StepFeatures.of(plan))
        self.now += self.model.step_ms(self.seen[-1]) / 1e3
        for chunk in plan.chunks:
            assert chunk.request.table is not None and chunk.request.table.num_tokens >= chunk.start + chunk.num_tokens
        return SimpleNamespace(wait=lambda: [[1] * len(chunk.samplers) for chunk in plan.chunks])

    def clock(self) -> float:
        return self.now


# --- in virtual time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [GPU, GPU_QUICK], ids=["full", "quick"])
def test_profiling_a_known_device_gives_its_model_back(sizes: Sizes) -> None:
    device = KnownDevice(TRUE)
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=40960)
    manager = BlockManager(24_000, 16)
    points = measure_place(
        device,
        config,
        manager,
        vocab_size=1000,
        sizes=sizes,
        clock=device.clock,
        use_tqdm=False,  # type: ignore[arg-type]
    )
    assert all(point.ms == pytest.approx(TRUE.step_ms(point.features)) for point in points)
    assert sum(point.held_out for point in points) >= 40
    fit = fit_step_time(points)
    assert fit.quality.median_error < 0.01 and fit.quality.warnings == ()
    unseen = StepFeatures.decode(20, 20 * 3000).with_chunk(700, 2500)
    assert fit.model.step_ms(unseen) == pytest.approx(TRUE.step_ms(unseen), rel=0.03)


@pytest.mark.parametrize(
    "setup",
    [
        Setup("prefill", 24),
        Setup("decode", num_decodes=5, kv_len=40),
        Setup("mixed", 16, start=50, num_decodes=3, kv_len=9),
        Setup("random", 16, start=3, num_decodes=1, kv_len=30),
        Setup("random", 24, prompts=3, num_decodes=2, kv_len=17),
    ],
    ids=["prefill", "decode", "mixed", "short start", "three prompts"],
)
def test_the_steps_that_are_timed_are_the_ones_asked_for(setup: Setup) -> None:
    device = KnownDevice(TRUE)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    timer = StepTimer(device, config, 100, 8, 50, SMALL, device.clock)  # type: ignore[arg-type]
    features, _ = timer.measure(setup)
    assert features in device.seen and len(device.seen) == SMALL.rounds
    for seen in device.seen:
        assert seen.num_decodes == setup.num_decodes and seen.prefill_tokens == setup.prefill_tokens
        assert seen.num_prefills == (setup.prompts if setup.prefill_tokens else 0)
        steps = setup.skipped_steps + SMALL.rounds
        assert seen.num_decodes * setup.kv_len < seen.kv_tokens <= seen.num_decodes * (setup.kv_len + steps) or not (
            setup.num_decodes
        )
    if setup.start:
        first = device.seen[0].chunk_context - (setup.prefill_tokens + 1) / 2
        assert first == setup.skipped_steps * setup.per_prompt, "the prompt has that much behind it"
        assert abs(first - setup.start) <= setup.per_prompt
    elif setup.prefill_tokens:
        pairs = setup.prompts * setup.per_prompt * (setup.per_prompt + 1) / 2
        assert all(seen.prefill_pairs == pairs for seen in device.seen)


def test_a_busy_machine_is_measured_again_and_the_quietest_series_counts() -> None:
    delays = iter([0, 5, 9, 0, 7, 3, 0, 0, 0])  # seconds, by which somebody holds a step up

    class Disturbed(KnownDevice):
        def launch(self, plan: StepPlan) -> SimpleNamespace:
            self.now += next(delays, 0)
            return super().launch(plan)

    device = Disturbed(TRUE)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    timer = StepTimer(device, config, 100, 8, 50, SMALL, device.clock)  # type: ignore[arg-type]
    features, ms = timer.measure(Setup("decode", num_decodes=2, kv_len=16))
    assert ms == pytest.approx(TRUE.step_ms(features)) and len(device.seen) == 9


@pytest.mark.parametrize(
    "sizes", [GPU, GPU_QUICK, CPU, CPU_QUICK, SMALL], ids=["gpu", "gpu-q", "cpu", "cpu-q", "small"]
)
@pytest.mark.parametrize("phases", [PHASES, ("prefill",), ("decode",)], ids=["both", "prefill", "decode"])
def test_a_sweep_stays_within_the_limits(sizes: Sizes, phases: tuple[str, ...]) -> None:
    limits = Limits(max_num_seqs=24, max_prefill_tokens=300, max_model_len=900, pool_tokens=9000)
    setups = plan_sweep(sizes, limits, phases)
    assert setups and setups == plan_sweep(sizes, limits, phases) != plan_sweep(sizes, limits, phases, seed=1)
    for setup in setups:
        assert fits(setup, limits, sizes.rounds)
        assert setup.prefill_tokens + setup.num_decodes <= 300 and setup.num_decodes <= 24
        assert ("decode" in phases) or setup.num_decodes == 0
        assert ("prefill" in phases) or setup.prefill_tokens == 0
    assert sum(setup.held_out for setup in setups) == sizes.held_out


def test_sweeps_of_a_gpu_hold_out_enough() -> None:
    limits = Limits(256, 2048, 40960, 640_000)
    for sizes in (GPU, GPU_QUICK):
        setups = plan_sweep(sizes, limits)
        assert sum(setup.held_out for setup in setups) >= 40
        assert {setup.kind for setup in setups} == {"prefill", "chunk", "decode", "mixed", "random"}


# --- on a real engine --------------------------------------------------------------------------------------------


@pytest.fixture
def llm(tiny) -> Iterator[LLM]:
    with LLM(tiny, num_blocks=200, block_size=8, max_num_seqs=16, max_num_batched_tokens=64, use_tqdm=False) as made:
        yield made


def test_profile_of_a_real_device(llm: LLM, tmp_path: Path) -> None:
    prompt, params = list(range(1, 60)), SamplingParams(temperature=0.0, max_tokens=4)
    before = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.block_manager.peek_prefix(prompt) > 0
    profile = profile_device(llm, quick=True, link_gb_s=12.5, link="pinned relay", use_tqdm=False, command="test")
    assert profile.model == "tiny" and profile.dtype == "float32" and profile.device.startswith("CPU")
    assert profile.alpha_ms_per_token > 0 and profile.beta_ms > 0 and profile.gamma_ms_per_token >= 0
    assert (profile.bandwidth_gb_s, profile.link) == (12.5, "pinned relay")
    assert profile.kv_bytes_per_token == llm.config.kv_bytes_per_token(4)
    assert set(profile.quality) == {"alpha", "beta", "gamma", "whole device"}
    assert profile.quality["whole device"].num_held_out == CPU_QUICK.held_out
    assert load_profile(profile.save(tmp_path / "p.json")) == load_profile(tmp_path / "p.json")
    # The noise in the pool must not reach anybody: the cached prefix is gone, and the tokens are the same.
    assert llm.block_manager.peek_prefix(prompt) == 0
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == before


def test_an_engine_that_is_busy_is_not_profiled(llm: LLM) -> None:
    llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
    llm.engine.step()
    with pytest.raises(ConfigError, match=r"1 of its 200 blocks are in use, 0 may be"):
        profile_device(llm, quick=True, use_tqdm=False)
    assert llm.engine.scheduler.has_unfinished


def test_limits_that_leave_nothing_to_measure() -> None:
    device = KnownDevice(TRUE)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8)
    with pytest.raises(ConfigError, match="nothing to measure on whole device"):
        measure_place(device, config, BlockManager(1, 8), vocab_size=9, clock=device.clock)  # type: ignore[arg-type]


def test_workers_are_measured_alone_and_beside_each_other(tiny) -> None:
    with Cluster.build(
        tiny, prefill=["cpu"], decode=["cpu"], num_blocks=100, max_num_seqs=8, max_num_batched_tokens=64, use_tqdm=False
    ) as cluster:
        few = replace(SMALL, prefill=(8, 16), kv_lens=(16,), random=2, held_out=2, steps=1)
        points = measure_cluster(cluster, sizes=few, use_tqdm=False)
        names = {worker.name: worker.role for worker in cluster.workers}
        assert all(w.block_manager.num_free_blocks == 100 for w in cluster.workers)
    assert {point.place for point in points} == {name + busy for name in names for busy in ("", BUSY)}
    for point in points:
        role = names[point.place.removesuffix(BUSY)]
        assert (point.features.num_decodes == 0) == (role == "prefill")
        assert (point.features.prefill_tokens == 0) == (role == "decode")


def test_the_link_is_probed(llm: LLM) -> None:
    report = measure_link(llm, "cpu")
    assert report.verified and report.gb_s is not None and report.gb_s > 0


def test_splits_are_read_and_nonsense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanopd.costmodel.places.gpu_sms", lambda: {"cuda:0": 132, "cuda:1": 132})
    gpu = torch.device("cuda:1")
    ((decode, prefill),) = split_specs(gpu, ["48/84"])
    assert (str(decode), str(prefill)) == ("cuda:1/sm=48", "cuda:1/sm=84")
    assert str(split_specs(torch.device("cuda"), ["8/8"])[0][0]) == "cuda:0/sm=8"
    for wrong in ("48", "0/84", "48/84/2", "a/b", ""):
        with pytest.raises(ConfigError, match="such as 48/84"):
            split_specs(gpu, [wrong])
    with pytest.raises(ConfigError, match="132"):
        split_specs(gpu, ["100/40"])
    with pytest.raises(ConfigError, match="cpu"):
        split_specs(torch.device("cpu"), ["1/1"])


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sub" / "p.json"
    assert run(["profile", "--model", "dummy:tiny", "--device", "cpu", "--quick", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "alpha" in said.out and "pair_ms" in said.out and "held-out points" in said.out and str(out) in said.out
    profile = load_profile(out)
    assert all(f"warning: {warning}" in said.err for warning in profile.warnings)
    assert profile.environment["command"].startswith("nanopd profile") and profile.bandwidth_gb_s is None
    assert json.loads(out.read_text())["points"][0][0] == "kind"


def test_a_command_that_fails_leaves_no_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    assert run(["profile", "--model", "dummy:nothing", "--device", "cpu", "--out", str(out)]) != 0
    assert not out.exists() and "nothing" in capsys.readouterr().err
    assert run(["profile", "--device", "cpu", "--split", "48", "--out", str(out)]) == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "no regular file"),  # to open it would wait for a reader for ever
        (Path.mkdir, "is a folder"),
        (lambda path: path.parent.joinpath("p.json").symlink_to(path.parent / "file" / "x"), "cannot be written"),
    ],
    ids=["pipe", "folder", "link"],
)
def test_a_place_that_is_no_file_is_refused_before_the_measurement(
    make: Callable[[Path], None], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "p.json"
    make(out)
    assert run(["profile", "--model", "dummy:nothing", "--device", "cpu", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1
