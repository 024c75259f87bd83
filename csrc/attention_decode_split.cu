// Paged decode attention, third version: split contexts, share keys and values between query heads, use tensor cores.
//
// * Split: contexts are cut into parts of equal size, at most as many as the GPU has room for blocks (attention_plan.cuh), so
//   every SM reads memory until the end whatever the batch looks like. Flash-Decoding (Dao et al. 2023) in spirit, with
//   the even division of Stream-K (Osama et al. 2023).
// * Share: the query heads that use one key/value head (grouped-query attention) are the rows of one matrix, so that a
//   key is loaded once for all of them.
// * Tensor cores: with 4 query heads per key, a byte loaded needs 4 multiply-adds, which at 4 TB/s already fills half of the
//   ordinary cores' issue slots, and 8 overflow them. One mma.sync takes up to 16 heads at the same cost.
// * In flight: each warp has a ring of tiles of its own, all but one of them under way (attention_decode_ring.cuh). So the
//   loop has no barrier at all, nor does the stream of tiles stop where a segment ends.
// * Early: if the kernel in front still runs (overlap.cuh), the first tiles are fetched all the same, unless they hold the
//   newest token of a sequence, which that kernel stores.
//
// Macros beyond those of attention_common.cuh: STAGES, 3 or 2, chosen by the host. With 2, three blocks fit an SM of 228 KB:
// more warps, each of which waits more often.
#include "attention_decode_ring.cuh"
#include "attention_merge.cuh"
#include "attention_softmax.cuh"
#include "overlap.cuh"

constexpr int WARPS = HEAD_DIM <= 128 ? 4 : 2;
static_assert(MAX_GROUP * HEAD_DIM * 4 <= SLOT_BYTES, "a warp's sums fit the slot that it has just used");

// grid: any number of blocks, block WARPS * 32 threads.
extern "C" __global__ void __launch_bounds__(WARPS * WARP, STAGES == 3 ? 2 : 3) attention_decode_split(
    scalar* __restrict__ out,               // [B, Hq, D]
    float* __restrict__ partial_out,        // [2 * gridDim.x, 16, D] pieces of segments that were cut
    float* __restrict__ partial_lse,        // [2 * gridDim.x, 16] base-2 logarithm of each piece's sum of exponentials
    u32* __restrict__ arrivals,             // [gridDim.x] zeros, and zeros again afterwards
    const scalar* q,                        // [B, Hq, D], rows q_stride elements apart
    const scalar* k_cache,                  // [num_blocks, BLOCK_SIZE, Hkv, D]
    const scalar* v_cache,                  // same
    const int* __restrict__ block_tables,   // [B, max_blocks]
    const int* __restrict__ context_lens,   // [B]
    float scale, int q_stride, int max_blocks, int num_seqs, int num_heads, int num_kv_heads) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ WarpSums of_warp[WARPS];
  __shared__ Cut cuts[2];  // a part's first segment and its last may be shared with other parts
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  unsigned char* ring_memory = shared + warp * RING_BYTES;
  const u32 ring = shared_address(ring_memory);

  const HeadGroups groups(num_heads, num_kv_heads);
  const Plan plan = make_plan(context_lens, num_seqs, groups.per_seq, gridDim.x);
  i64 line = 0;  // where on the line of all units this block stands
  Place place = {};
  int part_units = 0;
  if ((int)blockIdx.x < plan.parts) {
    line = plan.first_unit(blockIdx.x);
    part_units = (int)(plan.first_unit(blockIdx.x + 1) - line);
    place = find_place(line, context_lens, num_seqs, groups.per_seq);
  }

  // Warp w takes units w, w + WARPS, ... of the part. `ahead` is where its fetches stand; `row` always runs one tile
  // ahead of them, since they would otherwise wait for the block table.
  Cursor here(place, part_units, context_lens, groups), ahead = here;
  ahead.advance(warp, context_lens, groups);
  const auto next_row = [&] {
    const int token = ahead.at.unit * UNIT + lane % UNIT;
    int found = -1;
    if (ahead.left > 0 && token < ahead.context_len) {
      const int* block_table = block_tables + (i64)ahead.at.seq * max_blocks;
      found = cache_row(block_table, token) * num_kv_heads + ahead.kv_head;
    }
    return found;
  };
  bool newest[STAGES];
  int rows[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    rows[s] = next_row();
    newest[s] = ahead.is_newest();
    ahead.advance(WARPS, context_lens, groups);
  }
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (newest[s]) wait_for_previous();
    fetch_tile(ring + s * SLOT_BYTES, k_cache, v_cache, rows[s], lane);
    copy_commit();
  }
  int row = rows[STAGES - 1], slot = 0;
  wait_for_previous();
  let_next_start();  // not before: then the next kernel can count on all that came before this one

  const TileReader k_reader(lane / 16 * 8 + lane % 8, lane / 8 % 2), v_reader(lane % 16, lane / 16);
  const float scale_log2 = scale * LOG2_E;
  int unit = here.at.unit + warp;  // this warp's next one in the segment
  int num_cuts = 0;
  for (int piece = 2 * blockIdx.x; here.left > 0; piece = 2 * blockIdx.x + 1) {
    const int context_len = here.context_len, segment_units = here.segment_units();
    const int first = here.at.unit, last = min(first + here.left, segment_units);  // this piece: units first ... last - 1
    const int first_head = groups.first_head(here.at.segment), heads = groups.num_heads(here.at.segment);
    const int first_row = here.at.seq * num_heads + first_head;  // of the output, seen as [B * Hq, D]
    const bool whole = first == 0 && last == segment_units;  // no other part has a piece of this segment
    if (!whole && threadIdx.x == 0) cuts[num_cuts] = {Pieces(plan, line - first, segment_units), first_row, heads, false};

    // Q as the A operand: rows are heads, those past the group are zero.
    u32 q_frag[HEAD_DIM / 16][4];
    const scalar* q_rows = q + (i64)here.at.seq * q_stride + first_head * HEAD_DIM + 2 * t;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16 * 4; ++i) {
      const int head = g + i % 2 * 8, dim = i / 4 * 16 + i % 4 / 2 * 8;
      q_frag[i / 4][i % 4] = head < heads ? *(const u32*)(q_rows + head * HEAD_DIM + dim) : 0;
    }

    float acc[HEAD_DIM / 8][4] = {};  // rows g and g + 8
    OnlineSoftmax<UNIT / 2> softmax;

    for (; unit < last; unit += WARPS) {
      copy_wait<STAGES - 2>();
      __syncwarp();  // every lane's part of the tile has arrived, and every lane is done with the slot refilled next
      const int refill = slot == 0 ? STAGES - 1 : slot - 1;
      fetch_tile(ring + refill * SLOT_BYTES, k_cache, v_cache, row, lane);
      copy_commit();  // even when empty, so that the count of groups stays right
      row = next_row();
      ahead.advance(WARPS, context_lens, groups);

      const u32 k_tile = ring + slot * SLOT_BYTES, v_tile = k_tile + TILE_BYTES;
      slot = slot == STAGES - 1 ? 0 : slot + 1;

      float scores[UNIT / 8][4] = {};  // Q K^T: 16 heads x 8 tokens each
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
        for (int n = 0; n < UNIT / 8; n += 2) {
          u32 b[4];
          load_matrices(b, k_reader.at(k_tile, n * 8, k));
          mma_16x8x16<scalar>(scores[n], q_frag[k], b[0], b[1]);
          mma_16x8x16<scalar>(scores[n + 1], q_frag[k], b[2], b[3]);
        }
      }

      if ((unit + 1) * UNIT > context_len) {  // a token past the end: never the unit's first
#pragma unroll
        for (int i = 0; i < UNIT / 8 * 4; ++i)
          if (unit * UNIT + i / 4 * 8 + 2 * t + i % 2 >= context_len) scores[i / 4][i % 4] = NEG_INF;
      }

      const bool both = heads > 8;  // otherwise rows g + 8 are padding
      softmax.update(reinterpret_cast<float(&)[UNIT / 2]>(scores), scale_log2, both);
      if (softmax.outgrown) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (r == 1 && !both) break;
