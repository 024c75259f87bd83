// norm_rope_store: everything between the qkv projection and attention, in one pass.
//
// Normalises each query and key head (Qwen3; NORM = 0 leaves that out), rotates it to its position, and puts keys and
// values into their slots of the cache. Four kernels would do the same and move the heads through memory three times.
// A group of GROUP lanes holds one head: each lane 8 elements of its first half and the 8 that they pair up with in the
// second half (the pairing of GPT-NeoX and Llama). Nothing is rounded between norm and rotation. All but the heads
// themselves is loaded before the kernel waits for the projection: position, then angles is a chain of two trips to
// memory, and at one token the trips are all that this kernel costs.
//
// Defines: SCALAR; HEAD_DIM; GROUP = lanes per head, the power of two that holds HEAD_DIM / 16; NORM = 0 or 1.
#include "common.cuh"
#include "overlap.cuh"

constexpr int THREADS = 128;
constexpr int HALF = HEAD_DIM / 2;

extern "C" __global__ void __launch_bounds__(THREADS)
norm_rope_store(SCALAR* q,                           // [T, q_heads, HEAD_DIM], in place; rows q_stride elements apart
                const SCALAR* k,                     // [T, kv_heads, HEAD_DIM]
                const SCALAR* v,                     // [T, kv_heads, HEAD_DIM]
                const SCALAR* __restrict__ q_weight,  // [HEAD_DIM], read when NORM
                const SCALAR* __restrict__ k_weight,
                const i64* positions,                // [T]
                const float* __restrict__ cos_sin,   // [max_position, HEAD_DIM]: cosines, then sines
                SCALAR* k_cache,                     // [num_slots, kv_heads, HEAD_DIM]
                SCALAR* v_cache,
                const i64* slots,                    // [T], -1 for padding
                int num_tokens, int q_heads, int kv_heads, i64 q_stride, i64 k_stride, i64 v_stride, float eps) {
  let_next_start();
  const u32 index = blockIdx.x * THREADS + threadIdx.x;
  const u32 lane = index % GROUP;
  const u32 head = index / GROUP % (q_heads + 2 * kv_heads);  // queries, then keys, then values
  const u32 token = index / GROUP / (q_heads + 2 * kv_heads);
  const bool active = token < num_tokens && lane * 16 < HEAD_DIM;  // no early return: warp_sum needs every lane
  const bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
  const u32 kv_head = (head - q_heads) % kv_heads;

  // Written before the projection was launched (see the op's contract), so there is nothing to wait for.
  const i64 slot = active && !is_query ? slots[token] : 0;
  float cosine[8] = {}, sine[8] = {};
  if (active && !is_value) {
    const float* table = cos_sin + positions[token] * HEAD_DIM + lane * 8;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      cosine[e] = table[e];
      sine[e] = table[HALF + e];
    }
  }
#if NORM
  uint4 weight[2] = {};
  if (active && !is_value) {
    weight[0] = load16((is_query ? q_weight : k_weight) + lane * 8);
    weight[1] = load16((is_query ? q_weight : k_weight) + lane * 8 + HALF);
  }
#endif
  wait_for_previous();

  float first[8] = {}, second[8] = {};
  const SCALAR* source = nullptr;
  SCALAR* target = nullptr;
  if (active) {
    source = is_query ? q + token * q_stride + head * HEAD_DIM
                      : (is_value ? v + token * v_stride : k + token * k_stride) + kv_head * HEAD_DIM;
    source += lane * 8;
    if (is_query) target = const_cast<SCALAR*>(source);
    else if (slot >= 0) target = (is_value ? v_cache : k_cache) + (slot * kv_heads + kv_head) * HEAD_DIM + lane * 8;
    if (is_value && target != nullptr) {
      store16(target, load16(source));
      store16(target + HALF, load16(source + HALF));
    }
    if (is_value) target = nullptr;
    unpack8<SCALAR>(load16(source), first);
    unpack8<SCALAR>(load16(source + HALF), second);
  }
#if NORM
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < 8; ++e) squares += first[e] * first[e] + second[e] * second[e];
  const float scale = rsqrtf(warp_sum<GROUP>(squares) / HEAD_DIM + eps);
#endif
  if (target == nullptr) return;
#if NORM
  float w[8];
  unpack8<SCALAR>(weight[0], w);
#pragma unroll
  for (int e = 0; e < 8; ++e) first[e] *= scale * w[e];
  unpack8<SCALAR>(weight[1], w);
#pragma unroll
  for (int e = 0; e < 8; ++e) second[e] *= scale * w[e];
#endif
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float a = first[e], b = second[e];
    first[e] = a * cosine[e] - b * sine[e];
    second[e] = b * cosine[e] + a * sine[e];
  }
  store16(target, pack8<SCALAR>(first));
  store16(target + HALF, pack8<SCALAR>(second));
}
