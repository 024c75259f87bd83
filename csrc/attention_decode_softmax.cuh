// The online softmax of attention_decode_split.cu, over scores whose rows are tokens and whose columns are heads.
#pragma once
#include "attention_mma.cuh"
#include "attention_plan.cuh"

// Over the 8 lanes that hold the same columns of C.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int step = 4; step < WARP; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int step = 4; step < WARP; step *= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
  return x;
}

// A lane holds of each tile of 8 heads two: 2 t and 2 t + 1.
struct HeadSoftmax {
  float largest[HEAD_TILES * 2];  // the reference: any will do that keeps exponentials in range
  float total[HEAD_TILES * 2];    // of this lane's tokens; lanes are added at the end
  float keep[HEAD_TILES * 2];     // if outgrown: what to multiply earlier sums by
  bool outgrown;

  __device__ __forceinline__ HeadSoftmax() {
#pragma unroll
    for (int r = 0; r < HEAD_TILES * 2; ++r) largest[r] = NEG_INF, total[r] = 0.f;
  }
  // Scores become probabilities, not yet divided by their sum. As in attention_tile.cuh, the reference moves, and all that
  // was summed is rescaled, only when some maximum has outgrown it by 2^8.
  template <int tiles> __device__ __forceinline__ void update(float (&scores)[tiles][HEAD_TILES][4], float scale_log2) {
    float seen[HEAD_TILES * 2], growth = 0.f;
#pragma unroll
    for (int r = 0; r < HEAD_TILES * 2; ++r) {
      seen[r] = largest[r];
#pragma unroll
      for (int m = 0; m < tiles; ++m) seen[r] = fmaxf(seen[r], fmaxf(scores[m][r / 2][r % 2], scores[m][r / 2][r % 2 + 2]));
      growth = fmaxf(growth, seen[r] - largest[r]);  // of -inf less -inf, NaN, fmaxf takes the other
    }
    outgrown = __any_sync(FULL_MASK, growth * scale_log2 > 8.f);
    if (outgrown) {
#pragma unroll
      for (int r = 0; r < HEAD_TILES * 2; ++r) {
        const float new_largest = column_max(seen[r]);  // finite: the first keys that come are seen
        keep[r] = exp2_fast((largest[r] - new_largest) * scale_log2);
        largest[r] = new_largest;
        total[r] *= keep[r];
      }
    }
#pragma unroll
    for (int r = 0; r < HEAD_TILES * 2; ++r) {
      const float offset = largest[r] * scale_log2;
#pragma unroll
      for (int i = 0; i < 2 * tiles; ++i) {
        float& score = scores[i / 2][r / 2][r % 2 + i % 2 * 2];
        score = exp2_fast(score * scale_log2 - offset);
        total[r] += score;
      }
    }
  }
};
