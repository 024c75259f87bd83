"""Stand-ins for the serving benchmark's tests: a server with a service time on a clock that only they turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nanopd.bench.records import Outcome, RequestRecord
from nanopd.bench.workload import Schedule
from nanopd.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanopd.engine.request import FinishReason
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import PromptTooLongError


class VirtualClock:
    """Time passes only when somebody waits or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def final_output(name: str, arrival: float, first: float, gap: float, tokens: int) -> RequestOutput:
    last = first + gap * (tokens - 1)
    metrics = RequestMetrics(
        arrival_time=arrival,
        first_scheduled_time=arrival,
        first_token_time=first,
        last_token_time=last,
        finished_time=last,
        num_output_tokens=tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        tpot=gap if tokens > 1 else None,
        second_token_gap=gap if tokens > 1 else None,
    )
    sample = CompletionOutput(0, "", list(range(tokens)), FinishReason.LENGTH)
    return RequestOutput(name, None, [0], [sample], finished=True, metrics=metrics)


@dataclass
class BlockingServer:
    """The worst client's view: ``add_request`` returns when the request is done, ``service_s`` later."""

    clock: VirtualClock
    service_s: float
    gap_s: float = 0.001
    max_prompt: int = 10**9
    prompts: list[list[int]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_time: float,
        stream: bool,
        on_output: Callable[[RequestOutput], None],
    ) -> str:
        if len(prompt) > self.max_prompt:
            raise PromptTooLongError(f"{len(prompt)} tokens, limit {self.max_prompt}")
        self.prompts.append(prompt)
        self.arrivals.append(arrival_time)
        self.clock.wait(self.service_s)
        on_output(final_output(request_id, arrival_time, self.clock(), self.gap_s, params.max_tokens))
        return request_id

    def abort(self, request_id: str) -> None:
        raise AssertionError("a request that is done was aborted")


def single_server(schedule: Schedule, service_s: float, gap_s: float = 0.01) -> list[RequestRecord]:
    """What a first-come-first-served server makes of a schedule: Lindley's recursion, no thread and no clock."""
    free, records = 0.0, []
    for a in schedule.arrivals:
        free = max(free, a.time_s) + service_s
        ttft = free - a.time_s
        e2e = ttft + gap_s * (a.output_tokens - 1)
        records.append(
            RequestRecord(
                a.index, a.time_s, a.prompt_tokens, a.output_tokens, Outcome.COMPLETED,
                lateness_s=0.0, ttft_s=ttft, tpot_s=gap_s, second_token_gap_s=gap_s, e2e_s=e2e, tokens=a.output_tokens,
            )
        )  # fmt: skip
    return records
