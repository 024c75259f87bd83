// An online softmax over scores as wgmma leaves them: with g = lane / 4 and t = lane % 4, a lane holds of row g
// (r = 0) and of row g + 8 (r = 1) the columns 2 t and 2 t + 1 of every 8, as c[0], c[1] and c[2], c[3].
#pragma once
#include "attention_common.cuh"

// Minus infinity where a key lies behind its query. `position`: the lane's first row's, less that of its first column.
template <int n> __device__ __forceinline__ void mask_scores(float (&scores)[n], int position) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (i / 4 * 8 + i % 2 > position + i % 4 / 2 * 8) scores[i] = NEG_INF;
}

template <int n> struct OnlineSoftmax {
  float largest[2] = {NEG_INF, NEG_INF};  // the reference: any will do that keeps exponentials in range
  float total[2] = {};                    // of this lane's columns; lanes are added at the end
  float keep[2];                          // if outgrown: what to multiply earlier sums by
  bool outgrown;

  // Scores become probabilities, not yet divided by their sum. As in attention_tile.cuh, the reference moves, and all that
  // was summed is rescaled, only when some maximum has outgrown it by 2^8.
  __device__ __forceinline__ void update(float (&scores)[n], float scale_log2) {
    float seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = largest[r], odd = NEG_INF;
#pragma unroll
      for (int i = 2 * r; i < n; i += 4) even = fmaxf(even, scores[i]), odd = fmaxf(odd, scores[i + 1]);
      seen[r] = fmaxf(even, odd);
    }
    const float growth = fmaxf(seen[0] - largest[0], seen[1] - largest[1]);
    outgrown = __any_sync(FULL_MASK, growth * scale_log2 > 8.f);
    if (outgrown) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float new_largest = warp_max<4>(seen[r]);  // finite: the first keys that come are seen
        keep[r] = exp2_fast((largest[r] - new_largest) * scale_log2);
        largest[r] = new_largest;
        total[r] *= keep[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float offset = largest[r] * scale_log2;
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int i = 2 * r; i < n; i += 4) {
        scores[i] = exp2_fast(scores[i] * scale_log2 - offset);
        scores[i + 1] = exp2_fast(scores[i + 1] * scale_log2 - offset);
        even += scores[i], odd += scores[i + 1];
      }
      total[r] += even + odd;
    }
  }
};
