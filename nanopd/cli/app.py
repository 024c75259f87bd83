"""The commands and their options. What they do stands in one file each, imported when the command runs."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

import nanopd
from nanopd.errors import NanoPDError

app = typer.Typer(
    name="nanopd",
    help="LLM inference with prefill and decode in separate places: a small engine and the course that builds it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option(help="smollm2, dummy:SHAPE, a folder, or a Hugging Face name.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="a GPU if there is one")]
DType = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.", show_default="by device")]
Workers = Annotated[str | None, typer.Option(help="Workers of this role, such as cpu, cuda:1,cuda:3 or cuda:0/sm=48.")]
Out = Annotated[Path | None, typer.Option(help="Also write the results as JSON to this file.")]


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code: 1 when something failed, 2 when the caller can fix the arguments."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode shows ? for what it lacks
            stream.reconfigure(errors="replace")
    try:
        code = _call(arguments)
        if sys.stdout is not None:  # None: the shell closed it
            sys.stdout.flush()  # a full disk shows here at the latest
        return code
    except NanoPDError as error:
        # str(KeyError) puts quotes around the message; its argument is the message.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"nanopd: {message}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    except MemoryError as error:
        print(f"nanopd: out of memory: {error}".removesuffix(": "), file=sys.stderr)
        return 1
    except BrokenPipeError:  # `nanopd ... | head`
        sys.stderr.close()
        return 1
    except OSError as error:  # a file that cannot be written, a full disk
        print(f"nanopd: {error}", file=sys.stderr)
        _drop_stuck_output()
        return 1


def _drop_stuck_output() -> None:
    """Close standard output if it cannot be written: else Python tries again at exit, and complains."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()


def _call(arguments: list[str]) -> int:
    try:
        app(args=arguments, prog_name="nanopd")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"nanopd {nanopd.__version__}")
        raise typer.Exit


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False) -> None:
    """Say what this machine has, what is missing, and the command that fixes it."""
    from nanopd.cli.doctor import report

    raise typer.Exit(report(as_json=json))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Model = "smollm2",
    device: Device = None,
    dtype: DType = None,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    n: Annotated[int, typer.Option(help="Samples; more than one are shown when they are finished.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Output limit in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string (repeatable).")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-sequence token.")] = False,
    stats: Annotated[bool, typer.Option(help="Show time to first token and time per token.")] = True,
    collocated: Workers = None,
    prefill: Workers = None,
    decode: Workers = None,
    processes: Annotated[bool, typer.Option(help="A process for each of these workers.")] = False,
) -> None:
    """Continue a prompt; tokens are shown as they come. With --prefill and --decode the two phases run apart."""
    from nanopd.cli.generate import Places, stream_to_terminal
    from nanopd.engine.sampling_params import SamplingParams

    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    places = Places(collocated, prefill, decode, processes)
    stream_to_terminal(text, params, model=model, device=device, dtype=dtype, chat=chat, stats=stats, places=places)


@app.command()
def prepare() -> None:
    """Convert the embedded model (SmolLM2-135M-Instruct) once, so that everything else starts quickly."""
    from nanopd.model.embedded import embedded_model

    print(f"The embedded model is ready: {embedded_model()}")


@app.command("bench-kernels")
def bench_kernels(device: Device = None, dtype: DType = None, out: Out = None) -> None:
    """Time every kernel against what this device can do at best."""
    from nanopd.cli.bench import run_kernels

    run_kernels(device=device, dtype=dtype, out=out)


@app.command("bench-engine")
def bench_engine(
    model: Model = "dummy:qwen3-8b",
    device: Device = None,
    dtype: DType = None,
    out: Out = None,
) -> None:
    """Time prefill and decode steps of the engine."""
    from nanopd.cli.bench import run_engine

    run_engine(model=model, device=device, dtype=dtype, out=out)


@app.command()
def profile(
    model: Model = "smollm2",
    device: Device = None,
    dtype: DType = None,
    out: Annotated[Path, typer.Option(help="Where the hardware profile goes.")] = Path("hardware_profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, less time.")] = False,
    link_to: Annotated[str | None, typer.Option(help="Also measure the link to this device, such as cuda:1.")] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Also measure an SM split, decode/prefill, such as 48/84 (repeatable).")
    ] = None,
) -> None:
    """Measure what prefill, decode and mixed steps take on this device, and fit the cost models."""
    from nanopd.cli.profile import run_profile

    run_profile(
        model=model, device=device, dtype=dtype, out=out, quick=quick, link_to=link_to, splits=tuple(split or ())
    )


