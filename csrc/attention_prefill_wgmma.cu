// Paged prefill attention on Hopper (sm_90a): the tiled kernel with wgmma, the tensor-core instruction of a warpgroup.
//
// mma.sync reaches about 60 % of what Hopper's tensor cores can do: each warp must first bring both operands into
// registers. wgmma is issued by four warps together, reads its right operand from shared memory by itself, and runs in the
// background. The left operand (Q, then the probabilities) and the sums stay in registers, laid out as for mma.sync, so the
// softmax is that of attention_prefill_tiled.cu.
//
// * One idea: while the tensor cores multiply the probabilities of tile j with V, the other units compute the softmax of
//   tile j + 1, whose scores were multiplied just before (FlashAttention-3, Shah et al. 2024, within a warpgroup).
// * K of tile j + 2 and V of tile j + 1 arrive meanwhile by cp.async, gathered row by row through the block table.
#include "attention_mma.cuh"

constexpr int THREADS = 256;                        // two warpgroups of 64 queries
constexpr int TILE_Q = 128;
constexpr int TILE_K = 128;
constexpr int HALVES = HEAD_DIM / 64;               // wgmma's swizzle takes rows of 128 bytes: a tile is cut into halves
constexpr int HALF_BYTES = TILE_K * 128;            // [128 rows, 64 dims]
constexpr int TILE_BYTES = HALVES * HALF_BYTES;     // shared memory: Q, K twice, V twice, and 1024 to align them

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// Right operand in shared memory, 128-byte rows swizzled as by half_offset; groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// C [64 x 64] = (add ? C : 0) + A [64 x 16] B [16 x 64]. `by_rows`: B's rows, not its columns, are contiguous (V).
#define DEFINE_WGMMA(T, NAME)                                                                                            \
  template <int by_rows> struct Wgmma##T {                                                                               \
    static __device__ __forceinline__ void run(float (&c)[32], const u32 (&a)[4], u64 b, int add) {                      \
      asm volatile(                                                                                                      \
          "{ .reg .pred p; setp.ne.b32 p, %37, 0;"                                                                       \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                                    \
          " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
          "%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"                                                        \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),              \
            "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),        \
            "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),      \
            "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])       \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(by_rows));                                 \
    }                                                                                                                    \
  };
DEFINE_WGMMA(bf16, "bf16")
DEFINE_WGMMA(fp16, "f16")
#define WGMMA_OF(T) WGMMA_JOIN(T)
#define WGMMA_JOIN(T) Wgmma##T

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups run. The compiler must not use `c` earlier than that, nor keep it elsewhere.
template <int PENDING, int n> __device__ __forceinline__ void wgmma_wait(float (&c)[n][32]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < n * 32; ++i) asm volatile("" : "+f"(c[i / 32][i % 32])::"memory");
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 half_offset(int row, int chunk) {  // as tile_offset, for halves of a row
  return chunk / 8 * HALF_BYTES + row * 128 + ((chunk % 8 ^ row % 8) * 16);
}

// grid (Hq, S, ceil(max_seqlen_q / TILE_Q)), block THREADS threads. Arguments as for attention_prefill_tiled.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_wgmma(
    scalar* __restrict__ out, const scalar* __restrict__ q, const scalar* __restrict__ k_cache,
    const scalar* __restrict__ v_cache, const int* __restrict__ block_tables, const int* __restrict__ cu_seqlens_q,
    const int* __restrict__ context_lens, float scale, int q_stride, int max_blocks, int num_kv_heads) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int cache_rows[4][TILE_K];  // where the tokens of the next tiles are; -1 past the end
  const u32 q_tile = (shared_address(shared) + 1023) / 1024 * 1024, k_ring = q_tile + TILE_BYTES;
  const u32 v_ring = k_ring + 2 * TILE_BYTES;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

  const int head = blockIdx.x, num_heads = gridDim.x, seq = blockIdx.y;
  const int kv_head = head / (num_heads / num_kv_heads);
  const int q_start = __ldg(cu_seqlens_q + seq), q_len = __ldg(cu_seqlens_q + seq + 1) - q_start;
  const int first_query = (gridDim.z - 1 - blockIdx.z) * TILE_Q;  // long blocks first
  if (first_query >= q_len) return;
  const int context_len = __ldg(context_lens + seq);
  const int* block_table = block_tables + (i64)seq * max_blocks;
  const int first_position = context_len - q_len + first_query;
  const int num_keys = max(0, min(context_len, first_position + TILE_Q));
  const int num_tiles = (num_keys + TILE_K - 1) / TILE_K;

  const auto find_rows = [&](int tile) {
    const int token = tile * TILE_K + threadIdx.x;
    if (threadIdx.x < TILE_K) cache_rows[tile % 4][threadIdx.x] = token < num_keys ? cache_row(block_table, token) : -1;
  };
  const auto fetch = [&](u32 ring, const scalar* cache, int tile) {
    if (tile >= num_tiles) return;
#pragma unroll
    for (int i = 0; i < TILE_K * ROW_CHUNKS / THREADS; ++i) {
      const int token = (i * THREADS + threadIdx.x) / ROW_CHUNKS, chunk = (i * THREADS + threadIdx.x) % ROW_CHUNKS;
      const int row = cache_rows[tile % 4][token];
      const i64 at = row < 0 ? 0 : ((i64)row * num_kv_heads + kv_head) * HEAD_DIM + chunk * 8;
      copy16_async(ring + tile % 2 * TILE_BYTES + half_offset(token, chunk), cache + at, row >= 0);
    }
  };
  const auto arrived = [&]() {  // all copies of all threads, visible to wgmma
    copy_commit();
    copy_wait<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  };

