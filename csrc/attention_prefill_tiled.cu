// Paged prefill attention, tiled, on tensor cores: FlashAttention-2 (Dao 2023) over a block table.
//
// A block holds TILE_Q queries of one head in shared memory and walks over the keys they can see: LOAD_K at a time come
// into shared memory, TILE_K at a time are multiplied. Each key row is loaded once per TILE_Q queries. How a tile is
// fetched, multiplied and put through the softmax is in attention_tile.cuh.
//
// * Prefix: query i of n stands at position context_len - n + i. Masking compares positions, so a chunk after a cached
//   prefix, a whole prompt, and a single token are the same case.
// * While a tile is being used, the next one is on its way into the other half of the double buffer.
// * A warp owns ROW_TILES * 16 queries. With 2, every K or V fragment read from shared memory feeds two products; with 1,
//   shared memory is what limits the tensor cores, but short chunks and small grids waste less.
//
// Macros beyond those of attention_common.cuh, chosen by the host: WARPS (4 or 8), ROW_TILES (1 or 2), LOAD_K.
#include "attention_tile.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILE_Q = WARPS * ROW_TILES * 16;
constexpr int MOST_K = HEAD_DIM <= 64 ? 64 : 64 / ROW_TILES;  // scores take 32 registers, or 64 where sums leave room
constexpr int TILE_K = LOAD_K < MOST_K ? LOAD_K : MOST_K;
constexpr int Q_BYTES = TILE_Q * ROW_BYTES;  // in shared memory, before the double buffer of PagedTiles

// grid (Hq, S, ceil(max_seqlen_q / TILE_Q)), block THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_prefill_tiled(
    scalar* __restrict__ out,               // [T, Hq, D]
    const scalar* __restrict__ q,           // [T, Hq, D], rows q_stride elements apart
    const scalar* __restrict__ k_cache,     // [num_blocks, BLOCK_SIZE, Hkv, D]
    const scalar* __restrict__ v_cache,     // same
    const int* __restrict__ block_tables,   // [S, max_blocks]
    const int* __restrict__ cu_seqlens_q,   // [S + 1] first query row of each sequence
    const int* __restrict__ context_lens,   // [S], the chunk included
    float scale, int q_stride, int max_blocks, int num_kv_heads) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ i64 starts[2][LOAD_K];  // where the keys of the next two tiles start
  const u32 q_tile = shared_address(shared);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

  // Neighbouring blocks are the heads of one query tile: those that share a key/value head find it in L2. Late tiles see
  // the most keys and start first, so that no long block is left for the end.
  const int head = blockIdx.x, num_heads = gridDim.x, seq = blockIdx.y;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int q_start = __ldg(cu_seqlens_q + seq), q_len = __ldg(cu_seqlens_q + seq + 1) - q_start;
  const int first_query = (gridDim.z - 1 - blockIdx.z) * TILE_Q;
  if (first_query >= q_len) return;
  const int context_len = __ldg(context_lens + seq);
  const int* block_table = block_tables + (i64)seq * max_blocks;
  const int first_position = context_len - q_len + first_query;  // position of the tile's first query
  const int num_keys = max(0, min(context_len, first_position + TILE_Q));
  const int num_tiles = (num_keys + LOAD_K - 1) / LOAD_K;

  const PagedTiles<LOAD_K, THREADS> tiles{q_tile + Q_BYTES, starts,      k_cache,     v_cache,
                                          num_kv_heads,     kv_head,     block_table, num_keys};

