// Paged prefill attention for few queries behind many keys: split-KV (a question after a long document, say, or a new
// turn of a long chat: a few dozen tokens whose prefix is cached already).
//
// One block per tile of queries and head, as in attention_prefill_tiled.cu, would leave most of the GPU idle and walk over
// the whole context block by block. So the keys are divided, too: several blocks share a tile, each leaves a softmax
// average over its own keys, and the block that finishes last merges them, as in decode (attention_merge.cuh).
//
// * Rows: a query of each of the heads that share a key/value head is one row, so that 16 tokens of 4 heads fill a tile
//   of 64 rows and keys are read once for all of them. Row r of a sequence is query r / ratio, head r % ratio.
// * How many blocks share a tile is decided here, by the context's length; the grid only says how many could.
// * Within a block: the steps of the tiled kernel (attention_tile.cuh), with 16 rows a warp.
#include "attention_tile.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int TILE_ROWS = WARPS * 16;
constexpr int TILE_K = HEAD_DIM <= 128 ? 64 : 32;
constexpr int Q_BYTES = TILE_ROWS * ROW_BYTES;  // in shared memory, before the double buffer of PagedTiles
constexpr int MAX_SPLITS = 32;
constexpr int MIN_TILES = 4;       // smallest share worth a block: below it merging costs more
constexpr float LOWEST = -1e30f;  // below every score, yet finite: in its share of keys a row may see none at all

// Where a row of the result starts: out_rows(row). Weights of all pieces are worked out first, in shared memory.
template <typename OutRows>
__device__ __forceinline__ void merge_splits(OutRows out_rows, int num_rows, int splits, const float* partial_out,
                                             const float* partial_lse, float* weights) {
  if (threadIdx.x < num_rows) {
    float* own = weights + threadIdx.x * MAX_SPLITS;
    float largest = NEG_INF, sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < splits; ++i) {  // ldcg: from L2, since L1 does not see other SMs' writes
      own[i] = __ldcg(partial_lse + i * TILE_ROWS + threadIdx.x);
      largest = fmaxf(largest, own[i]);
    }
    for (int i = 0; i < splits; ++i) sum += own[i] = rescale(own[i], largest);
    for (int i = 0; i < splits; ++i) own[i] /= sum;
  }
  __syncthreads();
  for (int item = threadIdx.x; item < num_rows * (HEAD_DIM / 4); item += THREADS) {
    const int row = item / (HEAD_DIM / 4), column = item % (HEAD_DIM / 4) * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < splits; ++i) {
      const float weight = weights[row * MAX_SPLITS + i];
      const float4 o = __ldcg((const float4*)(partial_out + (i * TILE_ROWS + row) * HEAD_DIM + column));
      sum.x += weight * o.x;
      sum.y += weight * o.y;
      sum.z += weight * o.z;
      sum.w += weight * o.w;
    }
    *(uint2*)(out_rows(row) + column) = make_uint2(pack2<scalar>(sum.x, sum.y), pack2<scalar>(sum.z, sum.w));
  }
}

// grid (Hkv, S, ceil(max_seqlen_q * Hq / Hkv / TILE_ROWS) * max_splits), block THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_prefill_split(
    scalar* __restrict__ out,               // [T, Hq, D]
    float* partial_out,                     // [tiles, max_splits, TILE_ROWS, D]; a tile for each (z / max_splits, y, x)
    float* partial_lse,                     // [tiles, max_splits, TILE_ROWS] log2 of the sum of 2^score
    u32* arrived,                           // [tiles] zeros, and zeros again afterwards
    const scalar* __restrict__ q,           // [T, Hq, D], rows q_stride elements apart
    const scalar* __restrict__ k_cache,     // [num_blocks, BLOCK_SIZE, Hkv, D]
    const scalar* __restrict__ v_cache,     // same
    const int* __restrict__ block_tables,   // [S, max_blocks]
    const int* __restrict__ cu_seqlens_q,   // [S + 1] first query row of each sequence
    const int* __restrict__ context_lens,   // [S], the chunk included
    float scale, int q_stride, int max_blocks, int num_heads, int max_splits) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ i64 starts[2][TILE_K];  // where the keys of the next two tiles start
  const u32 q_tile = shared_address(shared);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

  const int kv_head = blockIdx.x, num_kv_heads = gridDim.x, ratio = num_heads / num_kv_heads, seq = blockIdx.y;
  const int q_start = __ldg(cu_seqlens_q + seq), q_len = __ldg(cu_seqlens_q + seq + 1) - q_start;
  const int first_row = blockIdx.z / max_splits * TILE_ROWS, num_rows = min(TILE_ROWS, q_len * ratio - first_row);
  if (num_rows <= 0) return;
  const int prefix = __ldg(context_lens + seq) - q_len;
  const int* block_table = block_tables + (i64)seq * max_blocks;
  const auto position_of = [&](int row) { return prefix + (first_row + row) / ratio; };
  const auto row_offset = [&](int row, int stride) {  // in q or out
    return (i64)(q_start + (first_row + row) / ratio) * stride +
           (kv_head * ratio + (first_row + row) % ratio) * HEAD_DIM;
  };
  const int num_keys = max(0, position_of(num_rows - 1) + 1), all_tiles = (num_keys + TILE_K - 1) / TILE_K;

  const int splits = max(1, min(max_splits, all_tiles / MIN_TILES)), split = blockIdx.z % max_splits;
  if (split >= splits) return;
  const int first_tile = all_tiles * split / splits, end_tile = all_tiles * (split + 1) / splits;

  const PagedTiles<TILE_K, THREADS> tiles{q_tile + Q_BYTES, starts,      k_cache,     v_cache,
                                          num_kv_heads,     kv_head,     block_table, num_keys};

