"""How a user writes where workers run, and what is decided from it before any device is touched."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanopd.errors import ConfigError, CudaUnavailableError
from nanopd.workers.partition import partition_device, plan_split, split_sms
from nanopd.workers.pools import placements, plan_pools
from nanopd.workers.spec import DeviceSpec, check_specs, parse_devices
from nanopd.workers.worker import Role

SPECS = {
    "cpu": DeviceSpec("cpu"),
    "cpu/cores=0": DeviceSpec("cpu", cores=(0,)),
    "cpu/cores=0-3+6": DeviceSpec("cpu", cores=(0, 1, 2, 3, 6)),
    "cuda:1": DeviceSpec("cuda:1"),
    "cuda:0/sm=84": DeviceSpec("cuda:0", num_sms=84),
    "cuda:0/sm=84/cores=2+4": DeviceSpec("cuda:0", num_sms=84, cores=(2, 4)),
}


@pytest.mark.parametrize("text", SPECS)
def test_a_spec_is_read_and_written_back(text: str) -> None:
    assert DeviceSpec.parse(text) == SPECS[text]
    assert str(SPECS[text]) == text


def test_other_ways_to_write_the_same() -> None:
    assert str(DeviceSpec.parse(" cuda/sm=8 ")) == "cuda:0/sm=8"
    assert str(DeviceSpec.parse("cuda:01")) == "cuda:1"
    assert str(DeviceSpec.parse("cpu/cores=6+0+2+1")) == "cpu/cores=0-2+6"
    assert str(DeviceSpec.parse("cuda:0/cores=1/sm=8")) == "cuda:0/sm=8/cores=1"
    assert DeviceSpec.parse(SPECS["cpu"]) is SPECS["cpu"]


@given(
    st.builds(
        DeviceSpec,
        st.integers(0, 99).map(lambda i: f"cuda:{i}"),
        st.none() | st.integers(1, 200),
        st.none() | st.sets(st.integers(0, 99), min_size=1).map(tuple),
    )
)
def test_every_spec_round_trips(spec: DeviceSpec) -> None:
    assert DeviceSpec.parse(str(spec)) == spec
    assert parse_devices(f"{spec}, cpu,{spec}") == [spec, DeviceSpec("cpu"), spec]


BAD = {
    "": "'' is none",
    "gpu": "'gpu'",
    "cuda:": "'cuda:'",
    "cuda:x": "'cuda:x'",
    "cuda:-1": "'cuda:-1'",
    "cuda:٣": "cuda:",
    "cpu:0": "'cpu:0'",
    "cpu/sm=8": "only a GPU has SMs",
    "cuda:0/sms=8": "'sms=8'",
    "cuda:0/sm": "'sm'",
    "cuda:0/": "''",
    "cuda:0/sm=": "''",
    "cuda:0/sm=0": "at least 1, got 0",
    "cuda:0/sm=-8": "'-8'",
    "cuda:0/sm=4.5": "'4.5'",
    "cuda:0/sm=8_0": "'8_0'",
    "cuda:0/sm=8/sm=8": "gives sm twice",
    "cpu/cores=": "''",
    "cpu/cores=3-1": "'3-1'",
    "cpu/cores=0-999999999": "4096 at most",
    "cpu/cores=0-2+2": "2 are listed twice",
    "cpu/cores=a": "'a'",
    "cpu/cores=0,1": "'0,1'",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text.encode("unicode_escape").decode() or "empty")
def test_a_bad_spec_is_refused_with_the_value_and_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeviceSpec.parse(text)
    assert BAD[text] in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        ("cpu", None, ()),
        ("cpu", None, 5),
        ("cpu", None, (-1,)),
        ("cpu", None, (True,)),
        ("cuda:0", True),
        ("cuda:0", 8.0),
        (0,),
        (None,),
    ],
    ids=str,
)
def test_a_spec_made_by_hand_is_checked_too(values: tuple) -> None:
    with pytest.raises(ConfigError):
        DeviceSpec(*values)


@pytest.mark.parametrize("text", ["cuda:0,", ",cpu", "cuda:0,,cuda:1", None, ["cpu"]], ids=str)
def test_lists_with_holes_are_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_devices(text)  # type: ignore[arg-type]


def test_lists() -> None:
    assert parse_devices("cuda:1,cuda:3") == [DeviceSpec("cuda:1"), DeviceSpec("cuda:3")]
    assert parse_devices(" ") == []


# --- side by side ----------------------------------------------------------------------------------------------


def check(text: str, cores: set[int] | None = None) -> None:
    check_specs(parse_devices(text), num_sms={"cuda:0": 132, "cuda:1": 132}, cores=cores)


def test_workers_that_can_live_side_by_side() -> None:
    check("cuda:0/sm=48,cuda:0/sm=84,cuda:1,cuda:0,cpu")
    check("cpu/cores=0,cpu/cores=1-3", {0, 1, 2, 3})
    check("cpu/cores=0,cpu/cores=1-3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:0/sm=64,cuda:0/sm=84", "64 + 84 SMs were asked for on cuda:0, which has 132"),
        ("cuda:0/sm=133", "133 SMs"),
        ("cuda:2", "'cuda:2' was asked for; GPUs that this process sees: cuda:0, cuda:1"),
        ("cpu/cores=0-2,cpu/cores=2-3", "core 2 is given to two workers, cpu/cores=0-2 and cpu/cores=2-3"),
        ("cpu/cores=0-1,cuda:0/cores=1", "core 1"),
        ("cpu/cores=7", "core 7 of cpu/cores=7 is not among those of this process: 0-3"),
    ],
    ids=str,
)
def test_workers_that_cannot(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(text, {0, 1, 2, 3})
    assert words in str(caught.value)


# --- SMs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "plan"),
    [
        ([48, 84], [48, None]),
        ([84, 48], [None, 48]),
        ([84], [None, 48]),  # the rest, once 48 are set aside
        ([48], [48]),
        ([132], [None]),
        ([32, 32, 68], [32, 32, None]),
        ([48, 80], [48, 80]),
        ([], []),
    ],
    ids=str,
)
def test_a_split_of_132_sms_in_groups_of_8(counts: list[int], plan: list[int | None]) -> None:
    assert plan_split(counts, 132, 8, 8) == plan


@pytest.mark.parametrize(
    "counts", [[49], [48, 83], [84, 84], [48, 49, 35], [4], [44, 88, 8], [0], [True], [8.0]], ids=str
)
def test_splits_that_the_hardware_cannot_make(counts: list[int]) -> None:
    with pytest.raises(ConfigError):
        plan_split(counts, 132, 8, 8)


def test_the_refusal_names_possible_counts() -> None:
    with pytest.raises(ConfigError, match=r"8, 16, 24, … \(multiples of 8\), and for one of them the rest: 132 less"):
        plan_split([50], 132, 8, 8)


def test_a_plan_uses_each_sm_once_and_whatever_the_plan_refuses_has_none() -> None:
    """Against brute force: one count at most is made of the rest of the device, the others and what is spare of 8s."""
    total, group = 36, 8
    for counts in itertools.product(range(1, 40), repeat=2):
        odd = [count for count in counts if count % group]
        possible = sum(counts) <= total and min(counts) >= group
        possible &= not odd or (len(odd) == 1 and (total - sum(counts)) % group == 0)
        try:
            plan = plan_split(counts, total, group, group)
        except ConfigError:
            assert not possible, counts
            continue
        assert possible, counts
        whole = [size for size in plan if size is not None]
        assert all(size % group == 0 for size in whole)
        assert [size or total - sum(whole) for size in plan][:2] == list(counts)


class FakeSms:
    """SMs as cuda.core hands them out: a set of numbers, split by one of the driver's two calls."""

    def __init__(self, sms: list[int], *, structured: bool, most_groups: int = 99) -> None:
        self.sms, self.structured, self.most_groups = sms, structured, most_groups

    @property
    def sm_count(self) -> int:
        return len(self.sms)

    def split(self, options: list[int]) -> tuple[list[FakeSms], FakeSms]:
        if not self.structured and len(set(options)) > 1:
            raise NotImplementedError("per-group counts need CUDA 13.1")
        ends = [0, *itertools.accumulate(options[: self.most_groups])]
        parts = [self.sms[a:b] for a, b in [*itertools.pairwise(ends), (ends[-1], len(self.sms))]]
        *groups, rest = (FakeSms(part, structured=self.structured) for part in parts)
        return groups, rest


