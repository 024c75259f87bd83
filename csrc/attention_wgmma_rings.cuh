// The rings through which attention_prefill_wgmma.cu's producers hand tiles to its consumers, and the producers.
//
// One warp draws work and brings its Q, row by row with cp.async. One brings K and one V: the copy engine is told a box per
// cache block, which is all that paging costs. Each tile has two mbarriers: full, which consumers wait for, and empty, which
// its producer waits for before it brings the next.
#pragma once
#include "attention_work.cuh"
#include "hopper.cuh"

constexpr int CONSUMERS = HEAD_DIM <= 64 ? 3 : 2;
constexpr int TILE_Q = CONSUMERS * 64;
constexpr int TILE_K = HEAD_DIM <= 128 ? 128 : 64;
constexpr int STAGES = 2;                           // tiles of K, and of V, in shared memory
constexpr int SLOTS = HEAD_DIM <= 128 ? 2 : 1;      // tiles of Q
constexpr int GROUP = 4 * WARP;
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int COLUMNS = (HEAD_DIM + 63) / 64;       // of 64 dims (column_offset)
constexpr int Q_COLUMN = 64 * 128, Q_GROUP = COLUMNS * Q_COLUMN, Q_TILE = CONSUMERS * Q_GROUP;  // bytes
constexpr int KV_COLUMN = TILE_K * 128, KV_TILE = COLUMNS * KV_COLUMN;
constexpr int BOX_TOKENS = common_power_of_2(BLOCK_SIZE, TILE_K);
constexpr int BOXES = TILE_K / BOX_TOKENS * COLUMNS;
static_assert(BOXES <= WARP, "a lane asks for one");

// Numbers of the first of SLOTS barriers (of Q, and of what work it is) or of STAGES (of K and V).
enum Barrier {
  WORK_FULL, Q_FULL = SLOTS, Q_EMPTY = 2 * SLOTS,
  K_FULL = 3 * SLOTS, V_FULL = K_FULL + STAGES, K_EMPTY = V_FULL + STAGES, V_EMPTY = K_EMPTY + STAGES,
  BARRIERS = V_EMPTY + STAGES
};

struct Rings {
  u32 barriers, q, k, v;        // addresses in shared memory
  Work<TILE_Q, TILE_K>* works;  // [SLOTS] what the tiles of Q are

  __device__ __forceinline__ Rings(const void* shared, const u64 (&barriers)[BARRIERS], Work<TILE_Q, TILE_K>* works)
      : barriers(shared_address(barriers)), q((shared_address(shared) + 1023) / 1024 * 1024), k(q + SLOTS * Q_TILE),
        v(k + STAGES * KV_TILE), works(works) {}
  __device__ __forceinline__ u32 barrier(int index) const { return barriers + index * 8; }
  // By one thread, before the first __syncthreads.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < BARRIERS; ++i) {
      const bool of_threads = i >= Q_FULL && i < Q_EMPTY, of_consumers = i >= K_EMPTY || (i >= Q_EMPTY && i < K_FULL);
      mbarrier_init(barrier(i), of_threads ? WARP : of_consumers ? CONSUMERS * 4 + (i < K_FULL ? 2 : 0) : 1);
    }
    mbarriers_ready();
  }
  // `full`: WORK_FULL, or Q_FULL for those who need the queries, too.
  __device__ __forceinline__ Work<TILE_Q, TILE_K> next_work(int full, u32 turn) const {
    mbarrier_wait(barrier(full + turn % SLOTS), turn / SLOTS & 1);
    const auto work = works[turn % SLOTS];
    __syncwarp();
    return work;
  }
};

// Draws work until none is left, and brings its Q.
__device__ __forceinline__ void bring_queries(const Rings& rings, const scalar* q, const int* cu_seqlens_q,
                                              const int* context_lens, int* counter, int q_stride, int num_heads,
                                              int num_seqs) {
  const int lane = threadIdx.x % WARP;
  int item = blockIdx.x, num_items;
  for (u32 turn = 0;; ++turn) {
    const auto w = find_work<TILE_Q, TILE_K>(cu_seqlens_q, context_lens, num_seqs, num_heads, item, num_items);
    const u32 slot = turn % SLOTS;
    mbarrier_wait(rings.barrier(Q_EMPTY + slot), turn / SLOTS & 1 ^ 1);
    if (lane == 0) {
      rings.works[slot] = w;
      mbarrier_arrive(rings.barrier(WORK_FULL + slot));
    }
#pragma unroll 4
    for (int i = lane; i < TILE_Q * ROW_CHUNKS && w.head >= 0; i += WARP) {
      const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
      const bool valid = w.first_query + row < w.q_len;
      const i64 at = valid ? (i64)(w.q_start + w.first_query + row) * q_stride + w.head * HEAD_DIM + chunk * 8 : 0;
      copy16_async(rings.q + slot * Q_TILE + row / 64 * Q_GROUP + column_offset(row % 64, chunk, Q_COLUMN), q + at,
                   valid);
    }
    copy_commit();
    copy_wait<0>();
    publish_shared();
    mbarrier_arrive(rings.barrier(Q_FULL + slot));
    if (w.head < 0) break;
    if (lane == 0) item = gridDim.x + atomicAdd(counter, 1);
    item = __shfl_sync(FULL_MASK, item, 0);
  }
  if (lane == 0 && item == gridDim.x + num_items - 1) *counter = 0;  // nobody draws after this
}

// Brings K, or V, for the same work: into `ring`, with the barriers `full` and `empty` of its first stage.
__device__ __forceinline__ void bring_tiles(const Rings& rings, const TensorMap& map, u32 ring, u32 full, u32 empty,
                                            const int* block_tables, int max_blocks, int num_heads, int num_kv_heads) {
  const int lane = threadIdx.x % WARP;
  const int column = lane % COLUMNS, box_token = lane / COLUMNS * BOX_TOKENS;
  prefetch_map(map);
  u32 step = 0;  // tiles brought so far
  for (u32 turn = 0;; ++turn) {
    const auto w = rings.next_work(WORK_FULL, turn);
    if (lane == 0) mbarrier_arrive(rings.barrier(Q_EMPTY + turn % SLOTS));
    if (w.head < 0) break;
    const int kv_head = w.head / (num_heads / num_kv_heads), num_keys = w.num_keys(), num_tiles = w.num_tiles();
    const auto find_row = [&](int tile) {
      const int token = tile * TILE_K + box_token;
      return lane < BOXES && token < num_keys ? cache_row(block_tables + (i64)w.seq * max_blocks, token)
                                              : -TILE_K;  // outside of the cache: zeros
    };
    int next_row = find_row(0);
    for (int tile = 0; tile < num_tiles; ++tile, ++step) {
      const u32 stage = step % STAGES;
      const int row = next_row;
      next_row = find_row(tile + 1);
      mbarrier_wait(empty + stage * 8, step / STAGES & 1 ^ 1);
      if (lane == 0) mbarrier_arrive_expecting(full + stage * 8, KV_TILE);
      __syncwarp();
      const u32 to = ring + stage * KV_TILE + column * KV_COLUMN + box_token * 128;
      if (lane < BOXES) copy_box(to, map, full + stage * 8, column * 64, kv_head, row);
    }
  }
}
