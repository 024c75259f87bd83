// rope: rotary position embedding, in place on the query and key heads of each token.
//
// Element i of a head's first half and element i of its second half form a pair, turned by the position's i-th angle
// (the pairing of GPT-NeoX and Llama). One thread turns 8 pairs: one 16-byte vector of each half. Cosines and sines come
// from a table, float32, which all heads of a token share through the cache.
//
// Defines: SCALAR; HEAD_DIM; HALF_VECS = HEAD_DIM / 16, vectors in half a head.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int HALF = HEAD_DIM / 2;

extern "C" __global__ void __launch_bounds__(THREADS)
rope(SCALAR* __restrict__ q,                 // [T, q_heads, HEAD_DIM], rows q_stride elements apart
     SCALAR* __restrict__ k,                 // [T, k_heads, HEAD_DIM], rows k_stride elements apart
     const i64* __restrict__ positions,      // [T]
     const float* __restrict__ cos_sin,      // [max_position, HEAD_DIM]: cosines, then sines
     int num_tokens, int q_heads, int k_heads, i64 q_stride, i64 k_stride) {
  const u32 index = blockIdx.x * THREADS + threadIdx.x;
  const u32 vec = index % HALF_VECS;
  const u32 head = index / HALF_VECS % (q_heads + k_heads);
  const u32 token = index / HALF_VECS / (q_heads + k_heads);
  if (token >= num_tokens) return;
  SCALAR* x = head < q_heads ? q + token * q_stride + head * HEAD_DIM
                             : k + token * k_stride + (head - q_heads) * HEAD_DIM;
  x += vec * 8;
  float first[8], second[8];
  unpack8<SCALAR>(load16(x), first);
  unpack8<SCALAR>(load16(x + HALF), second);
  const float* table = cos_sin + positions[token] * HEAD_DIM + vec * 8;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 c = *reinterpret_cast<const float4*>(table + i);
    const float4 s = *reinterpret_cast<const float4*>(table + HALF + i);
    const float cosine[4] = {c.x, c.y, c.z, c.w};
    const float sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float a = first[i + e], b = second[i + e];
      first[i + e] = a * cosine[e] - b * sine[e];
      second[i + e] = b * cosine[e] + a * sine[e];
    }
  }
  store16(x, pack8<SCALAR>(first));
  store16(x + HALF, pack8<SCALAR>(second));
}
