"""The engine on the GPU in low precision: CUDA graphs, chunks, preemption, forks, whatever the batch size.

The oracle is the same model with the same (rounded) weights in float32, on the reference ops. Low precision moves
logits, so tokens are compared where the oracle is sure: its best logit leads by more than twice the error that was
measured on the very same tokens. Where it is not, the engine's token must still be within that error of the best.
"""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from engine_cases import check_clean, greedy, make_prompts, run_staggered, tokens_of
from low_precision import MODELS, VOCAB, Pair, as_oracle, make_pair
from model_cases import embedded_or_skip

from nanopd import LLM, SamplingParams
from nanopd.engine.cuda_graphs import capture_sizes
from nanopd.engine.plan import ScheduledChunk, StepPlan
from nanopd.engine.request import Request
from nanopd.engine.runner import ModelRunner
from nanopd.engine.sampler import SamplingBatch, sample_tokens
from nanopd.errors import NonFiniteLogitsError, StepFailedError
from nanopd.model import LoadedModel, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


def make_llm(loaded: LoadedModel, **options) -> LLM:
    llm = LLM(
        loaded,
        **{"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 512, "use_tqdm": False, **options},
    )
    llm.kv_cache.tensor.fill_(float("nan"))
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"chunk_size": 7, "graph_sizes": [1, 3, 8]},  # batches of 9 and more run eagerly
        {"chunk_size": 64, "block_size": 8, "enable_prefix_caching": False},
        {"num_blocks": 30, "block_size": 16},  # preempts
        {"max_num_seqs": 5, "block_size": 32, "num_blocks": 60},  # odd batches, padded to 8 and to 5
    ],
    ids=str,
)
def test_greedy_tokens(pair: Pair, options) -> None:
    llm = make_llm(pair.low, **options)
    outputs = run_staggered(llm, pair.prompts, [greedy(24)] * len(pair.prompts))
    pair.check(outputs, pair.prompts)
    if options.get("num_blocks") == 30:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check_clean(llm)
    if not options:  # and once more on a warm prefix cache
        again = llm.generate(pair.prompts, greedy(24), use_tqdm=False)
        assert sum(output.metrics.num_cached_tokens for output in again) > 500
        pair.check(again, pair.prompts)
    llm.close()


def test_several_samples(pair: Pair) -> None:
    """n = 4 from prompts that end inside a block: copy on write, and with temperature four different samples."""
    llm = make_llm(pair.low)
    prompts = [pair.prompts[i] for i in (2, 4, 8)]
    pair.check(llm.generate(prompts, SamplingParams(n=4, temperature=0, max_tokens=20), use_tqdm=False), prompts)
    params = SamplingParams(n=4, temperature=1.0, top_p=0.95, seed=5, max_tokens=20, ignore_eos=True)
    first = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    assert all(len({tuple(sample) for sample in samples}) == 4 for samples in first)
    check_clean(llm)
    llm.close()


def test_beam_search(pair: Pair) -> None:
    llm = make_llm(pair.low)
    prompt = pair.prompts[5]
    outputs = llm.beam_search(prompt, 5, 12, length_penalty=0.0, end_token_ids=())
    assert [o.score for o in outputs] == sorted((o.score for o in outputs), reverse=True)
    for output in outputs:  # the sums that led there are those of these very tokens
        want = torch.log_softmax(pair.logits(pair.oracle, prompt + output.token_ids, len(prompt)), -1)
        total = want.gather(1, torch.tensor(output.token_ids)[:, None]).sum().item()
        assert abs(output.cumulative_logprob - total) < 0.05 * abs(total) + 1.5
    check_clean(llm)
    llm.close()


# --- CUDA graphs ---------------------------------------------------------------------------------------------------


def decode_plan(llm: LLM, batch_size: int) -> StepPlan:
    """Prompts are computed, one decode each is planned; nobody takes the step."""
    rng = random.Random(batch_size)
    prefill, decode = [], []
    for i in range(batch_size):
        request = Request(str(i), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))], greedy(5))
        request.table = llm.block_manager.match_prefix(request.prompt_token_ids)
        llm.block_manager.append_slots(request.table, request.num_tokens + 1)
        prefill.append(ScheduledChunk(request, 0, request.num_tokens, (request,)))
        decode.append(ScheduledChunk(request, request.num_tokens, 1, (request,)))
    for chunk, (token,) in zip(prefill, (llm.runner.execute(StepPlan([c]))[0] for c in prefill), strict=True):
        chunk.request.append_token(token)
    return StepPlan(decode, num_decodes=batch_size)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8, 13, 16])
