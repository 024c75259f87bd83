"""Each prompt alone, at every chunk size, against transformers. Its own file, so that it runs beside the others."""

from __future__ import annotations

import pytest
from engine_cases import PROMPTS, check_clean, greedy
from test_engine_tokens import CHUNKS, NUM_TOKENS, answers, make_llm, prompts  # noqa: F401 (two are fixtures)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_alone(smollm2, prompts, answers, chunk_size, prefix_cache) -> None:  # noqa: F811
    """One request at a time, so that every step is one chunk or one decode."""
    llm = make_llm(smollm2, chunk_size=chunk_size, enable_prefix_caching=prefix_cache)
    for prompt, answer, what in zip(prompts, answers, PROMPTS, strict=True):
        (output,) = llm.generate([prompt], greedy(NUM_TOKENS), use_tqdm=False)
        assert output.outputs[0].token_ids == answer.tokens, what
    check_clean(llm)
