// copy_blocks, transfer_blocks, gather_blocks, scatter_blocks: whole KV blocks from here to there, in all layers, keys and
// values.
//
// The cache is seen as `planes` (layer, key or value) of `cache_blocks` blocks; a block is BLOCK_VECS vectors of 16 bytes
// and contiguous. The work is cut into tiles of THREADS * UNROLL vectors regardless of block borders, so that small
// blocks fill the threads as well as large ones do. Each thread issues all its loads before its first store: bandwidth
// needs bytes in flight.
//
// Defines: BLOCK_VECS = block_size * Hkv * D * 2 bytes / 16.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr int TILE = THREADS * UNROLL;

// from(plane, i) and to(plane, i) say which block, counted from the start of the source and target arrays, the i-th
// moved block of a plane comes from and goes to.
template <typename From, typename To>
__device__ __forceinline__ void move_tile(const uint4* __restrict__ source, uint4* __restrict__ target, int num_moved,
                                          int planes, From from, To to) {
  const u64 tile_start = (u64)blockIdx.x * TILE;
  const u64 first_block = tile_start / BLOCK_VECS;  // 64-bit division once per tile, 32-bit ones per vector
  const u32 first_vec = tile_start % BLOCK_VECS;
  const u64 total_blocks = (u64)num_moved * planes;
  uint4 data[UNROLL];
  i64 where[UNROLL];
#pragma unroll
  for (int j = 0; j < UNROLL; ++j) {
    const u32 offset = first_vec + j * THREADS + threadIdx.x;
    const u64 block = first_block + offset / BLOCK_VECS;
    const u32 vec = offset % BLOCK_VECS;
    where[j] = -1;
    if (block < total_blocks) {
      const u32 plane = (u32)block / num_moved;
      const u32 i = (u32)block % num_moved;
      data[j] = __ldcs(source + from(plane, i) * BLOCK_VECS + vec);
      where[j] = to(plane, i) * BLOCK_VECS + vec;
    }
  }
#pragma unroll
  for (int j = 0; j < UNROLL; ++j) {
    if (where[j] >= 0) __stcs(target + where[j], data[j]);
  }
}

// Source and target blocks are disjoint sets, so the order of the moves does not matter.
extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(uint4* cache, const i64* __restrict__ src, const i64* __restrict__ dst, int num_moved, int planes,
            i64 cache_blocks) {
  move_tile(cache, cache, num_moved, planes,
            [&](u32 plane, u32 i) { return plane * cache_blocks + src[i]; },
            [&](u32 plane, u32 i) { return plane * cache_blocks + dst[i]; });
}

// From one pool straight into another, which may hold another number of blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
transfer_blocks(const uint4* __restrict__ source, uint4* __restrict__ target, const i64* __restrict__ src,
                const i64* __restrict__ dst, int num_moved, int planes, i64 source_blocks, i64 target_blocks) {
  move_tile(source, target, num_moved, planes,
            [&](u32 plane, u32 i) { return plane * source_blocks + src[i]; },
            [&](u32 plane, u32 i) { return plane * target_blocks + dst[i]; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_blocks(const uint4* __restrict__ cache, uint4* __restrict__ staging, const i64* __restrict__ ids, int num_moved,
              int planes, i64 cache_blocks) {
  move_tile(cache, staging, num_moved, planes,
            [&](u32 plane, u32 i) { return plane * cache_blocks + ids[i]; },
            [&](u32 plane, u32 i) { return (i64)plane * num_moved + i; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
scatter_blocks(uint4* __restrict__ cache, const uint4* __restrict__ staging, const i64* __restrict__ ids, int num_moved,
               int planes, i64 cache_blocks) {
  move_tile(staging, cache, num_moved, planes,
            [&](u32 plane, u32 i) { return (i64)plane * num_moved + i; },
            [&](u32 plane, u32 i) { return plane * cache_blocks + ids[i]; });
}
