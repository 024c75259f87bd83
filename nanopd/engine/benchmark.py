"""How close the engine's steps come to what the device allows, and what a step costs the host.

A decode step cannot be faster than reading every weight and the batch's whole KV once; a prefill step not faster than
its multiplications. Both floors are computed from ceilings measured in the same run (``nanopd.ops.ceilings``).

The peer is transformers with the same weights: its ``generate_batch`` on a GPU, its decode loop on the CPU.

KV holds random numbers rather than computed ones: attention reads them all alike, and 64 prompts of 4,096 tokens would
take a minute to compute. The requests are handed to the scheduler as if another worker had prefilled them.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nanopd.engine import benchmark_peer
from nanopd.engine.engine import Engine
from nanopd.engine.heap import settle_heap
from nanopd.engine.llm import LLM
from nanopd.engine.options import is_int
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.request import FinishReason, Request
from nanopd.engine.runner import ModelRunner
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache
from nanopd.model.batch import ForwardBatch
from nanopd.model.config import ModelConfig
from nanopd.model.loader import load_model
from nanopd.model.transformer import Transformer
from nanopd.ops.ceilings import Ceilings, measure_ceilings
from nanopd.ops.reference import ReferenceOps

BLOCK_SIZE = 16
PAUSE = 0.5  # seconds after which a GPU's clock is back where it was; a CPU gets none


@dataclass(frozen=True)
class Sizes:
    """What to measure. (batch size, tokens of KV per sequence) for decode; tokens for prefill. Raises ConfigError."""

    decode: tuple[tuple[int, int], ...]
    prefill: int
    throughput: tuple[int, int, int]  # requests, prompt tokens, output tokens
    steps: int  # timed steps per decode case
    max_num_batched_tokens: int  # large steps, as suits a load of which nobody waits for a single token

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError(f"decode must hold at least one (batch size, tokens of KV), got {self.decode!r:.60}")
        counts = [(f"decode[{i}]", value) for i, case in enumerate(self.decode) for value in case]
        counts += [("throughput", value) for value in self.throughput]
        counts += [(name, getattr(self, name)) for name in ("prefill", "steps", "max_num_batched_tokens")]
        for name, value in counts:
            least = 2 if name == "steps" else 1  # half of them are timed whole, see `decode_steps`
            if not is_int(value) or value < least:
                raise ConfigError(f"{name} must be an int >= {least}, got {value!r:.60}")
        if self.prefill > self.max_num_batched_tokens:
            raise ConfigError(
                f"prefill ({self.prefill}) is one step: at most max_num_batched_tokens ({self.max_num_batched_tokens})"
            )

    @property
    def longest(self) -> int:
        """Positions that the longest sequence needs."""
        decoded = max(kv_len for _, kv_len in self.decode) + _decoded_tokens(self.steps)
        return max(decoded, self.prefill + 1, sum(self.throughput[1:]))


GPU_SIZES = Sizes(
    decode=((1, 512), (32, 2048), (64, 4096)),
    prefill=2048,
    throughput=(128, 256, 128),
    steps=40,
    max_num_batched_tokens=8192,
)
CPU_SIZES = Sizes(
    decode=((1, 256), (8, 256)), prefill=256, throughput=(8, 32, 16), steps=8, max_num_batched_tokens=2048
)


def bench_engine(
    model: str = "dummy:qwen3-8b",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    sizes: Sizes | None = None,
    peer: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure decode steps, a prefill step, throughput, memory and the host's share, and ``peer``: transformers too.

    About a minute and a half on an H200, a minute without the peer.

    Returns: ``{"ceilings", "decode": {"b1_kv512": {...}}, "prefill": {"p2048": {...}}, "throughput", "memory",
    "host"}``, plain numbers for ``nanopd.ops.measure.write_result``. Times in ms. ``of_floor`` is the measured time
    over the floor (for throughput the floor over the measured time: the share of the possible rate).
    ``of_transformers`` is how many times faster than the peer the engine is.

    Raises ConfigError, before anything is measured, for a model with fewer positions than the sequences need.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    place = loaded.model.device
    sizes = sizes or (GPU_SIZES if place.type == "cuda" else CPU_SIZES)
    if sizes.longest > (limit := loaded.config.max_position_embeddings):
        raise ConfigError(
            f"{loaded.config.name} has {limit} positions, and the benchmark's longest sequence needs {sizes.longest}"
        )
    ceilings = measure_ceilings(place, loaded.model.dtype)
    llm = LLM(
        loaded,
        num_blocks=_blocks_for(sizes),
        block_size=BLOCK_SIZE,
        max_num_seqs=max(sizes.throughput[0], *(batch for batch, _ in sizes.decode)),
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.longest,
        enable_prefix_caching=False,
        use_tqdm=progress,
    )
    for layer in range(llm.kv_cache.num_layers):  # one at a time: a generator works in float32 internally
        llm.kv_cache.tensor[layer].normal_()
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)
    results: dict[str, Any] = {
        "model": loaded.config.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "ceilings": ceilings.as_dict(),
        "decode": {},
        "prefill": {},
    }
    peer = peer and loaded.config.rope_scaling is None  # the comparison knows plain RoPE only
    twin = benchmark_peer.hf_twin(loaded.model) if peer else None
    settle_heap()  # transformers' objects came after the LLM had settled it, and a full collection takes 0.2 s
    with llm, _bar(len(sizes.decode) + 3 + peer, progress) as done:
        for batch_size, kv_len in sizes.decode:
            name = f"b{batch_size}_kv{kv_len}"
            results["decode"][name] = decode_steps(llm, batch_size, kv_len, sizes.steps, ceilings)
            done(name)
        results["prefill"][f"p{sizes.prefill}"] = prefill_step(llm, sizes.prefill, ceilings)
        done("prefill")
        results["throughput"] = throughput(llm, *sizes.throughput, ceilings)
        done("throughput")
        if place.type == "cuda":
            results["memory"] = memory_gb(llm)
        results["host"] = {f"b{n}": host_step_ms(n, 1024) for n in (1, 32, 256)}
        done("host")
        if twin is not None:
            compare(llm, twin, sizes, results)
            done("transformers")
    return results


def compare(llm: LLM, twin: Any, sizes: Sizes, results: dict[str, Any]) -> None:
    """Add what transformers' ``twin`` of the model needs for the same: throughput on a GPU, decode steps on the CPU."""
    if llm.kv_cache.device.type == "cuda":
        requests, num_prompt, num_output = sizes.throughput
        seconds = benchmark_peer.generate_batch_seconds(twin, _prompts(llm, requests, num_prompt), num_output)
        ours = results["throughput"]
        ours["transformers"] = {"seconds": seconds, "output_tokens_per_s": requests * num_output / seconds}
        ours["of_transformers"] = seconds / ours["seconds"]
        return
    for batch_size, kv_len in sizes.decode:
        case = results["decode"][f"b{batch_size}_kv{kv_len}"]
        rounds: dict[str, list[float]] = {"ours": [], "dynamic": [], "static": []}
        for _ in range(3):  # taking turns, since a laptop's speed drifts
            rounds["ours"].append(decode_steps(llm, batch_size, kv_len, sizes.steps, None)["step_ms"])
            for cache in ("dynamic", "static"):
                rounds[cache].append(benchmark_peer.decode_ms(twin, batch_size, kv_len, sizes.steps, cache))  # type: ignore[arg-type]
        medians = {name: statistics.median(times) for name, times in rounds.items()}
        case["transformers_ms"] = {"dynamic": medians["dynamic"], "static": medians["static"]}
        case["beside_transformers_ms"] = medians["ours"]
        case["of_transformers"] = min(medians["dynamic"], medians["static"]) / medians["ours"]


