// Paged decode attention, first version: one thread block per (sequence, query head), one token at a time.
//
// Thread d owns element d of the head: of the query, of each key and value it meets, and of the output. The score of a
// token is a sum over all threads, so the block stops at a barrier twice for every token. It loads HEAD_DIM * 2 bytes,
// waits for them, waits for the barrier, and only then asks for the next ones: the memory system is idle most of the time.
// attention_decode_warp.cu removes the barriers.
#include "attention_common.cuh"

// grid (Hq, B), block HEAD_DIM threads.
extern "C" __global__ void attention_decode_naive(
    scalar* __restrict__ out,               // [B, Hq, D]
    const scalar* __restrict__ q,           // [B, Hq, D], rows q_stride elements apart
    const scalar* __restrict__ k_cache,     // [num_blocks, BLOCK_SIZE, Hkv, D]
    const scalar* __restrict__ v_cache,     // same
    const int* __restrict__ block_tables,   // [B, max_blocks]
    const int* __restrict__ context_lens,   // [B]
    float scale, int q_stride, int max_blocks, int num_kv_heads) {
  __shared__ float scratch[HEAD_DIM / WARP];
  const int head = blockIdx.x, num_heads = gridDim.x, seq = blockIdx.y, d = threadIdx.x;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int context_len = context_lens[seq];
  const int* block_table = block_tables + (i64)seq * max_blocks;

  const float q_d = to_float(q[(i64)seq * q_stride + head * HEAD_DIM + d]) * scale * LOG2_E;
  float largest = NEG_INF, sum = 0.f, acc = 0.f;  // online softmax, so that no score has to be kept
  for (int token = 0; token < context_len; ++token) {
    const i64 at = ((i64)cache_row(block_table, token) * num_kv_heads + kv_head) * HEAD_DIM + d;
    const float score = block_sum<HEAD_DIM>(q_d * to_float(k_cache[at]), scratch);
    const float new_largest = fmaxf(largest, score);
    const float keep = exp2_fast(largest - new_largest);  // 0 for the first token
    const float p = exp2_fast(score - new_largest);
    sum = sum * keep + p;
    acc = acc * keep + p * to_float(v_cache[at]);
    largest = new_largest;
  }
  out[((i64)seq * num_heads + head) * HEAD_DIM + d] = from_float<scalar>(context_len > 0 ? acc / sum : 0.f);
}
