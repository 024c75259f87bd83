// The step that attention_prefill_tiled.cu and attention_prefill_split.cu repeat, FlashAttention-2's (Dao 2023): a tile of
// keys and values comes out of the paged cache into shared memory, and warps fold it into the sums of their queries.
//
// * Paged: a tile of keys is gathered row by row through the block table. Rows are 128 bytes or more, so this costs
//   nothing in bandwidth; the table is read one tile ahead, off the critical path.
// * Scores never leave registers: the product Q K^T is laid out like the left operand of the product with V, and an online
//   softmax rescales what was summed before.
// * Steps are templates over how many queries a warp has, row_tiles * 16: row tiles share each fragment of K or V.
#pragma once
#include "attention_mma.cuh"

// ---- tiles out of the paged cache -----------------------------------------------------------------------------------

// Tiles of `tokens` rows of K and of V, for one key/value head, in a double buffer in shared memory: while one tile is used,
// cp.async brings the next.
template <int tokens, int threads> struct PagedTiles {
  static constexpr int BYTES = tokens * ROW_BYTES;  // of a tile of K, or of V
  u32 buffer;                    // 2 * (BYTES for K + BYTES for V)
  i64 (&starts)[2][tokens];      // where the rows of the next two tiles start in a cache, in bytes
  const scalar *k_cache, *v_cache;
  int num_kv_heads, kv_head;
  const int* block_table;
  int num_keys;

  __device__ __forceinline__ u32 k_tile(int tile) const { return buffer + tile % 2 * 2 * BYTES; }
  __device__ __forceinline__ u32 v_tile(int tile) const { return k_tile(tile) + BYTES; }
  // For thread i < tokens: where the row of token i of the tile starts.
  __device__ __forceinline__ i64 start_of(int tile) const {
    const int token = tile * tokens + threadIdx.x;
    return token < num_keys ? ((i64)cache_row(block_table, token) * num_kv_heads + kv_head) * ROW_BYTES : 0;
  }
  // Sends for a tile whose rows stand in `starts`. Runs between products, so it must be short: addresses are ready.
  __device__ __forceinline__ void fetch(int tile) const {
#pragma unroll
    for (int i = 0; i < tokens * ROW_CHUNKS / threads; ++i) {
      const int token = (i * threads + threadIdx.x) / ROW_CHUNKS, chunk = (i * threads + threadIdx.x) % ROW_CHUNKS;
      const i64 at = starts[tile % 2][token] + chunk * 16;
      const bool valid = token < num_keys - tile * tokens;  // past the end: zeros, never NaN
      copy16_async(k_tile(tile) + tile_offset(token, chunk), (const char*)k_cache + at, valid);
      copy16_async(v_tile(tile) + tile_offset(token, chunk), (const char*)v_cache + at, valid);
    }
  }
};

// ---- what a warp does with a tile -----------------------------------------------------------------------------------
//
// `scores` are those of row_tiles * 16 queries and eights * 8 keys, `acc` sums over all keys so far. Of each row tile a
// lane holds parts of rows g and g + 8, and of each 8 columns two (attention_mma.cuh).

// Q as the left operand. Where that would take 64 registers which the sums need, it is reread from shared memory instead.
template <int row_tiles> constexpr bool Q_IN_REGISTERS = row_tiles * HEAD_DIM <= 128;
template <int row_tiles> using QueryFragments = u32[Q_IN_REGISTERS<row_tiles> ? HEAD_DIM / 16 : 1][row_tiles][4];

// `q_rows`: the warp's first row of Q in shared memory.
template <int row_tiles>
__device__ __forceinline__ void load_queries(u32 (&fragment)[row_tiles][4], u32 q_rows, const TileReader& q_reader, int k) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) load_matrices(fragment[m], q_reader.at(q_rows, m * 16, k));
}

