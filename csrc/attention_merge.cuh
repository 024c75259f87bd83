// Putting the pieces of a cut segment together, by whichever of its blocks finishes last.
//
// Each piece is a finished softmax average o_i over its own tokens and lse_i = log2(sum of 2^score). Over all tokens the
// average is sum_i 2^lse_i o_i / sum_i 2^lse_i, computed relative to the largest lse. A second kernel could do this, but a
// launch per layer costs more than the merging; instead every block that has written a piece counts itself in, and the one
// that finds all others there before it merges. Pieces are added in their order on the line, so that the result does not
// depend on who comes last.
#pragma once
#include "attention_common.cuh"
#include "attention_plan.cuh"

// The pieces of one segment: of parts first_part ... first_part + count - 1. A part leaves its first piece in slot 2 * part
// and a last one that is incomplete in slot 2 * part + 1.
struct Pieces {
  int first_slot, first_part, count;
  __device__ __forceinline__ Pieces(const Plan& plan, i64 segment_start, int segment_units)
      : first_part(plan.part_of(segment_start)),
        count(plan.part_of(segment_start + segment_units - 1) - first_part + 1) {
    first_slot = 2 * first_part + (plan.first_unit(first_part) < segment_start);
  }
  __device__ __forceinline__ int slot(int i) const { return i == 0 ? first_slot : 2 * (first_part + i); }
};

// True in all threads of the block that is the last of `count` to call it; what the others wrote before is visible then.
// The counter is back at zero afterwards, so that nobody has to clear it before the next launch or graph replay.
__device__ __forceinline__ bool arrives_last(u32* counter, int count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(counter, count - 1) == count - 1;  // counts up to count - 1, then wraps to 0
  __syncthreads();
  __threadfence();
  return last;
}

// out_rows: [heads, D]. A warp takes a head; `warp` of `warps`. Reads go to L2 (ldcg): L1 does not see other SMs' writes.
__device__ __forceinline__ void merge_pieces(scalar* out_rows, const float* partial_out, const float* partial_lse,
                                             const Pieces& pieces, int heads, int warp, int warps) {
  const int lane = threadIdx.x % WARP;
  for (int head = warp; head < heads; head += warps) {
    float largest = NEG_INF, sum = 0.f, acc[HEAD_DIM / WARP] = {};
    for (int begin = 0; begin < pieces.count; begin += WARP) {  // 32 pieces at a time, one lane for each weight
      const int count = min(WARP, pieces.count - begin);
      const float lse =
          lane < count ? __ldcg(partial_lse + pieces.slot(begin + lane) * MAX_GROUP + head) : NEG_INF;
      const float new_largest = fmaxf(largest, warp_max(lse));
      const float keep = rescale(largest, new_largest), weight = rescale(lse, new_largest);
      largest = new_largest;
      sum = sum * keep + warp_sum(weight);
#pragma unroll
      for (int j = 0; j < HEAD_DIM / WARP; ++j) acc[j] *= keep;
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        const float w = __shfl_sync(FULL_MASK, weight, i);
        const float* o = partial_out + (i64)(pieces.slot(begin + i) * MAX_GROUP + head) * HEAD_DIM + lane;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / WARP; ++j) acc[j] += w * __ldcg(o + j * WARP);
      }
    }
#pragma unroll
    for (int j = 0; j < HEAD_DIM / WARP; ++j)
      out_rows[head * HEAD_DIM + j * WARP + lane] = from_float<scalar>(acc[j] / sum);
  }
}