#pragma unroll
  for (int i = 0; i < TILE_Q * ROW_CHUNKS / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / ROW_CHUNKS, chunk = (i * THREADS + threadIdx.x) % ROW_CHUNKS;
    const bool valid = first_query + row < q_len;
    const i64 at = valid ? (i64)(q_start + first_query + row) * q_stride + head * HEAD_DIM + chunk * 8 : 0;
    copy16_async(q_tile + tile_offset(row, chunk), q + at, valid);
  }
  if (threadIdx.x < LOAD_K) {
    starts[0][threadIdx.x] = tiles.start_of(0);
    starts[1][threadIdx.x] = tiles.start_of(1);
  }
  __syncthreads();
  if (num_tiles > 0) tiles.fetch(0);
  copy_commit();

  const int warp_row = warp * ROW_TILES * 16;                // the warp's first query in the tile
  const bool warp_has_queries = first_query + warp_row < q_len;
  const int warp_position = first_position + warp_row;       // and its position
  float acc[ROW_TILES][HEAD_DIM / 8][4] = {};
  float largest[ROW_TILES][2], total[ROW_TILES][2] = {};     // of rows g and g + 8 of each row tile
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) largest[m][0] = largest[m][1] = NEG_INF;
  QueryFragments<ROW_TILES> q_frag;
  const float scale_log2 = scale * LOG2_E;

  const TileReader k_reader(lane / 16 * 8 + lane % 8, lane / 8 % 2), v_reader(lane % 16, lane / 16);
  const u32 q_rows = q_tile + warp_row * ROW_BYTES;

  // TILE_K keys from row `start` of a K tile and a V tile on. Compiled twice: only tiles on the diagonal pay for masking.
  const auto process = [&](u32 k_tile, u32 v_tile, int start, int first_key, bool masked) {
    float scores[ROW_TILES][TILE_K / 8][4] = {};
    multiply_keys(scores, q_frag, q_rows, v_reader, k_tile, k_reader, start);
    if (masked) {  // that is, if (first_key + TILE_K - 1 > warp_position): the last key lies behind the first query
#pragma unroll
      for (int i = 0; i < ROW_TILES * TILE_K / 8 * 4; ++i) {
        const int m = i / (TILE_K / 2), n = i / 4 % (TILE_K / 8), c = i % 4;
        const int position = warp_position + m * 16 + g + c / 2 * 8, key = first_key + n * 8 + 2 * t + c % 2;
        if (key > position) scores[m][n][c] = NEG_INF;
      }
    }
    update_softmax(scores, acc, largest, total, scale_log2);
    multiply_values(acc, scores, v_tile, v_reader, start);
  };

  for (int tile = 0; tile < num_tiles; ++tile) {
    copy_wait<0>();
    __syncthreads();  // the tile is here for all warps, and all are done with the buffer that is refilled next
    if (tile + 1 < num_tiles) tiles.fetch(tile + 1);
    copy_commit();
    const i64 next_start = threadIdx.x < LOAD_K ? tiles.start_of(tile + 2) : 0;
    if (Q_IN_REGISTERS<ROW_TILES> && tile == 0) {
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) load_queries(q_frag[k], q_rows, v_reader, k);
    }

    const u32 k_tile = tiles.k_tile(tile), v_tile = tiles.v_tile(tile);
#pragma unroll 1  // unrolled, the body would outgrow the instruction cache
    for (int start = 0; start < LOAD_K; start += TILE_K) {
      const int first_key = tile * LOAD_K + start;
      // Nothing to do where all keys lie behind all of the warp's queries (the corner of a tile on the diagonal).
      if (!warp_has_queries || first_key > warp_position + ROW_TILES * 16 - 1) continue;
      if (first_key + TILE_K - 1 > warp_position) process(k_tile, v_tile, start, first_key, true);
      else process(k_tile, v_tile, start, first_key, false);
    }
    if (threadIdx.x < LOAD_K) starts[tile % 2][threadIdx.x] = next_start;  // read after the next barrier
  }
  copy_wait<0>();

#pragma unroll
  for (int i = 0; i < ROW_TILES * 2; ++i) {
    const int m = i / 2, r = i % 2, query = first_query + warp_row + m * 16 + g + r * 8;
    const float sum = warp_sum<4>(total[m][r]), inverse = sum > 0.f ? 1.f / sum : 0.f;  // no context: zeros
    scalar* row = out + ((i64)(q_start + query) * num_heads + head) * HEAD_DIM + 2 * t;
    if (query < q_len) {
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *(u32*)(row + n * 8) = pack2<scalar>(acc[m][n][2 * r] * inverse, acc[m][n][2 * r + 1] * inverse);
    }
  }
}