// scores += Q K^T, for keys from row `start` of a K tile on.
template <int row_tiles, int eights>
__device__ __forceinline__ void multiply_keys(float (&scores)[row_tiles][eights][4], QueryFragments<row_tiles>& q_frag,
                                              u32 q_rows, const TileReader& q_reader, u32 k_tile,
                                              const TileReader& k_reader, int start) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    u32 (&a)[row_tiles][4] = q_frag[Q_IN_REGISTERS<row_tiles> ? k : 0];
    if (!Q_IN_REGISTERS<row_tiles>) load_queries(a, q_rows, q_reader, k);
#pragma unroll
    for (int n = 0; n < eights / 2; ++n) {
      u32 b[4];
      load_matrices(b, k_reader.at(k_tile, start + n * 16, k));
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        mma_16x8x16<scalar>(scores[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16<scalar>(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Scores become probabilities, not yet divided by their sum. `largest` and `total`: of rows g and g + 8 of each row tile.
// The same for one row tile is OnlineSoftmax (attention_softmax.cuh); here the row tiles go in step.
template <int row_tiles, int eights>
__device__ __forceinline__ void update_softmax(float (&scores)[row_tiles][eights][4],
                                               float (&acc)[row_tiles][HEAD_DIM / 8][4], float (&largest)[row_tiles][2],
                                               float (&total)[row_tiles][2], float scale_log2) {
  // Any reference will do that keeps exponentials in range, so it moves, and all sums are rescaled, only when some
  // maximum has outgrown it by 2^8. After the first few tiles that is rare (the idea is FlashAttention-4's).
  // The new reference is finite: `largest` began finite (split), or each row saw key 0 in its first tile (tiled).
  float seen[row_tiles][2];
  bool outgrown = false;
#pragma unroll
  for (int i = 0; i < row_tiles * 2; ++i) {
    const int m = i / 2, r = i % 2;
    float new_largest = largest[m][r];
#pragma unroll
    for (int n = 0; n < eights; ++n)
      new_largest = fmaxf(new_largest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
    outgrown |= (new_largest - largest[m][r]) * scale_log2 > 8.f;
    seen[m][r] = new_largest;  // by this lane
  }
  if (__any_sync(FULL_MASK, outgrown)) {
#pragma unroll
    for (int i = 0; i < row_tiles * 2; ++i) {
      const int m = i / 2, r = i % 2;
      const float new_largest = warp_max<4>(seen[m][r]);
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
  for (int i = 0; i < row_tiles * 2; ++i) {
    const int m = i / 2, r = i % 2;
    const float offset = largest[m][r] * scale_log2;
#pragma unroll
    for (int n = 0; n < eights; ++n) {
#pragma unroll
      for (int c = 2 * r; c < 2 * r + 2; ++c) {
        scores[m][n][c] = exp2_fast(scores[m][n][c] * scale_log2 - offset);
        total[m][r] += scores[m][n][c];  // this lane's keys only; lanes are added at the end
      }
    }
  }
}

// acc += P V, for values from row `start` of a V tile on.
template <int row_tiles, int eights>
__device__ __forceinline__ void multiply_values(float (&acc)[row_tiles][HEAD_DIM / 8][4],
                                                const float (&scores)[row_tiles][eights][4], u32 v_tile,
                                                const TileReader& v_reader, int start) {
#pragma unroll
  for (int k = 0; k < eights / 2; ++k) {
    u32 p[row_tiles][4];
#pragma unroll
    for (int i = 0; i < row_tiles * 4; ++i) {  // C of two neighbouring 8-key tiles is A of one 16-key product
      const float* s = scores[i / 4][2 * k + i % 4 / 2] + i % 2 * 2;
      p[i / 4][i % 4] = pack2<scalar>(s[0], s[1]);
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      u32 b[4];
      load_matrices_transposed(b, v_reader.at(v_tile, start + k * 16, n));
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        mma_16x8x16<scalar>(acc[m][2 * n], p[m], b[0], b[1]);
        mma_16x8x16<scalar>(acc[m][2 * n + 1], p[m], b[2], b[3]);
      }
    }
  }
}
