// gemv: one token through a linear layer, y = W x. Every weight is read once, so reading is all that it costs.
//
// A warp takes ROWS rows and streams them in 16-byte vectors, AHEAD vectors of each row in flight per lane; sums are
// float32. The first vectors are requested before the kernel waits for the one that makes x (see overlap.cuh), so memory
// does not idle between two layers. With GATED the two rows of a warp are a gate and its `up`, and silu(gate) * up is
// written: silu_mul without a launch.
//
// What stands before and after a linear layer comes along, since a kernel between two streams stops both for longer than
// it works.
// * NORM: W is applied to rms_norm(x). Every block norms x for itself, into shared memory. x comes out of the caches while
//   the block's first weights are under way, so thousands of repetitions cost less than one launch.
// * RESIDUAL: W x is added to the residual stream, unrounded.
//
// Defines: SCALAR; K_VECS = row length / 8; NORM, BIAS, RESIDUAL, GATED = 0 or 1.
#include "common.cuh"
#include "overlap.cuh"

constexpr int THREADS = 256;
constexpr int ROWS = 2;   // per warp
constexpr int AHEAD = 8;  // vectors of each row in flight per lane
constexpr int STEPS = (K_VECS + WARP - 1) / WARP;             // vectors of a row that one lane reads
constexpr int PER_THREAD = (K_VECS + THREADS - 1) / THREADS;  // vectors of x that one thread norms

// The norm of x, done by the whole block: thread t holds vectors t, t + THREADS, ... of its weight and its input.
struct Norm {
  uint4 weight[PER_THREAD], x[PER_THREAD];

  __device__ __forceinline__ void load(uint4 (&to)[PER_THREAD], const SCALAR* from) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int vec = i * THREADS + threadIdx.x;
      to[i] = vec < K_VECS ? load16(from + vec * 8) : make_uint4(0, 0, 0, 0);
    }
  }
  // Write rms_norm(x), rounded as rms_norm.cu rounds it.
  __device__ __forceinline__ void store(SCALAR* normed, float eps) const {
    __shared__ float scratch[THREADS / WARP];
    float h[8], w[8], squares = 0.f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      unpack8<SCALAR>(x[i], h);
#pragma unroll
      for (int e = 0; e < 8; ++e) squares += h[e] * h[e];
    }
    const float scale = rsqrtf(block_sum<THREADS>(squares, scratch) / (K_VECS * 8) + eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int vec = i * THREADS + threadIdx.x;
      unpack8<SCALAR>(x[i], h);
      unpack8<SCALAR>(weight[i], w);
#pragma unroll
      for (int e = 0; e < 8; ++e) h[e] *= scale * w[e];
      if (vec < K_VECS) store16(normed + vec * 8, pack8<SCALAR>(h));
    }
    __syncthreads();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gemv(const SCALAR* __restrict__ weight,  // [N, 8 * K_VECS]
     const SCALAR* x,                    // [8 * K_VECS]
     const SCALAR* __restrict__ norm,    // [8 * K_VECS], read when NORM
     const SCALAR* __restrict__ bias,    // [N], read when BIAS
     const SCALAR* residual,             // [N], read when RESIDUAL; may be y
     SCALAR* y,                          // [N], or [N / 2] when GATED
     int num_rows, float eps) {          // N
  const int lane = threadIdx.x % WARP;
  const int warp = (blockIdx.x * THREADS + threadIdx.x) / WARP;
  const int first_row = GATED ? warp : warp * ROWS, row_step = GATED ? num_rows / 2 : 1;
  const SCALAR* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first_row + r * row_step;
    rows[r] = weight + (i64)(row < num_rows ? row : 0) * (K_VECS * 8) + lane * 8;  // a row too many repeats row 0
  }
  const int own_row = first_row + lane;  // the row of y that this lane writes, if it does
  const bool writes = GATED ? lane == 0 && own_row < num_rows / 2 : lane < ROWS && own_row < num_rows;
  float sum[ROWS] = {}, added = 0.f;
#if NORM
  __shared__ __align__(16) SCALAR normed[K_VECS * 8];
  const SCALAR* input = normed;
  Norm input_norm;
  input_norm.load(input_norm.weight, norm);
#else
  const SCALAR* input = x;
#endif
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
#if NORM
      input_norm.load(input_norm.x, x);
      input_norm.store(normed, eps);
#endif
#if BIAS
      if (writes) added += to_float(bias[own_row]);
#endif
#if RESIDUAL
      if (writes) added += to_float(residual[own_row]);
#endif
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int vec = (step + a) * WARP + lane;
      if (vec >= K_VECS) continue;
      float xs[8];
      unpack8<SCALAR>(load16(input + vec * 8), xs);
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
  const float own = GATED ? sum[0] / (1.f + __expf(-sum[0])) * sum[1] : (lane == 0 ? sum[0] : sum[1]) + added;
  if (writes) y[own_row] = from_float<SCALAR>(own);
}