def test_graphs_equal_eager_steps(pair: Pair, batch_size: int) -> None:
    """The same step both ways: logits alike, and the cache changed in the new slots and nowhere else."""
    llm = make_llm(pair.low, enable_prefix_caching=False)
    eager = ModelRunner(
        llm.model,
        llm.kv_cache,
        llm.model.ops,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=512,
        vocab_size=VOCAB,
        enforce_eager=True,
    )
    plan = decode_plan(llm, batch_size)
    before = llm.kv_cache.tensor.clone()
    want = eager.logits(plan).float()
    after_eager = llm.kv_cache.tensor.clone()
    got = llm.runner.logits(plan).float()
    assert llm.runner.graphs is not None and llm.runner.graphs.size_for(batch_size) is not None
    assert got.shape == want.shape == (batch_size, VOCAB)
    assert bool(got.isfinite().all())
    assert (got - want).abs().max() < 0.05 * want.abs().max()
    changed = (llm.kv_cache.tensor.view(torch.int16) != before.view(torch.int16)).any(dim=(0, 1, 4, 5))
    slots = {(c.request.table.block_ids[c.start // 16], c.start % 16) for c in plan.chunks}
    assert {tuple(where) for where in changed.nonzero().tolist()} <= slots
    blocks = torch.tensor([c.request.table.block_ids[c.start // 16] for c in plan.chunks], device="cuda")
    near = (llm.kv_cache.tensor[:, :, blocks].nan_to_num() - after_eager[:, :, blocks].nan_to_num()).abs().max()
    assert near < 0.1 * after_eager[:, :, blocks].nan_to_num().abs().max()
    tokens = [t[0] for t in llm.runner.execute(plan)]
    assert tokens == got.argmax(-1).tolist()
    llm.close()


def test_capture_sizes() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(5) == [1, 2, 4, 5]
    assert capture_sizes(32) == [1, 2, 4, 8, 16, 24, 32]


def test_graphs_are_captured_on_first_use_too(pair: Pair) -> None:
    llm = make_llm(pair.low, enforce_eager=True)
    runner = ModelRunner(
        llm.model,
        llm.kv_cache,
        llm.model.ops,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=512,
        vocab_size=VOCAB,
    )
    plan = decode_plan(llm, 3)
    assert runner.graphs is not None
    assert runner.graphs.missing == [16, 8, 4, 2, 1]
    first = runner.logits(plan)
    assert runner.graphs.missing == [16, 8, 2, 1]
    assert torch.equal(runner.logits(plan), first)  # the capture's padding step left the cache alone
    runner.close()


def test_everything_on_a_given_stream(pair: Pair) -> None:
    stream = torch.cuda.Stream()
    llm = make_llm(pair.low, stream=stream, graph_sizes=[1, 4, 16])
    torch.cuda.synchronize()
    outputs = run_staggered(llm, pair.prompts, [greedy(16)] * len(pair.prompts))
    pair.check(outputs, pair.prompts)
    llm.close()


def test_nan_in_a_graph_is_reported(pair: Pair) -> None:
    llm = make_llm(pair.low, enable_prefix_caching=False)
    llm.engine.add_request(pair.prompts[5], greedy(10), request_id="bad")
    assert llm.engine.step() == []
    llm.kv_cache.tensor.fill_(float("nan"))
    (output,) = llm.engine.step()
    assert isinstance(output.error, StepFailedError)
    assert isinstance(output.error.__cause__, NonFiniteLogitsError)
    pair.check(llm.generate(pair.prompts[:4], greedy(8), use_tqdm=False), pair.prompts[:4])
    check_clean(llm)
    llm.close()


# --- memory, sampler, a real model ---------------------------------------------------------------------------------


def test_the_pool_fills_its_share_of_the_gpu_and_close_frees_it() -> None:
    tiny = load_model("dummy:tiny", device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 2.5e9) / total
    llm = LLM(tiny, gpu_memory_utilization=share, max_num_seqs=1024, graph_sizes=[1, 64], use_tqdm=False)
    pool = llm.kv_cache.num_blocks * llm.kv_cache.bytes_per_block
    assert 1e9 < pool < 2.5e9
    assert len(llm.generate([[1, 2, 3]], greedy(5), use_tqdm=False)[0].outputs[0].token_ids) == 5
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3)
    llm.generate([[i, 5] for i in range(1000)], params, use_tqdm=False)
    free, _ = torch.cuda.mem_get_info()
    assert total - free < share * total + 0.3e9  # graphs and compiled kernels come on top
    llm.close()
    del llm
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 200e6


def test_sampler_on_the_gpu_equals_the_cpu_and_ignores_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    n, vocab = 96, 50_257
    logits = torch.from_numpy((rng.standard_normal((n, vocab)) * rng.uniform(0.5, 6, (n, 1))).astype(np.float32))
    batch = SamplingBatch(
        np.arange(n),
        rng.choice([0.0, 0.5, 1.0, 1.5], n),
        rng.choice([0, 0, 1, 40, 1000], n),
        rng.choice([1.0, 1.0, 0.1, 0.9], n),
        rng.uniform(size=n),
    )
    on_gpu = sample_tokens(logits.cuda(), batch)
    assert (on_gpu.cpu() != sample_tokens(logits, batch)).sum() <= 1  # a border that the last bit of exp moved
    fields = ("rows", "temperature", "top_k", "top_p", "uniform")
    for part in ([i] for i in range(0, n, 7)):
        alone = sample_tokens(logits.cuda(), SamplingBatch(*(getattr(batch, f)[part] for f in fields)))
        assert torch.equal(alone, on_gpu[part])


def test_embedded_model() -> None:
    """SmolLM2 in bfloat16, 20 varied prompts of 1 to 2,000 tokens, chunked, in a mixed batch of 16."""
    with embedded_or_skip():
        low = load_model("smollm2", device="cuda", dtype="bfloat16")
    pair = Pair(low, as_oracle(low), make_prompts(low.tokenizer))
    for options in ({"chunk_size": 256}, {"num_blocks": 170, "enforce_eager": True}):
        llm = make_llm(low, **{"num_blocks": 400, **options})
        outputs = run_staggered(llm, pair.prompts, [greedy(16)] * len(pair.prompts))
        pair.check(outputs, pair.prompts, least_sure=0.25)
        check_clean(llm)
        llm.close()


def test_a_step_that_samples_nothing_has_ended_when_it_was_waited_for(pair: Pair) -> None:
    """Its blocks may go to a worker on another stream then, which would write to them while this one still does."""
    llm = make_llm(pair.low, chunk_size=16)
    llm.engine.add_request(list(range(1, 100)), greedy(2))
    torch.cuda._sleep(100_000_000)  # some 50 ms of the stream's time, which the step has to wait for
    plan = llm.engine.begin_step()
    assert plan is not None and not plan.chunks[0].samplers
    llm.runner.launch(plan).wait()
    assert torch.cuda.current_stream().query()
    llm.engine.cancel_step(plan)


def test_logits_of_a_runner_with_a_stream_of_its_own_can_be_read_at_once(pair: Pair) -> None:
    llm = make_llm(pair.low)
    llm.runner.stream = torch.cuda.Stream()
    for start in (1, 100):
        llm.engine.add_request(list(range(start, start + 90)), greedy(2))
    plan = llm.engine.begin_step()
    assert plan is not None
    first, second = (StepPlan([chunk]) for chunk in plan.chunks)
    other = llm.runner.logits(first).clone()
    with torch.cuda.stream(llm.runner.stream):
        torch.cuda._sleep(100_000_000)
    logits = llm.runner.logits(second).clone()  # on the current stream, which is another one
    torch.cuda.synchronize()
    assert torch.equal(logits, llm.runner.logits(second)) and not torch.equal(logits, other)
    llm.engine.cancel_step(plan)


def test_no_kernel_is_compiled_while_it_serves(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiling takes a good part of a second, and loading waits for the whole card: the warm-up has done both."""
    gc.unfreeze()
    loaded = make_pair(sorted(MODELS)[0], tmp_path_factory.mktemp("compiled")).low
    ops = loaded.model.ops
    llm = LLM(loaded, num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256, use_tqdm=False)
    before = set(ops.library._kernels)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 16, 40, 130, 300)))] for _ in range(24)]
    ways = [
        greedy(9),
        SamplingParams(temperature=1.0, seed=1, max_tokens=7, n=3),
        SamplingParams(temperature=0.5, top_k=5, top_p=0.8, seed=2, max_tokens=12),
    ]
    llm.generate(prompts + prompts[:6], [ways[i % 3] for i in range(30)], use_tqdm=False)
    assert set(ops.library._kernels) - before == set()
    assert gc.get_freeze_count() > 0
    llm.close()
