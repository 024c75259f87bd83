"""PendingStep: a step that has been launched, on its way from the device to the books."""

from __future__ import annotations

import torch
from torch import Tensor

from nanopd.engine.plan import StepPlan
from nanopd.errors import NonFiniteLogitsError


class PendingStep:
    """A step that has been launched, on the current stream; it may still be running."""

    def __init__(self, plan: StepPlan, tokens: Tensor | None, device: torch.device) -> None:
        """``tokens``: [number of samplers] int64 on the device, sent to the host here; None if nobody samples."""
        self.plan = plan
        self.device_tokens = tokens
        self._tokens = tokens
        self._rows: list[int] | None = None  # of the tokens; None: all
        self._ended: torch.cuda.Event | None = None
        if device.type == "cuda":
            if tokens is not None:
                self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
                self._tokens.copy_(tokens, non_blocking=True)
            self._ended = torch.cuda.Event()
            self._ended.record()

    def wait(self) -> list[list[int]]:
        """Block until the step has ended. Returns one list of tokens per chunk, aligned with its samplers.

        It waits also if nobody samples: once the books say that the step is done its blocks may be freed, and be
        written by another worker of the pool, on a stream that knows nothing of this one.

        Raises NonFiniteLogitsError, naming the requests whose logits had no finite maximum.
        """
        self.end()
        flat = [] if self._tokens is None else self._tokens.tolist()
        if self._rows is not None:
            flat = [flat[row] for row in self._rows]
        out, first = [], 0
        for chunk in self.plan.chunks:
            last = first + len(chunk.samplers)
            out.append(flat[first:last])
            first = last
        if min(flat, default=0) < 0:
            self._raise_non_finite(out)
        return out

    def end(self) -> None:
        """Block until the step has ended, whatever came of it."""
        if self._ended is not None:
            self._ended.synchronize()

    def narrow(self, plan: StepPlan, rows: list[int]) -> None:
        """It was launched with more decodes than ``plan`` has: chunk i of the plan is row ``rows[i]``."""
        self.plan = plan
        if self.device_tokens is not None and rows != list(range(len(self.device_tokens))):
            self._rows = rows

    def tokens_of(self, rows: list[int]) -> Tensor:
        """[len(rows)] int64 on the device: what was sampled for these chunks of the plan."""
        assert self.device_tokens is not None
        if self._rows is not None:
            rows = [self._rows[row] for row in rows]
        if rows == list(range(len(self.device_tokens))):
            return self.device_tokens
        return self.device_tokens[torch.tensor(rows).to(self.device_tokens.device)]

    def _raise_non_finite(self, tokens: list[list[int]]) -> None:
        bad = [
            request.request_id
            for chunk, drawn in zip(self.plan.chunks, tokens)
            for request, token in zip(chunk.samplers, drawn)
            if token < 0
        ]
        message = f"logits without a finite maximum for {len(bad)} request(s): {', '.join(bad)}"
        raise NonFiniteLogitsError(message, tuple(bad))