#pragma unroll
  for (int i = 0; i < TILE_Q * ROW_CHUNKS / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / ROW_CHUNKS, chunk = (i * THREADS + threadIdx.x) % ROW_CHUNKS;
    const bool valid = first_query + row < q_len;
    const i64 at = valid ? (i64)(q_start + first_query + row) * q_stride + head * HEAD_DIM + chunk * 8 : 0;
    copy16_async(q_tile + half_offset(row, chunk), q + at, valid);
  }
  for (int tile = 0; tile < 3; ++tile) find_rows(tile);
  __syncthreads();
  fetch(k_ring, k_cache, 0);
  arrived();
  fetch(k_ring, k_cache, 1);
  fetch(v_ring, v_cache, 0);

  const int warp_row = warp * 16, warp_position = first_position + warp_row;
  u32 q_frag[HEAD_DIM / 16][4], p_frag[TILE_K / 16][4];
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k)
    load_matrices(q_frag[k], q_tile + half_offset(warp_row + lane % 16, 2 * k + lane / 16));
  float scores[TILE_K / 64][32], acc[HALVES][32] = {};  // a lane has rows g and g + 8 of its warp's 16
  float largest[2] = {NEG_INF, NEG_INF}, total[2] = {}, keep[2];
  const float scale_log2 = scale * LOG2_E;

  const auto multiply_keys = [&](int tile) {  // scores = Q K^T, in the background
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < TILE_K / 64; ++n)
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
        const u32 keys = k_ring + tile % 2 * TILE_BYTES + k / 4 * HALF_BYTES + n * 64 * 128 + k % 4 * 32;
        WGMMA_OF(SCALAR)<0>::run(scores[n], q_frag[k], descriptor(keys), k > 0);
      }
    wgmma_commit();
  };
  const auto multiply_values = [&](int tile) {  // acc += P V, in the background
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < HALVES; ++n)
#pragma unroll
      for (int k = 0; k < TILE_K / 16; ++k)
        WGMMA_OF(SCALAR)<1>::run(acc[n], p_frag[k],
                                 descriptor(v_ring + tile % 2 * TILE_BYTES + n * HALF_BYTES + k * 16 * 128), 1);
    wgmma_commit();
  };
  const auto softmax = [&](int tile) {  // scores become probabilities; `keep` is for what was summed before
    if (tile * TILE_K + TILE_K - 1 > warp_position) {
#pragma unroll
      for (int i = 0; i < TILE_K / 2; ++i) {
        const int key = tile * TILE_K + i / 4 * 8 + 2 * t + i % 2;
        if (key > warp_position + g + i % 4 / 2 * 8) scores[i / 32][i % 32] = NEG_INF;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float new_largest = largest[r];
#pragma unroll
      for (int i = 0; i < TILE_K / 4; ++i)
        new_largest = fmaxf(new_largest, scores[i / 16][i % 16 / 2 * 4 + 2 * r + i % 2]);
      new_largest = warp_max<4>(new_largest);  // finite: every query sees key 0, which is in the first tile
      const float offset = new_largest * scale_log2;
      keep[r] = exp2_fast(largest[r] * scale_log2 - offset);
      largest[r] = new_largest;
      total[r] *= keep[r];
#pragma unroll
      for (int i = 0; i < TILE_K / 4; ++i) {
        float& s = scores[i / 16][i % 16 / 2 * 4 + 2 * r + i % 2];
        s = exp2_fast(s * scale_log2 - offset);
        total[r] += s;
      }
    }
  };
  const auto pack = [&]() {  // C of the first product is A of the second
#pragma unroll
    for (int i = 0; i < TILE_K / 4; ++i)
      p_frag[i / 4][i % 4] = pack2<scalar>(scores[i / 16][i % 16 * 2], scores[i / 16][i % 16 * 2 + 1]);
  };

  if (num_tiles > 0) {
    multiply_keys(0);
    wgmma_wait<0>(scores);
    softmax(0);
    pack();
    for (int tile = 0; tile < num_tiles - 1; ++tile) {
      arrived();  // K of the next tile and V of this one; and all are done with what is refilled now
      multiply_keys(tile + 1);
      multiply_values(tile);
      fetch(k_ring, k_cache, tile + 2);
      fetch(v_ring, v_cache, tile + 1);
      find_rows(tile + 3);
      wgmma_wait<1>(scores);
      softmax(tile + 1);  // while multiply_values runs
      wgmma_wait<0>(acc);
#pragma unroll
      for (int i = 0; i < HALVES * 32; ++i) acc[i / 32][i % 32] *= keep[i % 4 / 2];
      wgmma_wait<0>(scores);
      pack();
    }
    arrived();
    multiply_values(num_tiles - 1);
    wgmma_wait<0>(acc);
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + warp_row + g + r * 8;
    const float sum = warp_sum<4>(total[r]), inverse = sum > 0.f ? 1.f / sum : 0.f;  // no context: zeros
    scalar* row = out + ((i64)(q_start + query) * num_heads + head) * HEAD_DIM + 2 * t;
    if (query < q_len) {
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const float* sums = acc[n / 8] + n % 8 * 4 + 2 * r;
        *(u32*)(row + n * 8) = pack2<scalar>(sums[0] * inverse, sums[1] * inverse);
      }
    }
  }
}
