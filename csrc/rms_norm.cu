// rms_norm: y = h / sqrt(mean(h^2) + eps) * weight, with h = x, or h = x + residual, which is then stored as well.
//
// The row stays in registers between the sum of squares and the scaling, so memory is read once. A long row (hidden
// size) takes a thread block; short ones (the per-head norm of Qwen3) take a group of GROUP lanes, several to a warp.
// Fusing the residual addition saves one write and one read of the hidden state per norm.
//
// Defines: SCALAR; ROW = elements per row, a multiple of 8; RESIDUAL = 0 or 1; THREADS = threads per block;
// GROUP = lanes per row (a power of two up to 32), or THREADS for a block per row.
#include "common.cuh"
#include "overlap.cuh"

constexpr int ROW_VECS = ROW / 8;
constexpr int PER_LANE = (ROW_VECS + GROUP - 1) / GROUP;  // vectors of a row that one lane holds
constexpr int ROWS_PER_BLOCK = THREADS / GROUP;

__device__ __forceinline__ float row_sum(float x) {
#if GROUP == THREADS
  __shared__ float scratch[THREADS / WARP];
  return block_sum<THREADS>(x, scratch);
#else
  return warp_sum<GROUP>(x);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const SCALAR* x,                      // row r starts at (r / heads) * x_stride + (r % heads) * ROW
         const SCALAR* __restrict__ weight,    // [ROW]
         const SCALAR* residual,               // [rows, ROW], read when RESIDUAL
         SCALAR* __restrict__ y,               // [rows, ROW]
         SCALAR* total,                        // [rows, ROW] x + residual, written when RESIDUAL; may be residual itself
         int rows, int heads, i64 x_stride, float eps) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % GROUP;
  const u32 row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / GROUP;
  const bool active = row < rows;  // no early return: the shuffles below need every lane of the warp
  const i64 in = active ? (i64)(row / heads) * x_stride + (i64)(row % heads) * ROW : 0;
  const i64 out = (i64)row * ROW;

  float h[PER_LANE][8];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int vec = i * GROUP + lane;
    if (!active || vec >= ROW_VECS) continue;
    unpack8<SCALAR>(load16(x + in + vec * 8), h[i]);
#if RESIDUAL
    float r[8];
    unpack8<SCALAR>(load16(residual + out + vec * 8), r);
#pragma unroll
    for (int e = 0; e < 8; ++e) h[i][e] += r[e];
#endif
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {  // a loop of its own: no load waits for a store that it might depend on
    const int vec = i * GROUP + lane;
    if (!active || vec >= ROW_VECS) continue;
#if RESIDUAL
    const uint4 rounded = pack8<SCALAR>(h[i]);  // the norm is taken of what the next layer will read
    store16(total + out + vec * 8, rounded);
    unpack8<SCALAR>(rounded, h[i]);
#endif
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += h[i][e] * h[i][e];
  }
  const float scale = rsqrtf(row_sum(squares) / ROW + eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int vec = i * GROUP + lane;
    if (!active || vec >= ROW_VECS) continue;
    float w[8];
    unpack8<SCALAR>(load16(weight + vec * 8), w);
#pragma unroll
    for (int e = 0; e < 8; ++e) h[i][e] *= scale * w[e];
    store16(y + out + vec * 8, pack8<SCALAR>(h[i]));
  }
}
