// Paged prefill attention, tiled, on tensor cores: FlashAttention-2 (Dao 2023) over a block table.
//
// A block holds TILE_Q queries of one head in shared memory and walks over the keys they can see: LOAD_K at a time come
// into shared memory, TILE_K at a time are multiplied. Scores never leave registers: the product Q K^T is laid out like
// the left operand of the product with V, and an online softmax rescales what was summed before. Each key row is loaded
// once per TILE_Q queries.
//
// * Paged: a tile of keys is gathered row by row through the block table. Rows are 128 bytes or more, so this costs
//   nothing in bandwidth; the table is read one tile ahead, off the critical path.
// * Prefix: query i of n stands at position context_len - n + i. Masking compares positions, so a chunk after a cached
//   prefix, a whole prompt, and a single token are the same case.
// * While a tile is being used, cp.async brings the next one into the other half of the double buffer.
// * A warp owns ROW_TILES * 16 queries. With 2, every K or V fragment read from shared memory feeds two products; with 1,
//   shared memory is what limits the tensor cores, but short chunks and small grids waste less.
//
// Macros beyond those of attention_common.cuh, chosen by the host: WARPS (4 or 8), ROW_TILES (1 or 2), LOAD_K.
#include "attention_mma.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILE_Q = WARPS * ROW_TILES * 16;
constexpr int TILE_K = ROW_TILES * LOAD_K < 64 ? LOAD_K : 64 / ROW_TILES;  // so that scores take 32 registers
constexpr int Q_BYTES = TILE_Q * ROW_BYTES;
constexpr int K_BYTES = LOAD_K * ROW_BYTES;        // shared memory: Q_BYTES + 2 * (K_BYTES for K + K_BYTES for V)
constexpr bool Q_IN_REGISTERS = ROW_TILES * HEAD_DIM <= 128;  // else 64 registers that the sums need: reread instead

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
  __shared__ int cache_rows[2][LOAD_K];  // where the tokens of the next two tiles are; -1 past the end
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

  const auto row_of = [&](int tile) {  // for thread i < LOAD_K: token i of the tile
    const int token = tile * LOAD_K + threadIdx.x;
    return token < num_keys ? cache_row(block_table, token) : -1;
  };
  const auto fetch = [&](int tile) {
    const u32 k_tile = q_tile + Q_BYTES + tile % 2 * 2 * K_BYTES;
#pragma unroll
    for (int i = 0; i < LOAD_K * ROW_CHUNKS / THREADS; ++i) {
      const int token = (i * THREADS + threadIdx.x) / ROW_CHUNKS, chunk = (i * THREADS + threadIdx.x) % ROW_CHUNKS;
      const int row = cache_rows[tile % 2][token];
      const i64 at = row < 0 ? 0 : ((i64)row * num_kv_heads + kv_head) * HEAD_DIM + chunk * 8;
      copy16_async(k_tile + tile_offset(token, chunk), k_cache + at, row >= 0);  // rows past the end: zeros, never NaN
      copy16_async(k_tile + K_BYTES + tile_offset(token, chunk), v_cache + at, row >= 0);
    }
  };

#pragma unroll
  for (int i = 0; i < TILE_Q * ROW_CHUNKS / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / ROW_CHUNKS, chunk = (i * THREADS + threadIdx.x) % ROW_CHUNKS;
    const bool valid = first_query + row < q_len;
    const i64 at = valid ? (i64)(q_start + first_query + row) * q_stride + head * HEAD_DIM + chunk * 8 : 0;
    copy16_async(q_tile + tile_offset(row, chunk), q + at, valid);
  }
  if (threadIdx.x < LOAD_K) {
    cache_rows[0][threadIdx.x] = row_of(0);
    cache_rows[1][threadIdx.x] = row_of(1);
  }
  __syncthreads();
  if (num_tiles > 0) fetch(0);
  copy_commit();

  const int warp_row = warp * ROW_TILES * 16;                // the warp's first query in the tile
  const bool warp_has_queries = first_query + warp_row < q_len;
  const int warp_position = first_position + warp_row;       // and its position
  float acc[ROW_TILES][HEAD_DIM / 8][4] = {};
  float largest[ROW_TILES][2], total[ROW_TILES][2] = {};     // of rows g and g + 8 of each row tile
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) largest[m][0] = largest[m][1] = NEG_INF;
  u32 q_frag[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][ROW_TILES][4];
  const float scale_log2 = scale * LOG2_E;

  const TileReader k_reader(lane / 16 * 8 + lane % 8, lane / 8 % 2), v_reader(lane % 16, lane / 16);
  const u32 q_rows = q_tile + warp_row * ROW_BYTES;

  // TILE_K keys from row `start` of a K tile and a V tile on. Compiled twice: only tiles on the diagonal pay for masking.
  const auto process = [&](u32 k_tile, u32 v_tile, int start, int first_key, bool masked) {
    float scores[ROW_TILES][TILE_K / 8][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      u32 (&a)[ROW_TILES][4] = q_frag[Q_IN_REGISTERS ? k : 0];
      if (!Q_IN_REGISTERS) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) load_matrices(a[m], v_reader.at(q_rows, m * 16, k));
      }