def decode_steps(llm: LLM, batch_size: int, kv_len: int, steps: int, ceilings: Ceilings | None) -> dict[str, float]:
    """Engine steps in which ``batch_size`` sequences with ``kv_len`` tokens of KV decode greedily.

    ``step_ms`` is the wall time of ``Engine.step``; ``gpu_ms`` is the graph alone, and ``host_share`` the part of the
    step that it does not cover: what run-ahead does not hide. What the host does in a step, hidden or not, is
    ``schedule_ms``, ``launch_ms`` (inputs, graph replay or kernel launches) and ``update_ms``, timed in steps that are
    not launched ahead; these take ``in_turn_ms``. Medians, except ``worst_ms``. Without ``ceilings`` there is no floor.
    """
    requests = _prefilled(llm, batch_size, kv_len, max_tokens=_decoded_tokens(steps))
    on_gpu = llm.kv_cache.device.type == "cuda"
    for _ in range(10 if on_gpu else 1):
        llm.engine.step()
    times: list[tuple[float, ...]] = [_timed_step(llm) for _ in range(steps)]
    walls = []
    for _ in range(steps // 2):
        begin = time.perf_counter()
        llm.engine.step()
        walls.append((time.perf_counter() - begin) * 1e3)
    schedule, launch, wait, update = (statistics.median(column) for column in zip(*times))
    result = {
        "step_ms": statistics.median(walls),
        "worst_ms": max(walls),
        "in_turn_ms": statistics.median(map(sum, times)),
        "schedule_ms": schedule,
        "launch_ms": launch,
        "wait_ms": wait,
        "update_ms": update,
    }
    graphs = llm.runner.graphs
    if graphs is not None and (size := graphs.size_for(batch_size)) is not None:
        result["gpu_ms"] = _gpu_ms(lambda: graphs.replay(size), 20)
        result["host_ms"] = result["step_ms"] - result["gpu_ms"]
        result["host_share"] = result["host_ms"] / result["step_ms"]
    for request in requests:
        llm.scheduler.finish(request, FinishReason.ABORTED, llm.engine.clock())
    result["tokens_per_s"] = batch_size / result["step_ms"] * 1e3
    if ceilings is None:
        return result
    weights, kv = step_bytes(llm.model, batch_size, kv_len)
    floor_ms = (weights + kv) / ceilings.copy_gb_s / 1e6
    result |= {"weight_gb": weights / 1e9, "kv_gb": kv / 1e9, "floor_ms": floor_ms}
    return result | {"of_floor": result["step_ms"] / floor_ms}


def prefill_step(llm: LLM, num_tokens: int, ceilings: Ceilings, repeats: int = 7) -> dict[str, float]:
    """One engine step that computes a whole prompt and samples its first token. Median over new random prompts.

    A GPU under load lowers its clock to keep to its power limit. So a step's rate says little beside that of a product
    measured in another state, and there are two comparisons, each of a step and a large square product that lasts
    about as long: ``sustained``, the two taking turns without a pause; and ``rested``, each after a pause.
    ``linear_of_matmul`` is the sustained step over a short burst of products (``ceilings``).
    """
    rng = random.Random(0)
    _prefill_ms(llm, num_tokens, rng)  # the first one may compile
    walls, rates = _in_turns(llm, num_tokens, rng, repeats, pause=0.0)
    pause = PAUSE if llm.kv_cache.device.type == "cuda" else 0.0
    rested_walls, rested_rates = _in_turns(llm, num_tokens, rng, repeats // 2, pause)
    step_ms, rested_ms = statistics.median(walls), statistics.median(rested_walls)
    sustained, rested = statistics.median(rates), statistics.median(rested_rates)
    linear, attention = prefill_flops(llm.config, num_tokens)
    floor_ms = (linear + attention) / ceilings.matmul_tflop_s / 1e9
    return {
        "step_ms": step_ms,
        "linear_tflop": linear / 1e12,
        "attention_tflop": attention / 1e12,
        "floor_ms": floor_ms,
        "of_floor": step_ms / floor_ms,
        "linear_of_matmul": linear / step_ms / 1e9 / ceilings.matmul_tflop_s,
        "sustained_matmul_tflop_s": sustained,
        "linear_of_sustained_matmul": linear / step_ms / 1e9 / sustained,
        "rested_step_ms": rested_ms,
        "rested_matmul_tflop_s": rested,
        "linear_of_rested_matmul": linear / rested_ms / 1e9 / rested,
        "tokens_per_s": num_tokens / step_ms * 1e3,
    }


def throughput(llm: LLM, num_requests: int, num_prompt: int, num_output: int, ceilings: Ceilings) -> dict[str, Any]:
    """All requests at once, greedy, to the end. The floor: all prompts' operations, then full batches of decodes."""
    prompts = _prompts(llm, num_requests, num_prompt)
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    begin, steps = time.perf_counter(), llm.engine.num_steps
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    flops = num_requests * sum(prefill_flops(llm.config, num_prompt))
    weights, kv = step_bytes(llm.model, num_requests, num_prompt)
    kv += num_requests * num_output // 2 * llm.config.kv_bytes_per_token(llm.model.dtype.itemsize)
    floor = flops / ceilings.matmul_tflop_s / 1e12 + (num_output - 1) * (weights + kv) / ceilings.copy_gb_s / 1e9
    return {
        "requests": num_requests,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "seconds": seconds,
        "steps": llm.engine.num_steps - steps,
        "output_tokens_per_s": num_requests * num_output / seconds,
        "floor_seconds": floor,
        "of_floor": floor / seconds,
    }


def memory_gb(llm: LLM) -> dict[str, float]:
    """GPU memory, in 1e9 bytes. ``engine``: what torch had reserved at most beyond weights and KV pool, by now."""
    device = llm.kv_cache.device
    weights = llm.config.weight_bytes(llm.model.dtype.itemsize) / 1e9
    pool = llm.kv_cache.tensor.nbytes / 1e9
    reserved = torch.cuda.max_memory_reserved(device) / 1e9
    free, total = torch.cuda.mem_get_info(device)
    return {
        "weights": weights,
        "kv_pool": pool,
        "engine": reserved - weights - pool,
        "device_in_use": (total - free) / 1e9,  # with CUDA's context and modules, and whoever else uses the GPU
    }


# --- the host alone ----------------------------------------------------------------------------------------------


class _NoModel:
    """Answers every step at once: what is left of a step's time is the host's."""

    def __init__(self, rows: int) -> None:
        self._logits = torch.zeros(rows, 8)

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, after_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        return self._logits[: batch.logits_rows.shape[0]]

    def each_product(self, num_tokens: int) -> None:
        pass


def host_step_ms(batch_size: int, kv_len: int, *, temperature: float = 0.0, steps: int = 60) -> dict[str, float]:
    """What a decode step costs the host: an engine on the CPU whose model takes no time. Medians in ms.

    ``step``: all of it; ``schedule``, ``run`` (inputs and sampling over a vocabulary of 8) and ``update`` its parts.
    """
    blocks = batch_size * -(-(kv_len + steps + 10) // BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=batch_size, max_num_batched_tokens=max(2048, batch_size), max_model_len=kv_len + 1024
    )
    manager = BlockManager(blocks, BLOCK_SIZE, enable_prefix_caching=False)
    runner = ModelRunner(
        _NoModel(batch_size),
        KVCache(torch.zeros(1, 2, 1, BLOCK_SIZE, 1, 8), "none"),
        ReferenceOps(),
        max_num_seqs=batch_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=8,
    )
    engine = Engine(Scheduler(config, manager), runner)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=steps + 10, ignore_eos=True)
    for i in range(batch_size):
        engine.scheduler.attach(prefilled_request(manager, f"host{i}", [0] * kv_len, params))
    rows = []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = engine.begin_step()
        scheduled = time.perf_counter()
        assert plan is not None and plan.num_decodes == batch_size
        tokens = runner.execute(plan)
        ran = time.perf_counter()
        engine.finish_step(plan, tokens)
        end = time.perf_counter()
        rows.append((end - begin, scheduled - begin, ran - scheduled, end - ran))
    return {
        name: statistics.median(column) * 1e3 for name, column in zip(("step", "schedule", "run", "update"), zip(*rows))
    }


# --- floors ------------------------------------------------------------------------------------------------------


def step_bytes(model: Transformer, batch_size: int, kv_len: int) -> tuple[int, int]:
    """Bytes that a decode step cannot avoid reading: (weights, KV)."""
    size = model.dtype.itemsize
    return model.config.num_step_parameters * size, batch_size * kv_len * model.config.kv_bytes_per_token(size)


def prefill_flops(config: ModelConfig, num_tokens: int) -> tuple[int, int]:
    """Operations of a prompt, 2 per multiply-add: (linear layers, causal attention). Logits of one row only."""
    matrices = config.flops_per_token(logits=False)
    linear = num_tokens * matrices + 2 * config.vocab_size * config.hidden_size
    pairs = num_tokens * (num_tokens + 1) // 2
    return linear, pairs * (config.flops_per_token(1, logits=False) - matrices)


# --- inside ------------------------------------------------------------------------------------------------------


def _prompts(llm: LLM, num_requests: int, num_prompt: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(llm.config.vocab_size) for _ in range(num_prompt)] for _ in range(num_requests)]