@app.command()
def bench(
    model: Model = "smollm2",
    dtype: DType = None,
    collocated: Annotated[str, typer.Option(help="Places that prefill and decode: cuda:0,cuda:1 or cpu.")] = "",
    prefill: Annotated[str, typer.Option(help="Places that only prefill: cuda:0/sm=84 or cpu/cores=0.")] = "",
    decode: Annotated[str, typer.Option(help="Places that only decode.")] = "",
    strategy: Annotated[
        list[str] | None, typer.Option(help="collocated, disaggregated, or a policy of `nanopd route` (repeatable).")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Hardware profile for slo, seed-rule and seed-estimate: h200 or a file.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="KEY=VALUE option of a policy (repeatable).")] = None,
    workload: Annotated[
        str,
        typer.Option(help="short, long, mixed, sharegpt, humaneval, longbench, openchat, a trace, or PROMPT:OUTPUT."),
    ] = "short",
    scale: Annotated[float, typer.Option(help="Multiplies all lengths, for small models.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Only the first requests of a trace.")] = None,
    rate: Annotated[str, typer.Option(help="Requests per second, separated by commas.")] = "1,2,4",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals at each rate.")] = 60.0,
    slo_ttft: Annotated[float, typer.Option(help="Time to first token that must be met, ms.")] = 1000.0,
    slo_tpot: Annotated[float, typer.Option(help="Time per output token that must be met, ms.")] = 100.0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a client gives up.")] = None,
    warmup: Annotated[float, typer.Option(help="Seconds at the start whose requests do not count.")] = 0.0,
    drain: Annotated[float, typer.Option(help="Seconds to wait for the last requests.")] = 60.0,
    stream: Annotated[bool, typer.Option(help="Take each token as it comes: gaps as a client sees them.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    goodput: Annotated[bool, typer.Option(help="Search the highest rate that meets the SLO.")] = True,
    allow_unequal: Annotated[bool, typer.Option(help="Compare unequal hardware, per device.")] = False,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together, tokens.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of each pool.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens per step where nothing decodes.")] = None,
    collocated_chunk: Annotated[int | None, typer.Option(help="Prompt tokens per step of collocated workers.")] = None,
    out: Out = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures.")] = None,
) -> None:
    """Serve the same arrivals with several strategies and compare latency, throughput and goodput."""
    from nanopd.bench.load import LoadOptions
    from nanopd.cli.serve_bench import run_bench

    run_bench(
        model=model,
        dtype=dtype,
        collocated=collocated,
        prefill=prefill,
        decode=decode,
        strategies=strategy or (),
        profile=profile,
        policy_options=policy or (),
        workload=workload,
        scale=scale,
        limit=limit,
        rates=rate,
        duration=duration,
        slo_ttft_ms=slo_ttft,
        slo_tpot_ms=slo_tpot,
        options=LoadOptions(timeout_s=timeout, drain_s=drain, warmup_s=warmup, stream=stream),
        seed=seed,
        goodput=goodput,
        allow_unequal=allow_unequal,
        out=out,
        figures=figures,
        cluster_options={
            "max_model_len": max_model_len,
            "num_blocks": num_blocks,
            "prefill_chunk": prefill_chunk,
            "collocated_chunk": collocated_chunk,
        },
    )


@app.command()
def route(
    profile: Annotated[str, typer.Option(help="h20, h200, rtx-4090, or a file that `nanopd profile` wrote.")],
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 1000,
    output_tokens: Annotated[float, typer.Option(help="Length of the output, as predicted.")] = 200.0,
    load: Annotated[int, typer.Option(help="Requests that decode, on either path.")] = 4,
    policy: Annotated[
        str, typer.Option(help="collocated, disaggregated, round-robin, seed-rule, seed-estimate, threshold, slo.")
    ] = "seed-estimate",
    context: Annotated[int, typer.Option(help="KV tokens of each of them.")] = 1024,
    waiting_tokens: Annotated[int, typer.Option(help="Prompt tokens that wait to be prefilled, on either path.")] = 0,
    prefill_place: Annotated[str, typer.Option(help="Step-time model of the prefill, as sm=84.")] = "whole device",
    decode_place: Annotated[str, typer.Option(help="The same for the decode.")] = "whole device",
    ttft_ms: Annotated[float, typer.Option(help="Limit for the time to first token (slo).")] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(help="Limit for the time per output token (slo).")] = 50.0,
    chunk_size: Annotated[int | None, typer.Option(help="Prefill tokens per collocated step (slo).")] = 512,
) -> None:
    """Explain one decision: both paths' costs term by term, and the reason.

    Compared are one whole device for both phases and one each for prefill and
    decode, which is twice the hardware. With --policy slo, --prefill-place and
    --decode-place compare it with two parts of one device instead.
    """
    from nanopd.cli.route import explain

    explain(
        profile=profile,
        policy=policy,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        load=load,
        context=context,
        waiting_tokens=waiting_tokens,
        prefill_place=prefill_place,
        decode_place=decode_place,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        chunk_size=chunk_size,
    )