#pragma unroll
      for (int n = 0; n < TILE_K / 16; ++n) {
        u32 b[4];
        load_matrices(b, k_reader.at(k_tile, start + n * 16, k));
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          mma_16x8x16<scalar>(scores[m][2 * n], a[m], b[0], b[1]);
          mma_16x8x16<scalar>(scores[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }

    if (masked) {  // that is, if (first_key + TILE_K - 1 > warp_position): the last key lies behind the first query
#pragma unroll
      for (int i = 0; i < ROW_TILES * TILE_K / 8 * 4; ++i) {
        const int m = i / (TILE_K / 2), n = i / 4 % (TILE_K / 8), c = i % 4;
        const int position = warp_position + m * 16 + g + c / 2 * 8, key = first_key + n * 8 + 2 * t + c % 2;
        if (key > position) scores[m][n][c] = NEG_INF;
      }
    }

    // Any reference will do that keeps exponentials in range, so it moves, and all sums are rescaled, only when some
    // maximum has outgrown it by 2^8. After the first few tiles that is rare (the idea is FlashAttention-4's).
    float seen[ROW_TILES][2];
    bool outgrown = false;
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
      const int m = i / 2, r = i % 2;
      float new_largest = largest[m][r];
#pragma unroll
      for (int n = 0; n < TILE_K / 8; ++n)
        new_largest = fmaxf(new_largest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
      outgrown |= (new_largest - largest[m][r]) * scale_log2 > 8.f;
      seen[m][r] = new_largest;  // by this lane
    }
    if (__any_sync(FULL_MASK, outgrown)) {
#pragma unroll
      for (int i = 0; i < ROW_TILES * 2; ++i) {
        const int m = i / 2, r = i % 2;
        const float new_largest = warp_max<4>(seen[m][r]);  // finite: every query sees key 0, which comes first
        const float keep = exp2_fast((largest[m][r] - new_largest) * scale_log2);
        largest[m][r] = new_largest;
        total[m][r] *= keep;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
          acc[m][n][2 * r] *= keep;
          acc[m][n][2 * r + 1] *= keep;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
      const int m = i / 2, r = i % 2;
      const float offset = largest[m][r] * scale_log2;
#pragma unroll
      for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
        for (int c = 2 * r; c < 2 * r + 2; ++c) {
          scores[m][n][c] = exp2_fast(scores[m][n][c] * scale_log2 - offset);
          total[m][r] += scores[m][n][c];  // this lane's keys only; lanes are added at the end
        }
      }
    }

#pragma unroll
    for (int k = 0; k < TILE_K / 16; ++k) {
      u32 p[ROW_TILES][4];
#pragma unroll
      for (int i = 0; i < ROW_TILES * 4; ++i) {  // C of two neighbouring 8-key tiles is A of one 16-key product
        const float* s = scores[i / 4][2 * k + i % 4 / 2] + i % 2 * 2;
        p[i / 4][i % 4] = pack2<scalar>(s[0], s[1]);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) {
        u32 b[4];
        load_matrices_transposed(b, v_reader.at(v_tile, start + k * 16, n));
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          mma_16x8x16<scalar>(acc[m][2 * n], p[m], b[0], b[1]);
          mma_16x8x16<scalar>(acc[m][2 * n + 1], p[m], b[2], b[3]);
        }
      }
    }
  };

  for (int tile = 0; tile < num_tiles; ++tile) {
    copy_wait<0>();
    __syncthreads();  // the tile is here for all warps, and all are done with the buffer that is refilled next
    if (tile + 1 < num_tiles) fetch(tile + 1);
    copy_commit();
    const int next_row = threadIdx.x < LOAD_K ? row_of(tile + 2) : -1;
    if (Q_IN_REGISTERS && tile == 0) {
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k)
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) load_matrices(q_frag[k][m], v_reader.at(q_rows, m * 16, k));
    }

    const u32 k_tile = q_tile + Q_BYTES + tile % 2 * 2 * K_BYTES, v_tile = k_tile + K_BYTES;
#pragma unroll 1  // unrolled, the body would outgrow the instruction cache
    for (int start = 0; start < LOAD_K; start += TILE_K) {
      const int first_key = tile * LOAD_K + start;
      // Nothing to do where all keys lie behind all of the warp's queries (the corner of a tile on the diagonal).
      if (!warp_has_queries || first_key > warp_position + ROW_TILES * 16 - 1) continue;
      if (first_key + TILE_K - 1 > warp_position) process(k_tile, v_tile, start, first_key, true);
      else process(k_tile, v_tile, start, first_key, false);
    }
    if (threadIdx.x < LOAD_K) cache_rows[tile % 2][threadIdx.x] = next_row;  // read after the next barrier
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