def _prefilled(llm: LLM, batch_size: int, kv_len: int, max_tokens: int) -> list[Request]:
    """Running requests whose prompts nobody computed: their KV is whatever the pool holds."""
    rng = random.Random(kv_len)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = []
    for i in range(batch_size):
        prompt = [rng.randrange(llm.config.vocab_size) for _ in range(kv_len)]
        requests.append(prefilled_request(llm.block_manager, f"bench{kv_len}-{i}", prompt, params))
        llm.scheduler.attach(requests[-1], llm.engine.clock())
    return requests


def prefilled_request(manager: BlockManager, name: str, prompt: list[int], params: SamplingParams) -> Request:
    """A request as another worker would have prefilled it, to be attached: blocks, first token, and no KV computed."""
    request = Request(name, prompt, params)
    request.table = manager.match_prefix(prompt)
    manager.append_slots(request.table, len(prompt))
    manager.commit(request.table, prompt)
    request.num_computed_tokens = len(prompt)
    request.append_token(prompt[0])
    return request


def _timed_step(llm: LLM) -> tuple[float, ...]:
    """One step, part by part, in ms: (schedule, launch, wait, update)."""
    clock = time.perf_counter
    marks = [clock()]
    plan = llm.engine.begin_step()
    marks.append(clock())
    assert plan is not None
    pending = llm.runner.launch(plan)
    marks.append(clock())
    tokens = pending.wait()
    marks.append(clock())
    llm.engine.finish_step(plan, tokens)
    marks.append(clock())
    return tuple((b - a) * 1e3 for a, b in itertools.pairwise(marks))


