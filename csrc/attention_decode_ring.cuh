// The ring of tiles that each warp of attention_decode_split.cu has under way.
//
// 4.8 TB/s with 800 ns latency over 132 SMs needs 29 KB under way in each SM at all times. cp.async brings tiles into a ring of
// STAGES slots per warp: STAGES - 1 tiles are under way while one is used. Warps do not share tiles, so no barrier is needed.
#pragma once
#include "attention_mma.cuh"
#include "attention_plan.cuh"

constexpr int TILE_BYTES = UNIT * ROW_BYTES;         // UNIT token rows of K, or of V
constexpr int SLOT_BYTES = 2 * TILE_BYTES;           // a tile of each
constexpr int RING_BYTES = STAGES * SLOT_BYTES;      // per warp; the host passes WARPS * RING_BYTES as shared memory

// Tokens that certainly lie one behind the other in a cache block.
constexpr int RUN = common_power_of_2(BLOCK_SIZE, UNIT);

// Copy one tile of K and V into a ring slot. Lane i holds the row of token i % UNIT in the caches, seen as
// [slots * Hkv, D], or -1 past the end: such tokens become zeros, since a probability of 0 would not silence a NaN left in
// an unused slot of V. `full`: there are none.
template <bool full>
__device__ __forceinline__ void copy_rows(u32 slot, const scalar* k_cache, const scalar* v_cache, int row, int num_kv_heads,
                                          int lane) {
  int runs[UNIT / RUN];
#pragma unroll
  for (int r = 0; r < UNIT / RUN; ++r) runs[r] = full ? __shfl_sync(FULL_MASK, row, r * RUN) : 0;
#pragma unroll
  for (int i = 0; i < UNIT * ROW_CHUNKS / WARP; ++i) {
    const int token = (i * WARP + lane) / ROW_CHUNKS, chunk = (i * WARP + lane) % ROW_CHUNKS;
    const int token_row = full ? runs[i * WARP / ROW_CHUNKS / RUN] + token % RUN * num_kv_heads
                               : __shfl_sync(FULL_MASK, row, token);
    const bool valid = full || token_row >= 0;
    const i64 at = valid ? (i64)token_row * HEAD_DIM + chunk * 8 : 0;
    copy16_async(slot + tile_offset(token, chunk), k_cache + at, valid);
    copy16_async(slot + TILE_BYTES + tile_offset(token, chunk), v_cache + at, valid);
  }
}
// Nearly all tiles are full, and on few SMs (a partition) instructions are what this kernel waits for.
__device__ __forceinline__ void fetch_tile(u32 slot, const scalar* k_cache, const scalar* v_cache, int row, int num_kv_heads,
                                           int lane) {
  if (__all_sync(FULL_MASK, row >= 0)) copy_rows<true>(slot, k_cache, v_cache, row, num_kv_heads, lane);
  else if (__any_sync(FULL_MASK, row >= 0)) copy_rows<false>(slot, k_cache, v_cache, row, num_kv_heads, lane);
}
