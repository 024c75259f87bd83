"""LLM: one object to start with. It puts the layers together and leaves each of them within reach."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from nanopd.engine.beam import BeamOutput, BeamSearch
from nanopd.engine.engine import Engine, StepRecord
from nanopd.engine.generate import OutputStream
from nanopd.engine.heap import settle_heap, thaw_heap
from nanopd.engine.kv_budget import default_num_blocks
from nanopd.engine.options import check_options, model_len
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.prompts import Prompt, encode_prompt
from nanopd.engine.runner import ModelRunner
from nanopd.engine.sampling_params import SamplingParams, check_int
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import (
    EngineClosedError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    PromptTooLongError,
)
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache
from nanopd.model.loader import LoadedModel, load_model


class LLM:
    """A model with an engine around it, in this process and on one device.

    Attributes, from the bottom up: ``config``, ``tokenizer`` (None for random weights), ``model``, ``kv_cache``,
    ``block_manager``, ``scheduler``, ``runner``, ``engine``.

    Args:
        model: a name for ``load_model``, such as "smollm2" or "dummy:qwen3-8b", a model that is loaded
            already, or another ``LLM``, whose weights are then shared.
        device: default a GPU if there is one, else the CPU.
        dtype: default bfloat16 on a GPU, float32 on the CPU.
        block_size: tokens per KV block, a multiple of 8.
        num_blocks: size of the KV pool; default by memory, see ``default_num_blocks``.
        gpu_memory_utilization: share of the GPU's memory to fill, KV pool included.
        max_num_seqs: requests that may prefill or decode at once.
        max_num_batched_tokens: tokens per step, decodes and prefill together.
        chunk_size: prefill tokens per step; None leaves it to ``max_num_batched_tokens``.
        max_model_len: prompt and output together; default the model's own limit.
        enable_prefix_caching: reuse KV of prompt beginnings seen before.
        enforce_eager: no CUDA graphs.
        graph_sizes: decode batch sizes to capture; default 1, 2, 4, 8, 16, 24, … ``max_num_seqs``.
        seed: of the seeds that are drawn for requests without one; None means other samples each time.
        stream: run all GPU work on this stream.
        run_ahead: launch the next decode step while the host books this one; default on a GPU. See
            ``nanopd.engine.run_ahead``.
        on_step: called with a ``StepRecord`` after each step.
        clock: seconds, for stamps and metrics.
        use_tqdm: show a progress bar while CUDA graphs are captured.

    Raises:
        ModelLoadError, ConfigError, CudaUnavailableError: see the message.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel | LLM = "smollm2",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        chunk_size: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        graph_sizes: Sequence[int] | None = None,
        seed: int | None = None,
        stream: torch.cuda.Stream | None = None,
        run_ahead: bool | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        use_tqdm: bool = True,
    ) -> None:
        check_options(
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
        )
        loaded = _shared(model) if isinstance(model, LLM) else model
        if not isinstance(loaded, LoadedModel):
            loaded = load_model(loaded, device=device, dtype=dtype)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.model = loaded.model
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk_size=chunk_size,
            max_model_len=model_len(self.config, max_model_len),
        )
        on_gpu = self.model.device.type == "cuda"
        if on_gpu:
            thaw_heap()
        if num_blocks is None:
            num_blocks = default_num_blocks(
                self.model, block_size, limits, gpu_memory_utilization=gpu_memory_utilization
            )
        self.kv_cache = KVCache.allocate(self.config, num_blocks, block_size, self.model.dtype, self.model.device)
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        if run_ahead is None:
            run_ahead = on_gpu
        self.scheduler = Scheduler(limits, self.block_manager, early_slots=run_ahead)
        self.runner = ModelRunner(
            self.model,
            self.kv_cache,
            self.model.ops,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=min(max_num_batched_tokens, num_blocks * block_size),  # each token has its own slot
            max_model_len=limits.max_model_len,
            vocab_size=self.config.vocab_size,
            enforce_eager=enforce_eager,
            graph_sizes=graph_sizes,
            stream=stream,
            run_ahead=run_ahead,
        )
        self.runner.capture_graphs(use_tqdm=use_tqdm)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            self.tokenizer,
            clock,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            seed=seed,
            on_step=on_step,
        )
        if on_gpu:
            settle_heap()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts, each a text or a list of token ids. See ``Engine.generate``."""
        return self.engine.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> OutputStream:
        """Iterate over a growing output. See ``Engine.stream``."""
        return self.engine.stream(prompt, sampling_params)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput:
        """Reply to a conversation, a list of ``{"role": "system" | "user" | "assistant", "content": text}``.

        Raises InvalidRequestError if the model has no chat template, or as ``generate``.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(f"{self.config.name} has no tokenizer, and so no chat template")
        text = self.tokenizer.apply_chat_template(messages)
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        return self.engine.generate([prompt], sampling_params, use_tqdm)[0]

    def beam_search(
        self,
        prompt: Prompt,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        *,
        end_token_ids: Collection[int] | None = None,
    ) -> list[BeamOutput]:
        """The ``beam_width`` best continuations, best first. See ``nanopd.engine.beam``.

        Runs at once, between the engine's steps, and not while another thread takes steps. ``end_token_ids``: default
        the model's; ``()`` for none.

        Raises InvalidSamplingParamsError, an InvalidRequestError, OutOfBlocksError, or EngineClosedError.
        """
        if "kv_cache" not in self.__dict__:
            raise EngineClosedError("the engine was closed")
        limits = self.scheduler.config
        check_int("beam_width", beam_width, 1)
        check_int("max_tokens", max_tokens, 1)
        if beam_width > limits.max_num_seqs:
            raise InvalidSamplingParamsError(f"beam_width {beam_width} exceeds max_num_seqs, {limits.max_num_seqs}")
        tokens, _ = encode_prompt(prompt, self.tokenizer, self.config.vocab_size)
        if len(tokens) + max_tokens > limits.max_model_len:
            raise PromptTooLongError(
                f"a prompt of {len(tokens)} tokens and {max_tokens} more exceed the limit of {limits.max_model_len}"
            )
        outputs = BeamSearch(
            self.runner,
            self.block_manager,
            width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            end_token_ids=self.config.eos_token_ids if end_token_ids is None else end_token_ids,
            chunk_size=min(limits.max_num_batched_tokens, limits.chunk_size or limits.max_num_batched_tokens),
        ).run(tokens)
        if self.tokenizer is not None:
            for output in outputs:
                output.text = self.tokenizer.decode(output.token_ids)
        return outputs

    def close(self) -> None:
        """Abort what is unfinished and let go of KV pool, CUDA graphs and weights. Idempotent."""
        self.engine.close()
        self.runner.close()
        for name in ("model", "kv_cache"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _shared(llm: LLM) -> LoadedModel:
    if not hasattr(llm, "model"):
        raise EngineClosedError("the LLM whose weights were to be shared is closed")
    return LoadedModel(llm.config, llm.model, llm.tokenizer)
