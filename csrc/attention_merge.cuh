// Putting together what warps have computed of a piece, and then the pieces of a cut segment, by whichever of its blocks
// finishes last.
//
// Each piece is a finished softmax average o_i over its own tokens and lse_i = log2(sum of 2^score). Over all tokens the
// average is sum_i 2^lse_i o_i / sum_i 2^lse_i, computed relative to the largest lse. A second kernel could do this, but a
// launch per layer costs more than the merging; instead every block that has written a piece counts itself in, and the one
// that finds all others there before it merges. Pieces are added in their order on the line, so that the result does not
// depend on who comes last.
#pragma once
#include "attention_common.cuh"
#include "attention_decode_softmax.cuh"

// What one warp leaves in shared memory: an unfinished softmax average for each head.
struct WarpSums {
  float largest[MAX_GROUP], total[MAX_GROUP];
  float* sums;  // [heads, D], columns permuted

  // Where a head's sum over dimension d lies. The XOR keeps the stores of a warp, 4 heads at a time, on different banks.
  __device__ __forceinline__ static int at(int head, int d) { return head * HEAD_DIM + (d ^ (head / 2 % 4 * 8)); }

  // `acc`: rows are dims, columns heads. `to`: where sums go.
  __device__ __forceinline__ void leave(float* to, const float (&acc)[HEAD_DIM / 16][HEAD_TILES][4],
                                        const HeadSoftmax& softmax, float scale_log2, int heads) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    if (lane == 0) sums = to;
#pragma unroll
    for (int r = 0; r < HEAD_TILES * 2; ++r) {
      const int head = r / 2 * 8 + 2 * t + r % 2;
      const float sum = column_sum(softmax.total[r]);
      if (head >= heads) continue;
      if (g == 0) {
        largest[head] = softmax.largest[r] * scale_log2;
        total[head] = sum;
      }
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) to[at(head, i * 8 + g)] = acc[i / 2][r / 2][r % 2 + i % 2 * 2];
    }
  }
};

// The average over all warps' tokens at (head, d), and its lse.
template <int warps>
__device__ __forceinline__ float merge_warps(const WarpSums (&of_warp)[warps], int head, int d, float& lse) {
  float largest = NEG_INF, total = 0.f, sum = 0.f;
#pragma unroll
  for (int w = 0; w < warps; ++w) largest = fmaxf(largest, of_warp[w].largest[head]);
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    const float factor = rescale(of_warp[w].largest[head], largest);
    total += of_warp[w].total[head] * factor;
    sum += of_warp[w].sums[WarpSums::at(head, d)] * factor;
  }
  lse = largest + __log2f(total);
  return sum / total;
}

// The pieces of one segment: of parts first_part ... first_part + count - 1. A part leaves its first piece in slot 2 * part
// and a last one that is incomplete in slot 2 * part + 1.
struct Pieces {
  int first_slot, first_part, count;
  Pieces() = default;
  __device__ __forceinline__ Pieces(const Plan& plan, i64 segment_start, int segment_units)
      : first_part(plan.part_of(segment_start)),
        count(plan.part_of(segment_start + segment_units - 1) - first_part + 1) {
    first_slot = 2 * first_part + (plan.first_unit(first_part) < segment_start);
  }
  __device__ __forceinline__ int slot(int i) const { return i == 0 ? first_slot : 2 * (first_part + i); }
};

constexpr int AT_ONCE = HEAD_DIM <= 128 ? 16 : 8;  // pieces whose loads are under way together; divides 32

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
      for (int i = 0; i < count; i += AT_ONCE) {
#pragma unroll
        for (int k = i; k < i + AT_ONCE; ++k) {  // past the end: the last piece once more, with a weight of 0
          const float w = __shfl_sync(FULL_MASK, weight, k);
          const int slot = pieces.slot(begin + min(k, count - 1));
          const float* o = partial_out + (i64)(slot * MAX_GROUP + head) * HEAD_DIM + lane;
#pragma unroll
          for (int j = 0; j < HEAD_DIM / WARP; ++j) acc[j] += w * __ldcg(o + j * WARP);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < HEAD_DIM / WARP; ++j)
      out_rows[head * HEAD_DIM + j * WARP + lane] = from_float<scalar>(acc[j] / sum);
  }
}

// A segment that this block shares with others.
struct Cut {
  Pieces pieces;
  int first_row, heads;  // rows of the output
  bool last;             // whether all other pieces are there
};

// Count the block in at the segments it shares, once it has written its pieces and passed a barrier. Merge those where it
// is the last to come.
__device__ __forceinline__ void arrive_and_merge(Cut* cuts, int num_cuts, u32* arrivals, scalar* out,
                                                 const float* partial_out, const float* partial_lse, int warp, int warps) {
  if (threadIdx.x < num_cuts) {
    Cut& cut = cuts[threadIdx.x];
    cut.last = count_in(arrivals + cut.pieces.first_part, cut.pieces.count - 1);
  }
  __syncthreads();
  for (int i = 0; i < num_cuts; ++i) {
    const Cut cut = cuts[i];
    if (cut.last)
      merge_pieces(out + (i64)cut.first_row * HEAD_DIM, partial_out, partial_lse, cut.pieces, cut.heads, warp, warps);
  }
}