#pragma unroll
  for (int i = 0; i < TILE_ROWS * ROW_CHUNKS / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / ROW_CHUNKS, chunk = (i * THREADS + threadIdx.x) % ROW_CHUNKS;
    const i64 at = row < num_rows ? row_offset(row, q_stride) + chunk * 8 : 0;
    copy16_async(q_tile + tile_offset(row, chunk), q + at, row < num_rows);
  }
  if (threadIdx.x < TILE_K) {
    starts[first_tile % 2][threadIdx.x] = tiles.start_of(first_tile);
    starts[(first_tile + 1) % 2][threadIdx.x] = tiles.start_of(first_tile + 1);
  }
  __syncthreads();
  if (first_tile < end_tile) tiles.fetch(first_tile);
  copy_commit();

  const int warp_row = warp * 16;
  const int warp_position = position_of(warp_row), last_position = position_of(min(warp_row + 15, num_rows - 1));
  const int positions[2] = {position_of(warp_row + g), position_of(warp_row + g + 8)};
  float acc[1][HEAD_DIM / 8][4] = {};
  float largest[1][2] = {LOWEST, LOWEST}, total[1][2] = {};  // of rows g and g + 8
  QueryFragments<1> q_frag;
  const float scale_log2 = scale * LOG2_E;
  const TileReader k_reader(lane / 16 * 8 + lane % 8, lane / 8 % 2), v_reader(lane % 16, lane / 16);
  const u32 q_rows = q_tile + warp_row * ROW_BYTES;

  for (int tile = first_tile; tile < end_tile; ++tile) {
    copy_wait<0>();
    __syncthreads();  // the tile is here for all warps, and all are done with the buffer that is refilled next
    if (tile + 1 < end_tile) tiles.fetch(tile + 1);
    copy_commit();
    const i64 next_start = threadIdx.x < TILE_K ? tiles.start_of(tile + 2) : 0;
    if (Q_IN_REGISTERS<1> && tile == first_tile) {
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) load_queries(q_frag[k], q_rows, v_reader, k);
    }

    const int first_key = tile * TILE_K;
    if (warp_row < num_rows && first_key <= last_position) {
      float scores[1][TILE_K / 8][4] = {};
      multiply_keys(scores, q_frag, q_rows, v_reader, tiles.k_tile(tile), k_reader, 0);
      if (first_key + TILE_K - 1 > warp_position) {  // the last key lies behind the first query
#pragma unroll
        for (int i = 0; i < TILE_K / 8 * 4; ++i) {
          const int n = i / 4, c = i % 4, key = first_key + n * 8 + 2 * t + c % 2;
          if (key > positions[c / 2]) scores[0][n][c] = NEG_INF;
        }
      }
      update_softmax(scores, acc, largest, total, scale_log2);
      multiply_values(acc, scores, tiles.v_tile(tile), v_reader, 0);
    }
    if (threadIdx.x < TILE_K) starts[tile % 2][threadIdx.x] = next_start;  // read after the next barrier
  }
  copy_wait<0>();

  const auto out_rows = [&](int row) { return out + row_offset(row, num_heads * HEAD_DIM); };
  const i64 tile_index = (i64)(blockIdx.z / max_splits * gridDim.y + seq) * num_kv_heads + kv_head;
  partial_out += tile_index * max_splits * TILE_ROWS * HEAD_DIM;
  partial_lse += tile_index * max_splits * TILE_ROWS;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + g + r * 8;
    const float sum = warp_sum<4>(total[0][r]), inverse = sum > 0.f ? 1.f / sum : 0.f;  // no context: zeros
    if (row >= num_rows) continue;
    if (splits == 1) {
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *(u32*)(out_rows(row) + n * 8 + 2 * t) = pack2<scalar>(acc[0][n][2 * r] * inverse, acc[0][n][2 * r + 1] * inverse);
    } else {
      const int at = split * TILE_ROWS + row;
      if (t == 0) partial_lse[at] = sum > 0.f ? largest[0][r] * scale_log2 + log2f(sum) : NEG_INF;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *(float2*)(partial_out + at * HEAD_DIM + n * 8 + 2 * t) =
            make_float2(acc[0][n][2 * r] * inverse, acc[0][n][2 * r + 1] * inverse);
    }
  }
  if (splits == 1) return;
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_in(arrived + tile_index, splits - 1);
  __syncthreads();
  if (last) merge_splits(out_rows, num_rows, splits, partial_out, partial_lse, (float*)shared);
}