#pragma unroll
          for (int n = 0; n < HEAD_DIM / 8; ++n) {
            acc[n][2 * r] *= softmax.keep[r];
            acc[n][2 * r + 1] *= softmax.keep[r];
          }
        }
      }
      u32 p_frag[UNIT / 16][4] = {};  // the probabilities, as the A operand of P V
#pragma unroll
      for (int i = 0; i < UNIT / 4; ++i)
        if (i % 2 == 0 || both) p_frag[i / 4][i % 4] = pack2<scalar>(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);

#pragma unroll
      for (int k = 0; k < UNIT / 16; ++k) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
          u32 b[4];
          load_matrices_transposed(b, v_reader.at(v_tile, k * 16, n));
          mma_16x8x16<scalar>(acc[2 * n], p_frag[k], b[0], b[1]);
          mma_16x8x16<scalar>(acc[2 * n + 1], p_frag[k], b[2], b[3]);
        }
      }
    }

    // Merge the warps through shared memory. A warp leaves its sums in the slot that it used last; the others are being
    // filled for the next segment.
    __syncwarp();
    float* own = reinterpret_cast<float*>(ring_memory + (slot == 0 ? STAGES - 1 : slot - 1) * SLOT_BYTES);
    of_warp[warp].leave(own, acc, softmax.largest, softmax.total, scale_log2, heads);
    __syncthreads();
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += WARPS * WARP) {
      const int head = i / HEAD_DIM, d = i % HEAD_DIM;
      float lse;
      const float merged = merge_warps(of_warp, head, d, lse);
      if (whole) {
        out[(i64)first_row * HEAD_DIM + i] = from_float<scalar>(merged);
      } else {
        partial_out[(i64)piece * MAX_GROUP * HEAD_DIM + i] = merged;
        if (d == 0) partial_lse[piece * MAX_GROUP + head] = lse;
      }
    }
    __syncthreads();  // the slots are about to be refilled
    num_cuts += !whole;
    line += last - first;
    here.advance(last - first, context_lens, groups);
    unit -= last;  // the next piece, if any, starts a segment
  }

  // Not sooner: the fences in there would also wait for all copies that are under way.
  arrive_and_merge(cuts, num_cuts, arrivals, out, partial_out, partial_lse, warp, WARPS);

  // Nobody has a part of an empty sequence: its output is zero.
  for (int seq = blockIdx.x; seq < num_seqs; seq += gridDim.x) {
    if (__ldg(context_lens + seq) > 0) continue;
    for (int i = threadIdx.x; i < num_heads * ROW_CHUNKS; i += WARPS * WARP)
      store16(out + ((i64)seq * num_heads * ROW_CHUNKS + i) * 8, make_uint4(0, 0, 0, 0));
  }
}
