// Paged prefill attention on Hopper (sm_90a): tensor cores that wait neither for copies nor for exponentials.
//
// It computes what attention_prefill_tiled.cu does, with the division of labour of FlashAttention-3 (Shah et al. 2024):
//
// * Producers: one warp brings K, one V, one Q, into rings in shared memory (attention_wgmma_rings.cuh). mbarriers tell when a
//   tile there is full and when it is free again.
// * Consumers: warpgroups of 64 queries each. Scores of tile j + 1 are multiplied, then tile j is multiplied with V in the
//   background, while the softmax of tile j + 1 is computed.
// * Turns: a warpgroup sends off its products when the one before it has sent off its own. So they get out of step, and
//   the tensor cores multiply for one while the other computes exponentials.
// * As many blocks as SMs, each drawing work until none is left: one head of one tile of queries at a time. Its Q, K and V
//   are on their way before the results of the one before it are written.
#include "attention_softmax.cuh"
#include "attention_wgmma_rings.cuh"

constexpr int WIDTH = HEAD_DIM < 128 ? HEAD_DIM : 128;  // dims of one product with V

// grid: any number of blocks, block THREADS threads. out to context_lens as for attention_prefill_tiled, but maps of boxes
// [BOX_TOKENS, 1, 64] for the caches, seen as [num_blocks * BLOCK_SIZE, Hkv, D]. `counter` is 0 before and after.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_wgmma(
    scalar* __restrict__ out, const scalar* __restrict__ q, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const int* __restrict__ block_tables, const int* __restrict__ cu_seqlens_q,
    const int* __restrict__ context_lens, int* counter, float scale, int q_stride, int max_blocks, int num_heads,
    int num_kv_heads, int num_seqs) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ u64 barriers[BARRIERS];
  __shared__ Work<TILE_Q, TILE_K> works[SLOTS];
  const Rings rings(shared, barriers, works);
  const int warp = __shfl_sync(FULL_MASK, (int)threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const int group = warp / 4 - 1;  // of consumers; -1: producers

  if (threadIdx.x == 0) rings.init();
  __syncthreads();

  if (group < 0) {
    give_registers<CONSUMERS == 2 ? 40 : 32>();
    if (warp == 2) {
      bring_queries(rings, q, cu_seqlens_q, context_lens, counter, q_stride, num_heads, num_seqs);
    } else if (warp < 2) {
      const TensorMap& map = warp == 0 ? k_map : v_map;
      const u32 ring = warp == 0 ? rings.k : rings.v;
      const u32 full = rings.barrier(warp == 0 ? K_FULL : V_FULL), empty = rings.barrier(warp == 0 ? K_EMPTY : V_EMPTY);
      bring_tiles(rings, map, ring, full, empty, block_tables, max_blocks, num_heads, num_kv_heads);
    }
    return;
  }

  take_registers<CONSUMERS == 2 ? 232 : 160>();
  const int g = lane / 4, t = lane % 4, warp_row = group * 64 + warp % 4 * 16;
  const float scale_log2 = scale * LOG2_E;
  const auto wait_full = [&](int kind, u32 step) { mbarrier_wait(rings.barrier(kind + step % STAGES), step / STAGES & 1); };
  const auto release = [&](int index) {
    if (lane == 0) mbarrier_arrive(rings.barrier(index));
  };
  const auto pass_turn = [&]() { named_arrive(1 + CONSUMERS + (group + 1) % CONSUMERS, 2 * GROUP); };
  if (group == CONSUMERS - 1) pass_turn();

  u32 step = 0;  // tiles used so far
  for (u32 turn = 0;; ++turn) {
    const auto w = rings.next_work(Q_FULL, turn);
    if (w.head < 0) break;
    const int num_tiles = w.num_tiles(), warp_position = w.first_position() + warp_row;
    const u32 q_tile = rings.q + turn % SLOTS * Q_TILE + group * Q_GROUP;
    float scores[TILE_K / 2], acc[HEAD_DIM / WIDTH][WIDTH / 2] = {};
    u32 p_frag[TILE_K / 16][4];
    OnlineSoftmax<TILE_K / 2> softmax;

    const auto multiply_keys = [&](u32 step) {  // scores = Q K^T, in the background
      const u64 queries = descriptor(q_tile), keys = descriptor(rings.k + step % STAGES * KV_TILE);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k)
        Wgmma<TILE_K, 0>::run(scores, advance(queries, k / 4 * Q_COLUMN + k % 4 * 32),
                              advance(keys, k / 4 * KV_COLUMN + k % 4 * 32), k > 0);
      wgmma_commit();
    };
    const auto multiply_values = [&](u32 step) {  // acc += P V, in the background
      const u64 values = descriptor(rings.v + step % STAGES * KV_TILE, KV_COLUMN);
      wgmma_begin();
#pragma unroll
      for (int n = 0; n < HEAD_DIM / WIDTH; ++n)
#pragma unroll
        for (int k = 0; k < TILE_K / 16; ++k)
          Wgmma<WIDTH, 1>::run(acc[n], p_frag[k], advance(values, n * WIDTH / 64 * KV_COLUMN + k * 16 * 128), 1);
      wgmma_commit();
    };
    const auto values_ready = [&]() {
      wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < HEAD_DIM / WIDTH; ++n) settle(acc[n]);
    };
    const auto compute_softmax = [&](int tile) {  // scores become probabilities
      if (tile * TILE_K + TILE_K - 1 > warp_position)
        mask_scores(scores, warp_position + g - tile * TILE_K - 2 * t);
      softmax.update(scores, scale_log2);
      settle(scores);
      settle(softmax.total);
    };
    const auto pack = [&]() {  // C of the first product is A of the second
#pragma unroll
      for (int i = 0; i < TILE_K / 4; ++i) p_frag[i / 4][i % 4] = pack2<scalar>(scores[2 * i], scores[2 * i + 1]);
    };

    if (num_tiles > 0) {
      wait_full(K_FULL, step);
      multiply_keys(step);
      wgmma_wait<0>();
      settle(scores);
      release(K_EMPTY + step % STAGES);
      compute_softmax(0);
      wait_full(V_FULL, step);
      pack();
      for (int tile = 1; tile < num_tiles; ++tile, ++step) {
        wait_full(K_FULL, step + 1);
        named_sync(1 + CONSUMERS + group, 2 * GROUP);  // its turn
        multiply_keys(step + 1);
        multiply_values(step);
        pass_turn();
        wgmma_wait<1>();
        settle(scores);
        release(K_EMPTY + (step + 1) % STAGES);
        compute_softmax(tile);        // while multiply_values runs
        wait_full(V_FULL, step + 1);  // for the next turn; here, it also keeps ptxas from moving the softmax down
        values_ready();
        release(V_EMPTY + step % STAGES);
        if (softmax.outgrown) {
#pragma unroll
          for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i / (WIDTH / 2)][i % (WIDTH / 2)] *= softmax.keep[i % 4 / 2];
        }
        pack();
      }
    }
    release(Q_EMPTY + turn % SLOTS);
    if (num_tiles > 0) {
      // The copy engine brought whole blocks. Past the context they may hold anything, also NaN, and 0 * NaN is NaN.
      const int stale = min(TILE_K, w.context_len - (num_tiles - 1) * TILE_K), stop = (stale / BOX_TOKENS + 1) * BOX_TOKENS;
      if (stale % BOX_TOKENS) {
        for (int i = stale * 8 + threadIdx.x % GROUP; i < stop * 8; i += GROUP)
          for (int column = 0; column < COLUMNS; ++column)
            clear16_shared(rings.v + step % STAGES * KV_TILE + column * KV_COLUMN + i * 16);
        publish_shared();
        named_sync(1 + group, GROUP);
      }
      multiply_values(step);
      values_ready();
      release(V_EMPTY + step % STAGES);
      ++step;
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = w.first_query + warp_row + g + r * 8;
      const float sum = warp_sum<4>(softmax.total[r]), inverse = sum > 0.f ? 1.f / sum : 0.f;  // no context: zeros
      scalar* row = out + ((i64)(w.q_start + query) * num_heads + w.head) * HEAD_DIM;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 4) {
        u32 x[4];  // this lane's part of chunks n to n + 3; transposed, all parts of chunk n + t
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* sums = acc[(n + i) / (WIDTH / 8)] + (n + i) % (WIDTH / 8) * 4 + 2 * r;
          x[i] = pack2<scalar>(sums[0] * inverse, sums[1] * inverse);
        }
        transpose_quad(x);
        if (query < w.q_len) store16(row + (n + t) * 8, make_uint4(x[0], x[1], x[2], x[3]));
      }
    }
  }
}
