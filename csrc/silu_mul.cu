// silu_mul: the gated activation of the MLP, silu(gate) * up with silu(x) = x / (1 + exp(-x)).
//
// gate and up are the two halves of each row of one fused projection. One thread makes one 16-byte vector of the
// result, in float32 in between, rounded once.
//
// Defines: SCALAR; OUT_VECS = F / 8, vectors per output row.
#include "common.cuh"
#include "overlap.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
silu_mul(const SCALAR* gate_up,               // [T, 2F]
         SCALAR* __restrict__ out,            // [T, F]
         i64 total_vecs) {                    // T * OUT_VECS
  let_next_start();
  wait_for_previous();
  const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (index >= total_vecs) return;
  const i64 row = index / OUT_VECS;
  const i64 gate_at = (row * 2 * OUT_VECS + index % OUT_VECS) * 8;
  float gate[8], up[8];
  unpack8<SCALAR>(load16(gate_up + gate_at), gate);
  unpack8<SCALAR>(load16(gate_up + gate_at + OUT_VECS * 8), up);
#pragma unroll
  for (int e = 0; e < 8; ++e) gate[e] = gate[e] / (1.f + __expf(-gate[e])) * up[e];
  store16(out + index * 8, pack8<SCALAR>(gate));
}
