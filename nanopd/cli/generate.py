"""``nanopd generate``: tokens to the terminal as they come. The text goes to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanopd.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from nanopd.engine.outputs import RequestMetrics, RequestOutput
    from nanopd.engine.sampling_params import SamplingParams
    from nanopd.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Places:
    """Where workers run, as device specs with commas between them; all None: one engine on one device.

    ``processes``: each of them in a process of its own.
    """

    collocated: str | None = None
    prefill: str | None = None
    decode: str | None = None
    processes: bool = False

    def __bool__(self) -> bool:
        return any((self.collocated, self.prefill, self.decode))


def stream_to_terminal(
    prompt: str,
    params: SamplingParams,
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    chat: bool,
    stats: bool,
    places: Places = Places(),
) -> None:
    """Loads the model and shows the samples: a single one as it grows, several when all are finished.

    Raises:
        NanoPDError: the model cannot be loaded or the request is refused.
    """
    if places:
        _on_workers(prompt, params, places, model=model, device=device, dtype=dtype, chat=chat, stats=stats)
        return
    if places.processes:
        raise ConfigError("--processes is about workers: name some with --collocated, or --prefill and --decode")
    from nanopd.engine.llm import LLM

    llm = LLM(model, device=device, dtype=dtype)
    with llm.engine.stream(_prompt(llm.tokenizer, llm.config.name, prompt, chat), params) as outputs:
        _show(outputs, params, stats)


def _on_workers(
    prompt: str,
    params: SamplingParams,
    places: Places,
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    chat: bool,
    stats: bool,
) -> None:
    """On the workers that ``places`` names: prefill and decode apart if both have some."""
    from nanopd.router.policies import make_policy
    from nanopd.router.server import Server
    from nanopd.workers.cluster import Cluster
    from nanopd.workers.spec import parse_devices

    if device is not None:
        raise ConfigError(f"--device {device} cannot go with --collocated, --prefill and --decode, which say it all")
    collocated, prefill, decode = (
        [] if text is None else parse_devices(text) for text in (places.collocated, places.prefill, places.decode)
    )
    apart = bool(prefill and decode)
    with Cluster.build(
        model, dtype=dtype, collocated=collocated, prefill=prefill, decode=decode, processes=places.processes
    ) as cluster:
        if stats:
            print(cluster.describe(), file=sys.stderr)
        with Server.of(cluster, make_policy("disaggregated" if apart else "collocated")) as server:
            text = _prompt(cluster.tokenizer, cluster.config.name, prompt, chat)
            _show(server.stream(text, params), params, stats)


def _show(outputs: Iterable[RequestOutput], params: SamplingParams, stats: bool) -> None:
    last: RequestOutput | None = None
    shown = 0
    for last in outputs:
        if params.n == 1:
            text = last.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    if last is None:
        return
    if params.n == 1:
        print()
    else:
        for sample in last.outputs:
            print(f"--- sample {sample.index} ({sample.finish_reason})\n{sample.text}")
    if stats and last.metrics is not None:
        print(describe(last.metrics, len(last.prompt_token_ids)), file=sys.stderr)


def describe(metrics: RequestMetrics, prompt_tokens: int) -> str:
    """One line: how many tokens, how long to the first one, how long for each other."""
    parts = [f"{prompt_tokens} prompt tokens", f"{metrics.num_output_tokens} generated"]
    if metrics.ttft is not None:
        parts.append(f"first after {metrics.ttft * 1e3:.0f} ms")
    if metrics.tpot:
        parts.append(f"then {metrics.tpot * 1e3:.1f} ms each ({1 / metrics.tpot:.1f} per second)")
    return "[" + ", ".join(parts) + "]"


def _prompt(tokenizer: Tokenizer | None, model: str, prompt: str, chat: bool) -> str | list[int]:
    if tokenizer is None:
        raise InvalidRequestError(f"{model} has no tokenizer (random weights have none): it cannot read or write text")
    if not chat:
        return prompt
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(text, add_special_tokens=False)
