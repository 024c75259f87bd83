// Paged decode attention, second version: a warp takes tokens on its own, without barriers.
//
// A key row is HEAD_DIM * 2 bytes; a lane loads 16 of them, so LANES neighbouring lanes hold one row and a warp holds
// 32 / LANES rows at once. The dot product is summed by shuffles among those lanes: no barrier, no shared memory. Each
// group of lanes runs its own online softmax over every GROUPS-th token, UNROLL tokens at a time so that 2 * UNROLL loads
// per lane are in flight together. Only at the end do the groups meet, once, in shared memory.
//
// What is left to gain: a long context still sits in one block (a small batch leaves most SMs idle), and with
// grouped-query attention every query head loads its keys and values again. attention_decode_split.cu does both.
#include "attention_common.cuh"

constexpr int WARPS = 8;
constexpr int CHUNKS = HEAD_DIM / 8;                                       // 16-byte chunks of a row
constexpr int LANES = CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32;           // per row; HEAD_DIM 96 leaves 4 of 16 unused
constexpr int GROUPS = WARPS * WARP / LANES;                               // rows the block holds at once
constexpr int UNROLL = 4;

// grid (Hq, B), block WARPS * 32 threads.
extern "C" __global__ void __launch_bounds__(WARPS * WARP) attention_decode_warp(
    scalar* __restrict__ out,               // [B, Hq, D]
    const scalar* __restrict__ q,           // [B, Hq, D], rows q_stride elements apart
    const scalar* __restrict__ k_cache,     // [num_blocks, BLOCK_SIZE, Hkv, D]
    const scalar* __restrict__ v_cache,     // same
    const int* __restrict__ block_tables,   // [B, max_blocks]
    const int* __restrict__ context_lens,   // [B]
    float scale, int q_stride, int max_blocks, int num_kv_heads) {
  __shared__ float group_acc[GROUPS][HEAD_DIM];
  __shared__ float group_max[GROUPS], group_sum[GROUPS];
  const int head = blockIdx.x, num_heads = gridDim.x, seq = blockIdx.y;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int context_len = context_lens[seq];
  const int* block_table = block_tables + (i64)seq * max_blocks;
  const int group = threadIdx.x / LANES, chunk = threadIdx.x % LANES;
  const bool has_chunk = chunk < CHUNKS;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  float q_part[8];
  unpack8<scalar>(has_chunk ? load16(q + (i64)seq * q_stride + head * HEAD_DIM + chunk * 8) : zero, q_part);

  float largest = NEG_INF, sum = 0.f, acc[8] = {};
  // All lanes of a warp run the same number of rounds, since shuffles need them all; tokens past the end score -inf.
  for (int first = 0; first < context_len; first += GROUPS * UNROLL) {
    uint4 k[UNROLL], v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {  // all loads first: they do not wait for one another
      const int token = first + u * GROUPS + group;
      k[u] = v[u] = zero;
      if (has_chunk && token < context_len) {
        const i64 at = ((i64)cache_row(block_table, token) * num_kv_heads + kv_head) * HEAD_DIM + chunk * 8;
        k[u] = load16(k_cache + at);
        v[u] = load16(v_cache + at);
      }
    }
    float score[UNROLL], new_largest = largest;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float k_part[8], dot = 0.f;
      unpack8<scalar>(k[u], k_part);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += q_part[i] * k_part[i];
      score[u] = warp_sum<LANES>(dot) * (scale * LOG2_E);
      if (first + u * GROUPS + group >= context_len) score[u] = NEG_INF;
      new_largest = fmaxf(new_largest, score[u]);
    }
    const float keep = rescale(largest, new_largest);
    sum *= keep;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] *= keep;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float v_part[8];
      unpack8<scalar>(v[u], v_part);
      const float p = rescale(score[u], new_largest);
      sum += p;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[i] += p * v_part[i];
    }
    largest = new_largest;
  }

  // Merge the groups.
  if (has_chunk) {
#pragma unroll
    for (int i = 0; i < 8; ++i) group_acc[group][chunk * 8 + i] = acc[i];
  }
  if (chunk == 0) {
    group_max[group] = largest;
    group_sum[group] = sum;
  }
  __syncthreads();
  float merged_max = NEG_INF;
  for (int g = 0; g < GROUPS; ++g) merged_max = fmaxf(merged_max, group_max[g]);
  for (int d = threadIdx.x; d < HEAD_DIM; d += WARPS * WARP) {
    float merged_sum = 0.f, merged_acc = 0.f;
    for (int g = 0; g < GROUPS; ++g) {
      const float factor = rescale(group_max[g], merged_max);
      merged_sum += group_sum[g] * factor;
      merged_acc += group_acc[g][d] * factor;
    }
    out[((i64)seq * num_heads + head) * HEAD_DIM + d] = from_float<scalar>(context_len > 0 ? merged_acc / merged_sum : 0.f);
  }
}
