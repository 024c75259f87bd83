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

// Copy one tile of K and V into a ring slot. Lane i holds the row of token i % UNIT in the caches, seen as
// [slots * Hkv, D], or -1 past the end: such tokens become zeros, since a probability of 0 would not silence a NaN left in
// an unused slot of V. `full`: there are none.
__device__ __forceinline__ void copy_rows(u32 slot, const scalar* k_cache, const scalar* v_cache, int row, int lane,
                                          bool full) {
#pragma unroll
  for (int i = 0; i < UNIT * ROW_CHUNKS / WARP; ++i) {
    const int token = (i * WARP + lane) / ROW_CHUNKS, chunk = (i * WARP + lane) % ROW_CHUNKS;
    const int token_row = __shfl_sync(FULL_MASK, row, token);
    const bool valid = full || token_row >= 0;
    const i64 at = valid ? (i64)token_row * HEAD_DIM + chunk * 8 : 0;
    copy16_async(slot + tile_offset(token, chunk), k_cache + at, valid);
    copy16_async(slot + TILE_BYTES + tile_offset(token, chunk), v_cache + at, valid);
  }
}
// Compiled twice: nearly all tiles are full, and on few SMs (a partition) instructions are what this kernel waits for.
__device__ __forceinline__ void fetch_tile(u32 slot, const scalar* k_cache, const scalar* v_cache, int row, int lane) {
  if (__all_sync(FULL_MASK, row >= 0)) copy_rows(slot, k_cache, v_cache, row, lane, true);
  else if (__any_sync(FULL_MASK, row >= 0)) copy_rows(slot, k_cache, v_cache, row, lane, false);
}