def _in_turns(
    llm: LLM, num_tokens: int, rng: random.Random, repeats: int, pause: float
) -> tuple[list[float], list[float]]:
    """Prompts, in ms, and after each a product's rate in TFLOP/s. ``pause``: seconds before each of the two."""
    walls, rates = [], []
    for _ in range(max(1, repeats)):
        time.sleep(pause)
        walls.append(_prefill_ms(llm, num_tokens, rng))
        time.sleep(pause)
        rates.append(_matmul_tflop_s(llm, walls[-1]))
    return walls, rates


def _prefill_ms(llm: LLM, num_tokens: int, rng: random.Random) -> float:
    """The step of one random prompt."""
    prompt = [rng.randrange(llm.config.vocab_size) for _ in range(num_tokens)]
    llm.engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    begin = time.perf_counter()
    (output,) = llm.engine.step()
    assert output.finished
    return (time.perf_counter() - begin) * 1e3


def _gpu_ms(run: Callable[[], None], repeats: int) -> float:
    """Median time between CUDA events around ``run``."""
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _matmul_tflop_s(llm: LLM, duration_ms: float) -> float:
    """Rate of a large square matrix product, as in ``measure_ceilings``, kept up for about ``duration_ms``."""
    device = llm.kv_cache.device
    if device.type != "cuda":
        return measure_ceilings(device, llm.model.dtype).matmul_tflop_s
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=llm.model.dtype) for _ in range(2))
    out = torch.empty_like(a)
    rounds = max(1, round(duration_ms / 1.5))

    def run() -> None:
        for _ in range(rounds):
            torch.matmul(a, b, out=out)

    return rounds * 2 * size**3 / _gpu_ms(run, 1) / 1e9


def _decoded_tokens(steps: int) -> int:
    """More than a request of ``decode_steps`` gets, warm-up and steps launched ahead included: none may end there."""
    return 2 * steps + 20


def _blocks_for(sizes: Sizes) -> int:
    slots = [batch * (kv_len + _decoded_tokens(sizes.steps) + BLOCK_SIZE) for batch, kv_len in sizes.decode]
    requests, num_prompt, num_output = sizes.throughput
    slots += [sizes.prefill + 64, requests * (num_prompt + num_output + BLOCK_SIZE)]
    return -(-max(slots) // BLOCK_SIZE) + 16


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    from tqdm.auto import tqdm

    with tqdm(total=total, disable=not show, desc="Benchmark") as bar:

        def done(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield done
