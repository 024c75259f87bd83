"""``nanopd generate``: tokens to the terminal as they come. The text goes to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nanopd.errors import InvalidRequestError

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM
    from nanopd.engine.outputs import RequestMetrics, RequestOutput
    from nanopd.engine.sampling_params import SamplingParams


def stream_to_terminal(
    prompt: str,
    params: SamplingParams,
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    chat: bool,
    stats: bool,
) -> None:
    """Loads the model and shows the samples: a single one as it grows, several when all are finished.

    Raises:
        NanoPDError: the model cannot be loaded or the request is refused.
    """
    from nanopd.engine.llm import LLM

    llm = LLM(model, device=device, dtype=dtype)
    last: RequestOutput | None = None
    shown = 0
    with llm.engine.stream(_prompt(llm, prompt, chat), params) as outputs:
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


def _prompt(llm: LLM, prompt: str, chat: bool) -> str | list[int]:
    if llm.tokenizer is None:
        raise InvalidRequestError(
            f"{llm.config.name} has no tokenizer (random weights have none): it cannot read or write text"
        )
    if not chat:
        return prompt
    text = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return llm.tokenizer.encode(text, add_special_tokens=False)
