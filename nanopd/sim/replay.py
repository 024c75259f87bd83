"""Replay: a recorded run once more, through fresh schedulers, block managers, policy and central scheduler.

A replay that comes to another decision anywhere shows it as the first event that differs. That proves two things: the
simulator runs the code that served, and a run depends on nothing but what the recording holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from nanopd.engine.detokenizer import Tokenizer
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import NanoPDError, NonFiniteLogitsError, RecordingError, SimulationError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.router.central import CentralConfig, CentralScheduler, Event, Predictor, WorkerStep
from nanopd.router.decision import Policy
from nanopd.router.policies import make_policy
from nanopd.sim.recording import Recording, Row
from nanopd.workers.worker import CollocatedWorker, DecodeWorker, PrefillWorker, Role, Worker


def replay(
    recording: Recording,
    policy: Policy | None = None,
    *,
    predictor: Predictor | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[Event]:
    """Make all recorded calls again, and compare the events one by one. Returns them.

    Args:
        policy: as in the run; None: the one of the recorded name, without options.
        predictor: a fresh one of the run's kind, if it had one.
        tokenizer: the run's, if stop strings ended requests in it.

    Raises:
        SimulationError: an event differs; the message has both.
        RecordingError: the recording is incomplete, or needs a tokenizer.
    """
    run = _Run(recording, policy, predictor, tokenizer)
    for number, row in enumerate(recording.calls):
        try:
            run.make(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise RecordingError(f"call {number} of the recording is damaged: {row!r:.200}") from error
    check_equal_events(recording.events, run.events)
    return run.events


def check_equal_events(recorded: Sequence[Event], repeated: Sequence[Event]) -> None:
    """Raise SimulationError at the first event that differs."""
    for number, (first, second) in enumerate(zip_longest(recorded, repeated)):
        if first != second:
            raise SimulationError(f"event {number} differs: the run had {first}, the replay has {second}")


class _Run:
    """Fresh workers and central scheduler, and the steps in flight."""

    def __init__(
        self, recording: Recording, policy: Policy | None, predictor: Predictor | None, tokenizer: Tokenizer | None
    ) -> None:
        setup = recording.setup
        self.events: list[Event] = []
        self._tokenizer = tokenizer
        self._steps: dict[str, WorkerStep] = {}
        self.central = CentralScheduler(
            build_workers(setup),
            policy or make_policy(setup["policy"]),
            config=CentralConfig(**setup["config"]),
            links=[(source, destination) for source, destination in setup["links"]],
            predictor=predictor,
            tokenizer=tokenizer,
            kv_bytes_per_token=setup["kv_bytes_per_token"],
            link_gb_s=setup["link_gb_s"],
            observe=self.events.append,
        )

    def make(self, row: Row) -> None:
        """One call, and what drivers do after each."""
        try:
            getattr(self, "_" + row["call"])(row, row["now"])
        except (SimulationError, RecordingError):
            raise
        except NanoPDError as error:
            if row.get("raised") != type(error).__name__:
                raise SimulationError(f"the replay refused what the run did: {row!r:.200}") from error
        else:
            if "raised" in row:
                raise SimulationError(f"the run refused what the replay did: {row!r:.200}")
        self.central.take_handoffs()
        self.central.take_cancelled()
        self.central.take_awake()
        self.central.desk.run_callbacks()

    def _submit(self, row: Row, now: float) -> None:
        params = SamplingParams(**{**row["params"], "stop": tuple(row["params"]["stop"])})
        if params.stop and self._tokenizer is None:
            raise RecordingError(f"request {row['parent']!r} has stop strings: give the run's tokenizer")
        sequences = [
            Request(
                name,
                row["prompt"],
                params,
                sample_index=index,
                parent_id=row["parent"],
                arrival_time=row["arrival"],
                eos_token_ids=row["stop_ids"],
            )
            for index, name in enumerate(row["names"])
        ]
        for request in sequences:
            request.stop_ids = frozenset(row["stop_ids"])
        self.central.submit(sequences, now, stream=row["stream"], on_output=lambda output: None)

    def _abort(self, row: Row, now: float) -> None:
        self.central.abort(row["request"], now)

    def _begin_step(self, row: Row, now: float) -> None:
        step = self.central.begin_step(self.central.workers[row["worker"]], now)
        if step is not None:
            self._steps[row["worker"]] = step

    def _finish_step(self, row: Row, now: float) -> None:
        self.central.finish_step(self._step(row), row["tokens"], now)

    def _fail_step(self, row: Row, now: float) -> None:
        self.central.fail_step(self._step(row), _error(row), now)

    def _step(self, row: Row) -> WorkerStep:
        if row["worker"] not in self._steps:
            raise SimulationError(f"the run ended a step of {row['worker']} at {row['now']}, the replay began none")
        return self._steps.pop(row["worker"])

    def _worker_failed(self, row: Row, now: float) -> None:
        self.central.worker_failed(self.central.workers[row["worker"]], _error(row), now)

    def _transfer_done(self, row: Row, now: float) -> None:
        self.central.transfer_done(row["transfer"], now)

    def _transfer_failed(self, row: Row, now: float) -> None:
        self.central.transfer_failed(row["transfer"], _error(row), now)

    def _tick(self, row: Row, now: float) -> None:
        self.central.tick(now)

    def _close(self, row: Row, now: float) -> None:
        self.central.close(now)


def build_workers(setup: Mapping[str, Any]) -> list[Worker]:
    """Workers as ``nanopd.sim.recording.describe`` found them, without runners; pools are shared as they were."""
    pools = []
    for made in setup["pools"]:
        pool = BlockManager(made["num_blocks"], made["block_size"], enable_prefix_caching=made["prefix_caching"])
        pool.watermark_blocks = made["watermark_blocks"]
        pools.append(pool)
    return [_build_worker(made, pools[made["pool"]]) for made in setup["workers"]]


def _build_worker(made: Mapping[str, Any], pool: BlockManager) -> Worker:
    role = Role(made["role"])
    classes: dict[Role, type[Worker]] = {Role.COLLOCATED: CollocatedWorker, Role.PREFILL: PrefillWorker}
    options: dict[str, Any] = {"profile": made["profile"]}
    if role is Role.DECODE and made["takes_prompts"]:
        options["takes_prompts"] = True
    scheduler = Scheduler(SchedulerConfig(**made["scheduler"]), pool)
    fingerprint = LayoutFingerprint(**made["fingerprint"])
    return classes.get(role, DecodeWorker)(made["name"], scheduler, None, fingerprint, **options)


def _error(row: Row) -> BaseException:
    """An error of the recorded type's name, since events name types."""
    if row["error"] == NonFiniteLogitsError.__name__:
        return NonFiniteLogitsError(row["message"], tuple(row["guilty"]))
    made: BaseException = type(row["error"], (Exception,), {})(row["message"])
    return made
