// Second half of attention_decode_split.cu: merge the pieces of each segment that was cut.
//
// Each piece comes as a finished softmax average o_i over its own tokens and lse_i = log2(sum of 2^score). Over all tokens
// the average is sum_i 2^lse_i o_i / sum_i 2^lse_i, computed relative to the largest lse.
//
// Only cuts matter, and there are fewer cuts than parts: block b looks at the cut between parts b - 1 and b. If that is the
// first cut inside its segment, the block merges the segment; otherwise another block does, or nothing is to be done.
#include "attention_common.cuh"
#include "attention_plan.cuh"

constexpr int LANES = HEAD_DIM / 4;                           // 16 bytes of float32 each
constexpr int ROWS = HEAD_DIM == 96 ? 8 : 1024 / HEAD_DIM;    // pieces read at once

// grid (parts of the split kernel, heads in a group), block LANES * ROWS threads.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) attention_decode_merge(
    scalar* __restrict__ out,                // [B, Hq, D]; what the split kernel finished alone is left as it is
    const float* __restrict__ partial_out,   // [2 * gridDim.x, 16, D]
    const float* __restrict__ partial_lse,   // [2 * gridDim.x, 16]
    const int* __restrict__ context_lens,    // [B]
    int num_seqs, int num_heads, int num_kv_heads) {
  __shared__ float row_acc[ROWS][HEAD_DIM], row_largest[ROWS], row_sum[ROWS];
  const int part = blockIdx.x, head = blockIdx.y;
  const HeadGroups groups(num_heads, num_kv_heads);
  const Plan plan = make_plan(context_lens, num_seqs, groups.per_seq, gridDim.x);
  if (part == 0 || part >= plan.parts) return;
  const i64 cut = plan.first_unit(part);
  const Place place = find_place(cut, context_lens, num_seqs, groups.per_seq);
  const i64 start = cut - place.unit, end = start + num_units(__ldg(context_lens + place.seq));
  const i64 previous_cut = plan.first_unit(part - 1);
  if (place.unit == 0 || previous_cut > start || head >= groups.num_heads(place.segment)) return;

  // A part's first piece is in slot 2 * part, a later one that is incomplete in 2 * part + 1.
  const int first = part - 1, last = plan.part_of(end - 1), lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  float largest = NEG_INF, sum = 0.f;
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int p = first + row; p <= last; p += ROWS) {
    const int at = (2 * p + (p == first && previous_cut < start)) * MAX_GROUP + head;
    const float lse = partial_lse[at];
    const float4 o = *(const float4*)(partial_out + (i64)at * HEAD_DIM + lane * 4);
    const float new_largest = fmaxf(largest, lse);
    const float keep = rescale(largest, new_largest), weight = rescale(lse, new_largest);
    acc = make_float4(acc.x * keep + o.x * weight, acc.y * keep + o.y * weight, acc.z * keep + o.z * weight,
                      acc.w * keep + o.w * weight);
    sum = sum * keep + weight;
    largest = new_largest;
  }
  *(float4*)&row_acc[row][lane * 4] = acc;
  if (lane == 0) {
    row_largest[row] = largest;
    row_sum[row] = sum;
  }
  __syncthreads();

  const int d = threadIdx.x;
  if (d >= HEAD_DIM) return;
  float merged_largest = NEG_INF, merged_sum = 0.f, merged = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) merged_largest = fmaxf(merged_largest, row_largest[r]);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float factor = rescale(row_largest[r], merged_largest);
    merged_sum += row_sum[r] * factor;
    merged += row_acc[r][d] * factor;
  }
  const int out_head = groups.first_head(place.segment) + head;
  out[((i64)place.seq * num_heads + out_head) * HEAD_DIM + d] = from_float<scalar>(merged / merged_sum);
}
