// Paged decode attention, third version: split contexts, share keys and values between query heads, use tensor cores.
//
// * Split: contexts are cut into parts of equal size, at most as many as the GPU has room for blocks (attention_plan.cuh), so
//   every SM reads memory until the end whatever the batch looks like. Flash-Decoding (Dao et al. 2023) in spirit, with
//   the even division of Stream-K (Osama et al. 2023).
// * Share: the query heads that use one key/value head (grouped-query attention) are the columns of one matrix, so that a
//   key is loaded once for all of them.
// * Tensor cores: with 4 query heads per key, a byte loaded needs 4 multiply-adds, which at 4 TB/s already fills half of the
//   ordinary cores' issue slots, and 8 overflow them. One mma.sync takes 16 tokens and up to 8 heads. (Heads as its 16 rows
//   would leave most of them empty, and need twice the products and twice the registers for sums.)
// * In flight: each warp has a ring of tiles of its own, all but one of them under way (attention_decode_ring.cuh). So the
//   loop has no barrier at all, nor does the stream of tiles stop where a segment ends.
// * Early: if the kernel in front still runs (overlap.cuh), the first tiles are fetched all the same, unless they hold the
//   newest token of a sequence, which that kernel stores.
//
// Macros beyond those of attention_common.cuh, chosen by the host: STAGES, 3 or 2. With 2, three blocks fit an SM of 228 KB:
// more warps, each of which waits more often. HEAD_TILES, of 8 heads: 1, or 2 where more than 8 share a key.
#include "attention_decode_ring.cuh"
#include "attention_merge.cuh"
#include "overlap.cuh"

constexpr int TOKEN_TILES = UNIT / 16;
constexpr bool ONE_TILE = TOKEN_TILES * HEAD_TILES == 1;
constexpr int WARPS = HEAD_DIM <= 128 ? 4 : 2;
static_assert(MAX_GROUP * HEAD_DIM * 4 <= SLOT_BYTES, "a warp's sums fit the slot that it has just used");

// grid: any number of blocks, block WARPS * 32 threads.
extern "C" __global__ void __launch_bounds__(WARPS * WARP, STAGES == 3 ? 2 : 3) attention_decode_split(
    scalar* __restrict__ out,               // [B, Hq, D]
    float* __restrict__ partial_out,        // [2 * gridDim.x, MAX_GROUP, D] pieces of segments that were cut
    float* __restrict__ partial_lse,        // [2 * gridDim.x, MAX_GROUP] base-2 logarithm of each piece's sum of exponentials
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
    fetch_tile(ring + s * SLOT_BYTES, k_cache, v_cache, rows[s], num_kv_heads, lane);
    copy_commit();
  }
  int row = rows[STAGES - 1], slot = 0;
  wait_for_previous();
  let_next_start();  // not before: then the next kernel can count on all that came before this one

  const TileReader k_reader(lane % 16, lane / 16), v_reader(lane / 16 * 8 + lane % 8, lane / 8 % 2);
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

    // Q as the B operand: columns are heads, those past the group are zero.
    u32 q_frag[HEAD_TILES][HEAD_DIM / 16][2];
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
      const scalar* q_row = q + (i64)here.at.seq * q_stride + (first_head + h * 8 + g) * HEAD_DIM + 2 * t;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) q_frag[h][i / 2][i % 2] = h * 8 + g < heads ? *(const u32*)(q_row + i * 8) : 0;
    }

    float acc[HEAD_DIM / 16][HEAD_TILES][4] = {};  // rows are dims, columns heads
    HeadSoftmax softmax;

    for (; unit < last; unit += WARPS) {
      copy_wait<STAGES - 2>();
      __syncwarp();  // every lane's part of the tile has arrived, and every lane is done with the slot refilled next
      const int refill = slot == 0 ? STAGES - 1 : slot - 1;
      fetch_tile(ring + refill * SLOT_BYTES, k_cache, v_cache, row, num_kv_heads, lane);
      copy_commit();  // even when empty, so that the count of groups stays right
      row = next_row();
      ahead.advance(WARPS, context_lens, groups);

      const u32 k_tile = ring + slot * SLOT_BYTES, v_tile = k_tile + TILE_BYTES;
      slot = slot == STAGES - 1 ? 0 : slot + 1;

      // K Q^T, 16 tokens x 8 heads at a time. Products of one sum wait for each other: there are two sums at least.
      float scores[TOKEN_TILES][HEAD_TILES][4] = {}, odd[4] = {};
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
          u32 a[4];
          load_matrices(a, k_reader.at(k_tile, m * 16, k));
#pragma unroll
          for (int h = 0; h < HEAD_TILES; ++h)
            mma_16x8x16<scalar>(ONE_TILE && k % 2 ? odd : scores[m][h], a, q_frag[h][k][0], q_frag[h][k][1]);
        }
      }
      if (ONE_TILE)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0][0][i] += odd[i];

      if ((unit + 1) * UNIT > context_len) {  // a token past the end: never the unit's first
#pragma unroll
        for (int i = 0; i < UNIT / 8; ++i)
          if (unit * UNIT + i * 8 + g >= context_len)
#pragma unroll
            for (int h = 0; h < HEAD_TILES; ++h) scores[i / 2][h][i % 2 * 2] = scores[i / 2][h][i % 2 * 2 + 1] = NEG_INF;
      }

      softmax.update(scores, scale_log2);
      if (softmax.outgrown) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n)
#pragma unroll
          for (int i = 0; i < HEAD_TILES * 4; ++i) acc[n][i / 4][i % 4] *= softmax.keep[i / 4 * 2 + i % 2];
      }

#pragma unroll
      for (int m = 0; m < TOKEN_TILES; ++m) {
        u32 p[HEAD_TILES][2];  // the probabilities as the B operand, whose pairs are tokens, where C's are heads
#pragma unroll
        for (int i = 0; i < HEAD_TILES * 2; ++i)
          p[i / 2][i % 2] = transpose_matrix(pack2<scalar>(scores[m][i / 2][i % 2 * 2], scores[m][i / 2][i % 2 * 2 + 1]));
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
          u32 a[4];
          load_matrices_transposed(a, v_reader.at(v_tile, m * 16, n));
#pragma unroll
          for (int h = 0; h < HEAD_TILES; ++h) mma_16x8x16<scalar>(acc[n][h], a, p[h][0], p[h][1]);
        }
      }
    }

    // Merge the warps through shared memory. A warp leaves its sums in the slot that it used last; the others are being
    // filled for the next segment.
    __syncwarp();
    float* own = reinterpret_cast<float*>(ring_memory + (slot == 0 ? STAGES - 1 : slot - 1) * SLOT_BYTES);
    of_warp[warp].leave(own, acc, softmax, scale_log2, heads);
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
