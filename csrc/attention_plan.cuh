// How split-KV decode attention divides its work, computed on the device.
//
// Lay the contexts of all (sequence, head group) segments end to end, measured in units of UNIT tokens, and cut the line
// into equal parts, one per thread block:
//
//   segments   |---- seq 0, heads 0 ----|---- seq 0, heads 1 ----|- seq 1, heads 0 -|- seq 1, heads 1 -| ...
//   parts      |     0     |     1     |     2     |     3     |     4     |     5     |     6     | ...
//
// Every part reads the same number of bytes however ragged the batch is, and the grid depends on the GPU alone, so that
// a captured CUDA graph stays right when context lengths change. A part may meet several segments, a segment several
// parts; the pieces of a segment are merged by the block that finishes last (attention_merge.cuh).
//
// A border inside of a part costs time. So contexts of equal length are cut where they end, with fewer and longer parts,
// where those cost less.
#pragma once
#include "common.cuh"

constexpr int UNIT = HEAD_DIM <= 64 ? 32 : 16;  // tokens: one tile of a warp
constexpr int MIN_UNITS = 4;   // smallest part worth a block: below it fetching costs less than merging
constexpr float BORDER_UNITS = 24.f;  // what a border costs: a pipeline drained, partial sums written, and merged
constexpr int MAX_GROUP = 8 * HEAD_TILES;  // query heads handled together: columns of the tensor core's tiles

__device__ __forceinline__ int num_units(int context_len) { return (context_len + UNIT - 1) / UNIT; }

// Query heads come in groups that share a key/value head; more than MAX_GROUP sharing one are cut into several groups.
// Each (sequence, group) is one segment.
struct HeadGroups {
  int ratio, per_kv_head, per_seq;
  __device__ __forceinline__ HeadGroups(int num_heads, int num_kv_heads)
      : ratio(num_heads / num_kv_heads), per_kv_head((ratio + MAX_GROUP - 1) / MAX_GROUP),
        per_seq(num_kv_heads * per_kv_head) {}
  __device__ __forceinline__ int kv_head(int group) const { return group / per_kv_head; }
  __device__ __forceinline__ int first_head(int group) const {
    return kv_head(group) * ratio + group % per_kv_head * MAX_GROUP;
  }
  __device__ __forceinline__ int num_heads(int group) const {
    return min(MAX_GROUP, ratio - group % per_kv_head * MAX_GROUP);
  }
};

struct Plan {
  i64 total;  // units of all segments
  int parts;  // how many blocks get a part; the others have nothing to do

  // Part p is the units first_unit(p) ... first_unit(p + 1) - 1.
  __device__ __forceinline__ i64 first_unit(int part) const { return part * total / parts; }
  // The part that holds a unit: the last one with first_unit(part) <= unit.
  __device__ __forceinline__ int part_of(i64 unit) const { return (int)(((unit + 1) * parts - 1) / total); }
};

// How many parts, of at most `max_parts`, cut equally long segments only where they end: a multiple of their number, or one
// that divides it. 0 if there is none to be found at once.
__device__ __forceinline__ int aligned_parts(int segments, int max_parts) {
  if (segments <= max_parts) return max_parts / segments * segments;
  const int each = (segments + max_parts - 1) / max_parts;  // several segments to a part
  return segments % each == 0 ? segments / each : 0;
}

// Every warp makes the plan for itself, with no barrier; all its lanes get the result.
__device__ __forceinline__ Plan make_plan(const int* context_lens, int num_seqs, int segments_per_seq, int max_parts) {
  int units = 0, seqs = 0, longest = 0;  // empty sequences do not count
  for (int i = threadIdx.x % WARP; i < num_seqs; i += WARP) {
    const int own = num_units(__ldg(context_lens + i));
    units += own;
    seqs += own > 0;
    longest = max(longest, own);
  }
  units = __reduce_add_sync(FULL_MASK, units);
  seqs = __reduce_add_sync(FULL_MASK, seqs);
  const bool equal = units == (i64)seqs * __reduce_max_sync(FULL_MASK, longest);
  Plan plan;
  plan.total = (i64)units * segments_per_seq;
  const i64 useful = (plan.total + MIN_UNITS - 1) / MIN_UNITS;
  plan.parts = (int)min(useful, (i64)max_parts);
  if (equal && useful >= max_parts) {  // fewer and longer parts, or a border in most of them?
    const int aligned = aligned_parts(seqs * segments_per_seq, max_parts);
    if (aligned > 0 && __fdividef(plan.total, aligned) <= __fdividef(plan.total, max_parts) + BORDER_UNITS) plan.parts = aligned;
  }
  return plan;
}

// A place on the line: `unit` units into segment `segment` of sequence `seq`.
struct Place {
  int seq, segment, unit;
};

// Find a unit of the line (unit < total). Warps scan 32 sequences at a time.
__device__ __forceinline__ Place find_place(i64 unit, const int* context_lens, int num_seqs, int segments_per_seq) {
  const int lane = threadIdx.x % WARP;
  i64 before = 0;  // units of all sequences before this group of 32
  for (int group = 0;; group += WARP) {
    const int own = group + lane < num_seqs ? num_units(__ldg(context_lens + group + lane)) : 0;
    int upto = own;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
      const int other = __shfl_up_sync(FULL_MASK, upto, step);
      if (lane >= step) upto += other;
    }
    const u32 beyond = __ballot_sync(FULL_MASK, before + (i64)upto * segments_per_seq > unit);
    if (beyond != 0) {
      const int found = __ffs(beyond) - 1;
      const int units = __shfl_sync(FULL_MASK, own, found);
      const i64 start = before + (i64)(__shfl_sync(FULL_MASK, upto, found) - units) * segments_per_seq;
      const int offset = (int)(unit - start);
      return {group + found, offset / units, offset % units};
    }
    before += (i64)__shfl_sync(FULL_MASK, upto, WARP - 1) * segments_per_seq;
  }
}

// A place that moves along the line, over the units of one part.
struct Cursor {
  Place at;
  int left;         // units of the part from here on; 0 or less: past its end
  int context_len;  // of the sequence
  int kv_head;      // of the segment

  __device__ __forceinline__ Cursor(Place at, int left, const int* context_lens, const HeadGroups& groups)
      : at(at), left(left), context_len(left > 0 ? __ldg(context_lens + at.seq) : 0),
        kv_head(groups.kv_head(at.segment)) {}
  __device__ __forceinline__ int segment_units() const { return num_units(context_len); }
  // Whether the unit holds its sequence's last token.
  __device__ __forceinline__ bool is_newest() const { return at.unit == segment_units() - 1; }

  __device__ __forceinline__ void advance(int units, const int* context_lens, const HeadGroups& groups) {
    left -= units;
    at.unit += units;
    while (left > 0 && at.unit >= segment_units()) {
      at.unit -= segment_units();
      if (++at.segment == groups.per_seq) {
        at.segment = 0;
        context_len = __ldg(context_lens + ++at.seq);
      }
      kv_head = groups.kv_head(at.segment);
    }
  }
};
