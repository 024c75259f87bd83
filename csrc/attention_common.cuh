// What the attention kernels share: finding a token in the paged cache, exponentials in base 2, and who comes last.
//
// Macros given at compile time: SCALAR (bf16 or fp16), HEAD_DIM (64, 96, 128, 256), BLOCK_SIZE (a multiple of 8).
#pragma once
#include "common.cuh"

typedef SCALAR scalar;

// Softmax is computed in base 2: exp(x) = 2^(x * log2 e), and the factor joins the scale that multiplies q·k anyway, so
// each exponential is the one instruction the hardware has.
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // 2^-inf = 0
  return y;
}

// The largest power of 2 that divides both. Tokens of a tile lie one behind the other in the cache in runs of so many.
__device__ constexpr int common_power_of_2(int a, int b) { return (a | b) & -(a | b); }

// The row of the cache, seen as [num_blocks * BLOCK_SIZE, Hkv, D], that holds token `token` of a sequence.
// `block_table` is the sequence's row of block_tables. Only call it for token < context_len: the rest is padding.
__device__ __forceinline__ int cache_row(const int* block_table, int token) {
  return __ldg(block_table + token / BLOCK_SIZE) * BLOCK_SIZE + token % BLOCK_SIZE;
}

// An online softmax (Milakov & Gimelshein 2018) keeps, while scores stream by, the largest score so far and the sum of
// 2^(score - largest). Two such states, over disjoint tokens, merge exactly: rescale both to the larger maximum and add.
// This is the factor for one of them. An empty state has maximum -inf; two empty ones must not give inf - inf = NaN.
__device__ __forceinline__ float rescale(float own_max, float merged_max) {
  return own_max == NEG_INF ? 0.f : exp2_fast(own_max - merged_max);
}

// Counts a block in, and says whether it is the last of `others` + 1. For one thread; with a barrier before and after it,
// what the whole block wrote can be seen by the last one. The counter is back at zero then: nobody has to clear it before
// the next launch or graph replay.
__device__ __forceinline__ bool count_in(u32* counter, u32 others) {
  __threadfence();
  const bool last = atomicInc(counter, others) == others;  // counts up to `others`, then wraps to 0
  __threadfence();
  return last;
}
