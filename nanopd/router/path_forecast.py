"""PathForecast: the forecasts at the workers of one path put together, every part a named term in ms.

What the request waits for at the same time counts once: a seat that is free before its turn in the queue costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nanopd.costmodel.analytical import transfer_ms
from nanopd.costmodel.estimate import Estimate
from nanopd.costmodel.features import StepFeatures
from nanopd.router.decision import Path
from nanopd.router.forecast import (
    DecodeForecast,
    Place,
    PrefillForecast,
    admission_wait_ms,
    forecast_decode,
    forecast_prefill,
)
from nanopd.router.snapshot import Snapshot
from nanopd.workers.worker import Role


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the two paths disturb each other where their workers share a card.

    ``slower``: by what share the other path slows this one; ``newly``: by what share this one will slow the other, and
    does not yet. ``requests`` are on the other path; ``steps`` are (sequences, ms) of its workers that decode.
    """

    slower: float = 0.0
    newly: float = 0.0
    requests: int = 0
    steps: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, here: Sequence[Place], there: Sequence[Place], contention: float) -> Sharing:
        """``here``, ``there``: all workers of this path and of the other."""
        requests = _requests(there)
        return cls(
            slower=contention if requests else 0.0,
            newly=0.0 if _requests(here) else contention,
            requests=requests,
            steps=tuple((p.worker.num_running, p.model.step_ms(p.decodes)) for p in there if p.worker.num_running),
        )


ALONE = Sharing()


@dataclass(frozen=True, slots=True)
class PathForecast:
    """One path through named workers: three groups of terms, all in ms.

    * ``to_first``: until the request's first token; their sum is the TTFT.
    * ``after``: from the first token to the last; divided by the steps, the TPOT. A transfer is in here, since the
      prefill worker gives the first token to the client itself.
    * ``others``: delays of other requests, summed over these.
    """

    path: Path
    places: tuple[Place, ...]
    prefill: PrefillForecast
    decode: DecodeForecast
    sharing: Sharing
    to_first: Mapping[str, float]
    after: Mapping[str, float]
    others: Mapping[str, float]

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(place.worker.name for place in self.places)

    @property
    def ttft_ms(self) -> float:
        return sum(self.to_first.values())

    @property
    def tpot_ms(self) -> float:
        return sum(self.after.values()) / max(self.decode.steps, 1.0)

    @property
    def estimate(self) -> Estimate:
        """The request's own latency and the delay of others."""
        return Estimate({**self.to_first, **self.after, **self.others})


def forecast_collocated(
    place: Place, tokens: int, output: float, snapshot: Snapshot, sharing: Sharing = ALONE
) -> PathForecast:
    """Prefill ``tokens`` and decode ``output`` of them in one worker."""
    worker = place.worker
    return _put_together(
        Path.COLLOCATED,
        (place,),
        forecast_prefill(place, tokens, snapshot.now),
        forecast_decode(place, tokens, output),
        sharing,
        wait=admission_wait_ms(place, tokens, output, worker.num_waiting, place.present_tokens),
        link={},
    )


def forecast_disaggregated(
    first: Place, second: Place, tokens: int, output: float, snapshot: Snapshot, sharing: Sharing = ALONE
) -> PathForecast:
    """Prefill at ``first``, decode at ``second``. The backlog is spread evenly over the workers of a role.

    Partitions of one card share its memory: while ``first`` is busy, ``second`` loses a share of its time.
    """
    requests, waiting = snapshot.backlog_requests, snapshot.backlog_tokens
    prefills, decodes = len(snapshot.of(Role.PREFILL)), len(snapshot.of(Role.DECODE))
    arriving = first.worker.num_waiting + snapshot.transfers
    prefill = forecast_prefill(first, tokens, snapshot.now, _share(waiting, prefills), _share(requests, prefills))
    decode = forecast_decode(second, tokens, output, arriving)
    loss = second.loss_beside(second.decodes if second.worker.num_running else StepFeatures.decode(1, tokens))
    prefill = replace(prefill, interference=loss * prefill.prefill)
    decode = replace(decode, mixing_ms=decode.mixing_ms + loss * min(prefill.before_ms, decode.decoding_ms))
    link = {
        "link queue": transfer_ms(snapshot.transfer_bytes, snapshot.link_gb_s),
        "transfer": transfer_ms(tokens * snapshot.kv_bytes_per_token, snapshot.link_gb_s),
        "joining": decode.alone_ms / 2,  # the batch is in the middle of a step, on average
    }
    return _put_together(
        Path.DISAGGREGATED,
        (first, second),
        prefill,
        decode,
        sharing,
        wait=admission_wait_ms(second, tokens, output, _share(requests, decodes), _share(waiting, decodes)),
        link=link if decode.steps else {},
    )


def _put_together(
    path: Path,
    places: tuple[Place, ...],
    prefill: PrefillForecast,
    decode: DecodeForecast,
    sharing: Sharing,
    wait: float,
    link: Mapping[str, float],
) -> PathForecast:
    decoding = decode.decoding_ms
    to_first = {
        "step in flight": prefill.in_flight,
        "queue": prefill.queue,
        "seat and blocks": max(0.0, wait - prefill.before_ms),
        "prefill": prefill.prefill,
    }
    after = {**link, "decode": decoding, "mixed with prefill": decode.mixing_ms}
    others = {
        "others wait for the prefill": prefill.interference * places[-1].worker.num_running,
        "others decode in a larger batch": decode.slower_ms * decode.steps * decode.others,
        "others queue behind": prefill.prefill * prefill.behind,
    }
    if sharing.slower:
        to_first["sharing the card, prefill"] = sharing.slower * (prefill.before_ms + prefill.prefill)
        after["sharing the card, decode"] = sharing.slower * (decoding + decode.mixing_ms)
    if sharing.newly:
        others["others share the card"] = sharing.newly * sharing.requests * (prefill.prefill + decoding)
    return PathForecast(path, places, prefill, decode, sharing, to_first, after, others)


def _requests(places: Sequence[Place]) -> int:
    return sum(place.worker.num_running + place.worker.num_waiting for place in places)


def _share(total: int, workers: int) -> int:
    return -(-total // workers)
