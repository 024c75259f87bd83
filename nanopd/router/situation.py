"""An imagined system with one worker of each role, for explaining decisions and drawing maps of them."""

from __future__ import annotations

from dataclasses import dataclass

from nanopd.costmodel.checks import check_count, check_number, shown
from nanopd.costmodel.hardware_profile import WHOLE, HardwareProfile
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role

_LONGEST = 1 << 24  # tokens: far beyond every model, and still quick to write down
_POOL = 1 << 22  # blocks, where the profile does not say how many there are: memory is then no limit


@dataclass(frozen=True, slots=True)
class Situation:
    """Both paths with the same load, so that the comparison is about the paths.

    * ``context``: KV tokens of each request that decodes.
    * ``waiting_tokens``: prompt tokens that wait on the collocated worker, and as many on the prefill worker.
    * ``prefill_place``, ``decode_place``: keys of step-time models, such as "sm=84"; the collocated worker has the
      whole device.

    Raises ConfigError, naming field and value, for what is no int, negative, or beyond 2^24.
    """

    profile: HardwareProfile
    context: int = 1024
    waiting_tokens: int = 0
    prefill_place: str = WHOLE
    decode_place: str = WHOLE
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        for name, least in (("context", 0), ("waiting_tokens", 0), ("max_num_seqs", 1)):
            check_count(name, getattr(self, name), least=least, most=_LONGEST)

    @property
    def compared(self) -> str:
        """In words, what each path has: devices are not equally many unless both places are parts of one."""
        if self.prefill_place == self.decode_place == WHOLE:
            return "1 whole device for both phases, against 2: one for prefill, one for decode"
        prefill, decode = (
            "a whole device" if place == WHOLE else place for place in (self.prefill_place, self.decode_place)
        )
        return f"1 whole device for both phases, against {prefill} for prefill and {decode} for decode"

    def at_load(self, load: int) -> Snapshot:
        """``load`` requests decode on the collocated worker, and as many on the decode worker."""
        check_count("load", load, most=_LONGEST)
        return Snapshot(
            now=0.0,
            workers=(
                self._worker(Role.COLLOCATED, WHOLE, load, self.waiting_tokens),
                self._worker(Role.PREFILL, self.prefill_place, 0, self.waiting_tokens),
                self._worker(Role.DECODE, self.decode_place, load),
            ),
            backlog_requests=0,
            backlog_tokens=0,
            transfers=0,
            transfer_bytes=0,
            kv_bytes_per_token=self.profile.kv_bytes_per_token,
            link_gb_s=self.profile.bandwidth_gb_s,
        )

    def _worker(self, role: Role, place: str, load: int, waiting_tokens: int = 0) -> WorkerSnapshot:
        block_size = self.profile.block_size or 16
        total = self.profile.num_blocks or _POOL
        used = load * -(-self.context // block_size)
        return WorkerSnapshot(
            name=role.value,
            role=role,
            profile=place,
            num_waiting=int(waiting_tokens > 0),
            waiting_tokens=waiting_tokens,
            num_running=load,
            running_tokens=load * self.context,
            free_blocks=max(total - used, 0),
            total_blocks=total,
            block_size=block_size,
            free_seats=max(self.max_num_seqs - load, 0),
            step_started=None,
        )


def imagined_request(prompt_tokens: int, output_tokens: float) -> Request:
    """A request of this size. Raises ConfigError for an empty prompt or output, or one beyond ``_LONGEST``."""
    for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        check_number(name, value, least=1.0, unit="tokens")
        if value > _LONGEST:
            raise ConfigError(f"{name} must be at most {_LONGEST:,}, got {shown(value)}")
    check_count("prompt_tokens", prompt_tokens)
    return Request("request", [0] * prompt_tokens, SamplingParams(max_tokens=max(1, round(output_tokens))))