@pytest.mark.parametrize("structured", [True, False], ids=["cuda13.1", "older"])
@pytest.mark.parametrize(
    "counts", [[48, 84], [84, 48], [84], [132], [16, 24, 32, 60], [24, 24, 84], [48, 80], [8]], ids=str
)
def test_every_partition_gets_its_sms_from_one_split(counts: list[int], structured: bool) -> None:
    """Older drivers make groups of one size: several of them then make a partition."""
    whole = FakeSms(list(range(132)), structured=structured)
    made = split_sms(whole, plan_split(counts, 132, 8, 8), lambda count: count)[: len(counts)]
    sets = [{sm for part in parts for sm in part.sms} for parts in made]
    assert [sum(part.sm_count for part in parts) for parts in made] == [len(sms) for sms in sets] == counts
    assert len(set().union(*sets)) == sum(counts)


@pytest.mark.parametrize("counts", [[16, 16, 16], [16, 24, 32]], ids=str)
def test_a_driver_that_makes_fewer_groups_is_refused(counts: list[int]) -> None:
    whole = FakeSms(list(range(132)), structured=False, most_groups=2)
    with pytest.raises(ConfigError, match="the driver makes only 2"):
        split_sms(whole, counts, lambda count: count)


def test_partitions_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="only a GPU has SMs to divide, cpu is none"):
        partition_device("cpu", [8])
    if not torch.cuda.is_available():
        with pytest.raises(CudaUnavailableError):
            partition_device("cuda", [8])