@app.command()
def simulate(
    hardware: Annotated[str, typer.Option(help="Hardware profile: h20, h200, rtx-4090, or a file.")] = "rtx-4090",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs in all.", show_default="the roles' sum")] = None,
    collocated: Annotated[int | None, typer.Option(min=0, help="GPUs that prefill and decode.")] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="GPUs that only prefill.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="GPUs that only decode.")] = None,
    split: Annotated[str | None, typer.Option(help="Cut each GPU: SMs for decode/prefill, such as 48/84.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="collocated, disaggregated, or a policy of `nanopd route` (repeatable).")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="KEY=VALUE option of a policy (repeatable).")] = None,
    workload: Annotated[
        str, typer.Option("--workload", "--trace", help="A workload as in `nanopd bench`, a trace, or PROMPT:OUTPUT.")
    ] = "short",
    limit: Annotated[int | None, typer.Option(help="Only the first requests of a trace.")] = None,
    rate: Annotated[str, typer.Option(help="Requests per second, separated by commas.")] = "1,2,4",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals at each rate.")] = 60.0,
    slo_ttft: Annotated[float, typer.Option(help="Time to first token that must be met, ms.")] = 1000.0,
    slo_tpot: Annotated[float, typer.Option(help="Time per output token that must be met, ms.")] = 100.0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a client gives up.")] = None,
    warmup: Annotated[float, typer.Option(help="Seconds at the start whose requests do not count.")] = 0.0,
    drain: Annotated[float, typer.Option(help="Seconds to wait for the last requests.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    goodput: Annotated[bool, typer.Option(help="Search the highest rate that meets the SLO.")] = True,
    search: Annotated[
        bool, typer.Option("--search", help="Find the ratio (one GPU: the split) of best goodput.")
    ] = False,
    link: Annotated[float | None, typer.Option(help="GB/s of each link.", show_default="the profile's")] = None,
    latency: Annotated[float, typer.Option(help="Microseconds of each transfer.")] = 0.0,
    bus: Annotated[float | None, typer.Option(help="GB/s of a bus that all links share.")] = None,
    host: Annotated[float, typer.Option(help="Microseconds of the host between two steps of a worker.")] = 0.0,
    memory: Annotated[float | None, typer.Option(help="GB of each GPU.", show_default="as known")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of each pool.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Prompt tokens per step of collocated workers.")] = 512,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together, tokens.")] = None,
    out: Out = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures.")] = None,
) -> None:
    """Simulate the benchmark on hardware that need not be there: the same policies under a virtual clock."""
    from nanopd.bench.load import LoadOptions
    from nanopd.cli.simulate import Counts, parse_split, run_simulate

    run_simulate(
        hardware=hardware,
        counts=Counts(gpus, collocated, prefill, decode, parse_split(split)),
        strategies=strategy or (),
        policy_options=policy or (),
        workload=workload,
        limit=limit,
        rates=rate,
        duration=duration,
        slo_ttft_ms=slo_ttft,
        slo_tpot_ms=slo_tpot,
        options=LoadOptions(timeout_s=timeout, drain_s=drain, warmup_s=warmup),
        seed=seed,
        goodput=goodput,
        search=search,
        out=out,
        figures=figures,
        cluster_options={
            "link_gb_s": link,
            "latency_s": latency / 1e6,
            "bus_gb_s": bus,
            "host_s": host / 1e6,
            "memory_gb": memory,
            "num_blocks": num_blocks,
            "collocated_chunk": chunk,
            "max_model_len": max_model_len,
        },
    )


@app.command()
def progress(
    reset: Annotated[bool, typer.Option("--reset", help="Forget what was solved.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Show which exercises of the course are solved."""
    from nanopd.cli.progress import forget, show

    if not reset:
        show()
    elif yes or typer.confirm("Forget all solved exercises?"):
        forget()
