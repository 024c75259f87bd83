// store_kv: scatter this step's keys and values into their slots of the paged cache.
//
// One thread moves one 16-byte vector of a key and the same one of a value: two independent loads in flight. Nothing is
// computed, so the 16-bit type does not matter. Neighbouring threads take neighbouring vectors of a token's row, which
// keeps reads and writes coalesced although the slots are scattered.
//
// Defines: ROW_VECS = Hkv * D * 2 bytes / 16, vectors per token row.
#include "common.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
store_kv(const u16* __restrict__ k,           // [T, Hkv, D], rows k_stride elements apart
         const u16* __restrict__ v,           // [T, Hkv, D], rows v_stride elements apart
         u16* __restrict__ k_cache,           // [num_blocks, block_size, Hkv, D] = [num_slots, Hkv, D]
         u16* __restrict__ v_cache,
         const i64* __restrict__ slots,       // [T], -1 for padding
         int num_tokens, i64 k_stride, i64 v_stride) {
  const u32 index = blockIdx.x * THREADS + threadIdx.x;
  const u32 token = index / ROW_VECS;
  const u32 element = index % ROW_VECS * 8;
  if (token >= num_tokens) return;
  const i64 slot = slots[token];
  if (slot < 0) return;
  const uint4 key = load16_streaming(k + token * k_stride + element);
  const uint4 value = load16_streaming(v + token * v_stride + element);
  const i64 target = slot * (ROW_VECS * 8) + element;
  store16(k_cache + target, key);  // not streaming: attention reads the cache next
  store16(v_cache + target, value);
}