# --- pools -----------------------------------------------------------------------------------------------------


def pools_of(shared: bool | None, **roles: list[str]) -> list[tuple[list[str], float]]:
    where = placements(*(roles.get(role, []) for role in ("collocated", "prefill", "decode")))
    return [([member.name for member in pool.members], pool.share) for pool in plan_pools(where, shared)]


def test_prefill_and_decode_on_one_device_share_a_pool() -> None:
    one_card = {"prefill": ["cuda:0/sm=84"], "decode": ["cuda:0/sm=48"]}
    assert pools_of(None, **one_card) == pools_of(True, **one_card) == [(["prefill0", "decode0"], 1.0)]
    assert pools_of(False, **one_card) == [(["prefill0"], 0.25), (["decode0"], 0.75)]


def test_pools_of_several_devices() -> None:
    roles = {"collocated": ["cuda:0"], "prefill": ["cuda:1", "cuda:0"], "decode": ["cuda:2", "cuda:0"]}
    assert [names for names, _ in pools_of(None, **roles)] == [
        ["collocated0"], ["prefill0"], ["prefill1"], ["decode0"], ["decode1"],
    ]  # fmt: skip
    assert [share for _, share in pools_of(None, **roles)] == [3 / 7, 1.0, 1 / 7, 1.0, 3 / 7]
    assert pools_of(True, **roles) == [
        (["collocated0", "prefill1", "decode1"], 1.0),
        (["prefill0"], 1.0),
        (["decode0"], 1.0),
    ]


@pytest.mark.parametrize("shared", [None, False, True])
def test_the_shares_of_a_device_add_up_to_one(shared: bool | None) -> None:
    where = placements(["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"], ["cuda:1", "cuda:0"])
    pools = plan_pools(where, shared)
    for device in ("cuda:0", "cuda:1"):
        assert sum(pool.share for pool in pools if pool.device == device) == pytest.approx(1.0)
    assert sorted(member.name for pool in pools for member in pool.members) == sorted(w.name for w in where)


def test_a_lone_collocated_worker_and_a_name_for_everybody() -> None:
    assert pools_of(None, collocated=["cpu"]) == [(["collocated0"], 1.0)]
    where = placements(["cpu"], ["cpu", "cpu"], ["cpu"])
    assert [(w.name, w.role) for w in where] == [
        ("collocated0", Role.COLLOCATED),
        ("prefill0", Role.PREFILL),
        ("prefill1", Role.PREFILL),
        ("decode0", Role.DECODE),
    ]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (((), (), ()), "at least one worker"),
        (((), ["cpu"], ()), "prefill workers need at least one decode worker"),
        ((["cpu"], (), ["cpu"]), "decode workers need at least one prefill worker"),
        (((), "cpu", ["cpu"]), "prefill is a list of devices, got 'cpu'"),
    ],
    ids=["none", "prefill", "decode", "text"],
)
def test_clusters_that_make_no_sense(roles: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placements(*roles)


@pytest.mark.parametrize("shared", [0, "yes"], ids=str)
def test_shared_pool_is_a_bool_or_none(shared: object) -> None:
    with pytest.raises(ConfigError, match="shared_pool"):
        plan_pools(placements(["cpu"], [], []), shared)  # type: ignore[arg-type]


def test_specs_and_pools_need_no_torch() -> None:
    code = (
        "import sys, nanopd.workers.spec, nanopd.workers.pools, nanopd.workers.worker; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
