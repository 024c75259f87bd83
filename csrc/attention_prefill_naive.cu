// Paged prefill attention, first version: one thread block per (query token, head), as if each were a decode.
//
// Correct, and hopeless on long prompts: every one of T queries loads all its keys and values for itself, so a prompt of
// T tokens moves T^2 / 2 rows for T^2 / 2 dot products: one row loaded, one row's worth of arithmetic done. The tiled
// kernel (attention_prefill_tiled.cu) loads a row once for 64 or 128 queries.
#include "attention_common.cuh"

// grid (T, Hq), block HEAD_DIM threads: thread d owns element d.
extern "C" __global__ void attention_prefill_naive(
    scalar* __restrict__ out,               // [T, Hq, D]
    const scalar* __restrict__ q,           // [T, Hq, D], rows q_stride elements apart
    const scalar* __restrict__ k_cache,     // [num_blocks, BLOCK_SIZE, Hkv, D]
    const scalar* __restrict__ v_cache,     // same
    const int* __restrict__ block_tables,   // [S, max_blocks]
    const int* __restrict__ cu_seqlens_q,   // [S + 1] first query row of each sequence
    const int* __restrict__ context_lens,   // [S], the chunk included
    float scale, int q_stride, int max_blocks, int num_seqs, int num_kv_heads) {
  __shared__ float scratch[HEAD_DIM / WARP];
  const int head = blockIdx.y, num_heads = gridDim.y, d = threadIdx.x;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int token_row = blockIdx.x;
  if (token_row >= cu_seqlens_q[num_seqs]) return;
  int seq = 0;
  while (cu_seqlens_q[seq + 1] <= token_row) ++seq;
  const int* block_table = block_tables + (i64)seq * max_blocks;
  // The chunk's last query stands at position context_len - 1; this one attends to itself and all before it.
  const int context_len = context_lens[seq];
  const int visible = context_len == 0 ? 0 : context_len - (cu_seqlens_q[seq + 1] - 1 - token_row);

  const float q_d = to_float(q[(i64)token_row * q_stride + head * HEAD_DIM + d]) * scale * LOG2_E;
  float largest = NEG_INF, sum = 0.f, acc = 0.f;
  for (int token = 0; token < visible; ++token) {
    const i64 at = ((i64)cache_row(block_table, token) * num_kv_heads + kv_head) * HEAD_DIM + d;
    const float score = block_sum<HEAD_DIM>(q_d * to_float(k_cache[at]), scratch);
    const float new_largest = fmaxf(largest, score);
    const float keep = exp2_fast(largest - new_largest), p = exp2_fast(score - new_largest);
    sum = sum * keep + p;
    acc = acc * keep + p * to_float(v_cache[at]);
    largest = new_largest;
  }
  out[((i64)token_row * num_heads + head) * HEAD_DIM + d] = from_float<scalar>(visible > 0 ? acc / sum : 0.f);
}
