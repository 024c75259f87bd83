// gemv: one token through a linear layer, y = W x. Every weight is read once, so reading is all that it costs.
//
// A warp takes ROWS rows and streams them in 16-byte vectors, AHEAD vectors of each row in flight per lane; x stays in
// L1, and sums are float32. The first vectors are requested before the kernel waits for the one that makes x (see
// overlap.cuh), so memory does not idle between two layers. With GATED the two rows of a warp are a gate and its `up`,
// and silu(gate) * up is written: silu_mul without a launch.
//
// Defines: SCALAR; K_VECS = row length / 8; ROWS = rows per warp (2 if GATED); AHEAD; BIAS, GATED = 0 or 1.
#include "common.cuh"
#include "overlap.cuh"

constexpr int THREADS = 128;
constexpr int STEPS = (K_VECS + WARP - 1) / WARP;  // vectors of a row that one lane reads

extern "C" __global__ void __launch_bounds__(THREADS)
gemv(const SCALAR* __restrict__ weight,  // [N, 8 * K_VECS]
     const SCALAR* x,                    // [8 * K_VECS]
     const SCALAR* __restrict__ bias,    // [N], read when BIAS
     SCALAR* __restrict__ y,             // [N], or [N / 2] when GATED
     int num_rows) {                     // N
  const int lane = threadIdx.x % WARP;
  const int warp = (blockIdx.x * THREADS + threadIdx.x) / WARP;
#if GATED
  const int first_row = warp, row_step = num_rows / 2;
  const bool active = warp < num_rows / 2;
#else
  const int first_row = warp * ROWS, row_step = 1;
  const bool active = first_row < num_rows;
#endif
  const SCALAR* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first_row + r * row_step;
    rows[r] = weight + (i64)(row < num_rows ? row : 0) * (K_VECS * 8) + lane * 8;  // a row too many repeats row 0
  }
  float sum[ROWS] = {};
  if (!active) {
    wait_for_previous();
    return;
  }
#pragma unroll 1
  for (int step = 0; step < STEPS; step += AHEAD) {
    uint4 w[ROWS][AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const bool inside = (step + a) * WARP + lane < K_VECS;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        w[r][a] = inside ? load16_streaming(rows[r] + (step + a) * WARP * 8) : make_uint4(0, 0, 0, 0);
    }
    if (step == 0) {
      wait_for_previous();
      let_next_start();
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int vec = (step + a) * WARP + lane;
      if (vec >= K_VECS) continue;
      float xs[8];
      unpack8<SCALAR>(load16(x + vec * 8), xs);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float ws[8];
        unpack8<SCALAR>(w[r][a], ws);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[r] += ws[e] * xs[e];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sum[r] = warp_sum(sum[r]);
  if (lane != 0) return;
#if GATED
  y[warp] = from_float<SCALAR>(sum[0] / (1.f + __expf(-sum[0])) * sum[1]);
#else
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first_row + r;
    if (row >= num_rows) continue;
#if BIAS
    sum[r] += to_float(bias[row]);
#endif
    y[row] = from_float<SCALAR>(sum[r]);
  }
#endif
}
