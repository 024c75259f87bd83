// How blocks that stay on their SMs share out prefill attention: an item of work is one head of one tile of queries.
//
// Every block starts with the item of its own number and draws further ones from a counter. Blocks that got short items
// draw more, so no SM is left with the long ones, and nothing is spent on tiles that a short sequence does not have.
#pragma once
#include "attention_common.cuh"

template <int tile_q, int tile_k> struct Work {
  int head, seq, q_start, q_len, context_len, first_query;  // head < 0: there is no such item
  __device__ __forceinline__ int first_position() const { return context_len - q_len + first_query; }
  __device__ __forceinline__ int num_keys() const { return max(0, min(context_len, first_position() + tile_q)); }
  __device__ __forceinline__ int num_tiles() const { return (num_keys() + tile_k - 1) / tile_k; }
};

// Item number `item`; all lanes of a warp call it. Sequences follow each other; of one, the late tiles come first, as they
// see the most keys. `num_items`: how many there are, if there is none of that number.
template <int tile_q, int tile_k>
__device__ __forceinline__ Work<tile_q, tile_k> find_work(const int* cu_seqlens_q, const int* context_lens, int num_seqs,
                                                          int num_heads, int item, int& num_items) {
  const int lane = threadIdx.x % WARP;
  num_items = 0;
  for (int first = 0; first < num_seqs; first += WARP) {
    const int seq = min(first + lane, num_seqs - 1);
    const int q_start = __ldg(cu_seqlens_q + seq), q_len = __ldg(cu_seqlens_q + seq + 1) - q_start;
    const int context_len = __ldg(context_lens + seq);
    int end = first + lane < num_seqs ? (q_len + tile_q - 1) / tile_q * num_heads : 0;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {  // the sum over all lanes up to this one
      const int below = __shfl_up_sync(FULL_MASK, end, step);
      if (lane >= step) end += below;
    }
    end += num_items;
    const u32 found = __ballot_sync(FULL_MASK, item < end);
    if (found) {
      const auto of_owner = [&](int x) { return __shfl_sync(FULL_MASK, x, __ffs(found) - 1); };
      const int later = of_owner(end) - 1 - item;  // items of this sequence behind this one
      return {num_heads - 1 - later % num_heads, of_owner(seq), of_owner(q_start), of_owner(q_len),
              of_owner(context_len), later / num_heads * tile_q};
    }
    num_items = __shfl_sync(FULL_MASK, end, WARP - 1);
  }
  return {-1};
}
