"""SimulatedCluster: the workers of ``nanopd.workers.Cluster``, of devices that need not be there.

Places are written as for the real one: ``collocated=["cuda:0"]``, ``prefill=["cuda:1/sm=84"]``. What a place can do
comes from a hardware profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanopd.bench.hardware import Hardware
from nanopd.costmodel.checks import check_count, check_number, shown
from nanopd.costmodel.hardware_profile import BUSY, HardwareProfile
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.model.presets import presets
from nanopd.router.central import CentralConfig, Predictor
from nanopd.router.decision import Policy
from nanopd.sim.devices import MOST_BLOCKS, NUM_SMS, device_blocks
from nanopd.sim.driver import VirtualDriver
from nanopd.sim.durations import StepTime, analytical, modelled, stretched
from nanopd.sim.link import Lane, SimulatedLink
from nanopd.sim.runner import SimulatedRunner
from nanopd.workers.pools import Placement, placements, plan_pools
from nanopd.workers.spec import DeviceSpec, check_specs
from nanopd.workers.worker import CollocatedWorker, DecodeWorker, PrefillWorker, Role, Worker

TURNS = 2.0  # slow-down of workers that each use a whole card: they take turns

_CLASSES: Mapping[Role, type[Worker]] = MappingProxyType(
    {Role.COLLOCATED: CollocatedWorker, Role.PREFILL: PrefillWorker, Role.DECODE: DecodeWorker}
)


@dataclass(frozen=True)
class SimulatedCluster:
    """A description, checked: `driver` builds fresh workers from it, as often as one likes.

    Attributes:
        profile: what the devices do; all are of one kind.
        collocated, prefill, decode: places of the workers.
        shared_pool: one KV pool for all workers of a device; None: if all prefill and decode workers sit on one.
        num_blocks: of every pool; None: by memory, a device's pools in the same parts as on real devices.
        memory_gb: of a device; None: what the profile measured, or what is known of the device.
        elastic: as for ``Cluster.build``: partitions grow to the whole card while alone, decode workers take prompts.
        link_gb_s: of each link between two pools; None: the profile's bandwidth.
        latency_s: of each transfer.
        bus_gb_s: of one bus that all links share; None: there is none.
        host_s: before each step of a worker, for planning, launching and bookkeeping; see ``Recording.host_seconds``.
        partition_slowdown: of a partition beside a busy one, where the profile did not measure it.

    Raises ConfigError, which names the value and what is allowed.
    """

    profile: HardwareProfile
    collocated: Sequence[str | DeviceSpec] = ()
    prefill: Sequence[str | DeviceSpec] = ()
    decode: Sequence[str | DeviceSpec] = ()
    shared_pool: bool | None = None
    num_blocks: int | None = None
    memory_gb: float | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk: int | None = None
    collocated_chunk: int | None = None
    max_model_len: int = 40_960
    enable_prefix_caching: bool = True
    elastic: bool = False
    link_gb_s: float | None = None
    latency_s: float = 0.0
    bus_gb_s: float | None = None
    host_s: float = 0.0
    partition_slowdown: float = 1.24  # decodes on 84 of an H200's 132 SMs beside a prefill

    def __post_init__(self) -> None:
        if not isinstance(self.profile, HardwareProfile):
            raise ConfigError(f"profile must be a HardwareProfile, got {shown(self.profile)}")
        for name in ("elastic", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        check_number("host_s, the host's time per step,", self.host_s, unit="seconds")
        # Also of links that this layout does not have: nobody gives a bandwidth of 0 on purpose.
        check_number("latency_s of a simulated link", self.latency_s, unit="seconds")
        for name, value in (("link_gb_s", self.link_gb_s), ("bus_gb_s", self.bus_gb_s)):
            if value is not None:
                check_number(f"{name} of a simulated link", value, above=0.0, unit="GB/s")
        check_number("partition_slowdown", self.partition_slowdown, least=1.0)
        if self.num_blocks is not None:
            check_count("num_blocks", self.num_blocks, least=1, most=MOST_BLOCKS)
        check_count("block_size", self.block_size, least=1)
        self._check_sms()
        self._build()  # what is wrong shows now

    @property
    def hardware(self) -> Hardware:
        """For the benchmark's check that strategies are compared on equal terms."""
        return Hardware.of_specs([*self.collocated, *self.prefill, *self.decode])

    def workers(self) -> list[Worker]:
        """Fresh ones, their pools empty."""
        return self._build()[0]

    def driver(
        self,
        policy: Policy,
        *,
        config: CentralConfig | None = None,
        predictor: Predictor | None = None,
        **options: Any,
    ) -> VirtualDriver:
        """A fresh driver over fresh workers. ``options``: further ones of `VirtualDriver`."""
        workers, links = self._build()
        where = self._placements()
        devices = dict.fromkeys(placement.spec.device for placement in where)
        return VirtualDriver(
            workers,
            policy,
            links=links,
            cards=[[p.name for p in where if p.spec.device == device] for device in devices],
            config=config,
            predictor=predictor,
            kv_bytes_per_token=self.profile.kv_bytes_per_token,
            link_gb_s=min((link.lane.gb_s for link in links.values()), default=None),
            host_s=self.host_s,
            **options,
        )

    # --- inside ------------------------------------------------------------------------------------------------

    def _placements(self) -> list[Placement]:
        return placements(self.collocated, self.prefill, self.decode)

    def _build(self) -> tuple[list[Worker], dict[tuple[str, str], SimulatedLink]]:
        where = self._placements()
        devices = [placement.spec.device for placement in where]
        built: dict[str, Worker] = {}
        for pool in plan_pools(where, self.shared_pool):
            manager = BlockManager(
                self._pool_blocks(pool.share), self.block_size, enable_prefix_caching=self.enable_prefix_caching
            )
            for member in pool.members:
                built[member.name] = self._worker(member, manager, devices.count(member.spec.device) > 1)
        workers = [built[placement.name] for placement in where]
        return workers, self._links(workers)

    def _check_sms(self) -> None:
        """SMs of one card are given away once, where it is known how many it has."""
        known = NUM_SMS.get(self.profile.device)
        specs = [placement.spec for placement in self._placements()]
        if known is not None:
            check_specs(specs, num_sms=dict.fromkeys((spec.device for spec in specs), known))

    def _pool_blocks(self, share: float) -> int:
        if self.num_blocks is not None:
            return self.num_blocks
        blocks = max(1, int(device_blocks(self.profile, self.block_size, self.memory_gb) * share))
        check_count("KV blocks of a simulated pool, by the memory of its device,", blocks, most=MOST_BLOCKS)
        return blocks

    def _worker(self, placement: Placement, manager: BlockManager, has_neighbours: bool) -> Worker:
        takes_prompts = self.elastic and placement.role is Role.DECODE
        mixes = takes_prompts or placement.role is Role.COLLOCATED
        chunk = self.collocated_chunk if mixes else self.prefill_chunk
        limits = SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens, chunk, self.max_model_len)
        options: dict[str, Any] = {"takes_prompts": True} if takes_prompts else {}
        return _CLASSES[placement.role](
            placement.name,
            Scheduler(limits, manager),
            self._runner(placement.spec, has_neighbours),
            self._fingerprint(),
            place=placement.spec.place,
            profile=None if placement.spec.num_sms is None else f"sm={placement.spec.num_sms}",
            **options,
        )

    def _runner(self, spec: DeviceSpec, has_neighbours: bool) -> SimulatedRunner:
        models = self.profile.step_time
        if spec.num_sms is not None:
            place = f"sm={spec.num_sms}"
            share = self._steps(place)
            busy = self._steps(place + BUSY) if place + BUSY in models else stretched(share, self.partition_slowdown)
            return SimulatedRunner(self._steps(None) if self.elastic else share, busy)
        alone = self._steps(None) if models else analytical(self.profile)
        return SimulatedRunner(alone, stretched(alone, TURNS) if has_neighbours else None)

    def _steps(self, place: str | None) -> StepTime:
        return modelled(self.profile.step_model(place))

    def _num_layers(self) -> int:
        shape = presets().get(self.profile.model.removeprefix("dummy:"))
        return shape.num_layers if shape is not None else 32

    def _fingerprint(self) -> LayoutFingerprint:
        return LayoutFingerprint(self.profile.model, self.profile.dtype, self.block_size, self._num_layers(), 1, 1)

    def _links(self, workers: Sequence[Worker]) -> dict[tuple[str, str], SimulatedLink]:
        """From every prefill to every decode worker that has another pool."""
        pairs = [
            (source.name, destination.name)
            for source in workers
            for destination in workers
            if source.role is Role.PREFILL and destination.role is Role.DECODE
            if not source.shares_pool_with(destination)
        ]
        if not pairs:
            return {}
        gb_s = self.profile.bandwidth_gb_s if self.link_gb_s is None else self.link_gb_s
        if gb_s is None:
            raise ConfigError(f"no bandwidth is known between devices of {self.profile.device!r}: give link_gb_s")
        bus = None if self.bus_gb_s is None else Lane(self.bus_gb_s)
        size = self.profile.kv_bytes_per_token * self.block_size
        return {pair: SimulatedLink(gb_s, size, self._num_layers(), self.latency_s, bus) for pair in pairs}
