// Tensor cores and asynchronous copies in inline PTX (sm_80 and newer), for the attention kernels that use them.
//
// mma.sync.m16n8k16 multiplies A [16 x 16] by B [16 x 8] into C [16 x 8], float32. The operands lie spread over the 32
// lanes of a warp. With g = lane / 4 and t = lane % 4, a lane holds
//
//   A (4 registers, 2 values each):  a0 = A[g][2t..]   a1 = A[g+8][2t..]   a2 = A[g][2t+8..]   a3 = A[g+8][2t+8..]
//   B (2 registers, 2 values each):  b0 = B[2t..][g]   b1 = B[2t+8..][g]          (pairs run down a column)
//   C (4 floats):                    c0, c1 = C[g][2t..]                 c2, c3 = C[g+8][2t..]
//
// C of one product is laid out like A of the next, and transpose_matrix makes B of it: it need not leave registers.
#pragma once
#include "attention_common.cuh"

template <typename T> __device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8 x 8 matrices of 16-bit values from shared memory. Lane i names the address of row i % 8 of matrix i / 8; lane i
// receives from each matrix the two values at row i / 4, columns 2 (i % 4) and + 1; with `_transposed`, at rows
// 2 (i % 4) and + 1 of column i / 4.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// An 8 x 8 matrix of 16-bit values, two neighbours of row lane / 4 in a lane: its transpose, spread likewise.
__device__ __forceinline__ u32 transpose_matrix(u32 pair) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Four neighbouring lanes exchange their values: lane t of them gets value t of each.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & bit)) {
        const bool high = threadIdx.x & bit;
        const u32 received = __shfl_xor_sync(FULL_MASK, high ? x[i] : x[i | bit], bit);
        if (high) x[i] = received;
        else x[i | bit] = received;
      }
}

// 16 bytes from global to shared memory without passing through registers, so that a thread can have many in flight.
// Not valid: writes zeros and reads nothing.
__device__ __forceinline__ void copy16_async(u32 to_shared, const void* from_global, bool valid) {
  // The predicate says whether to ignore the source. The other spelling, a count of bytes to copy, costs six instructions.
  asm volatile(
      "{ .reg .pred ignored; setp.eq.u32 ignored, %2, 0; cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored; }"
      ::"r"(to_shared), "l"(from_global), "r"((u32)valid)
      : "memory");
}
// Closes a group of the copies this thread issued since the last group.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's groups are unfinished.
template <int PENDING> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- tiles of token rows in shared memory ---------------------------------------------------------------------------

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;  // 16-byte chunks in a row: the unit of copies and of ldmatrix

// Byte offset of a chunk in a tile. ldmatrix reads the same chunk of 8 consecutive rows at once; rows are a multiple of 64
// bytes apart, so plainly stored they would all fall on the same few of the 32 banks. Permuting the chunks of a row by
// its row number (an XOR: its own inverse, no padding) spreads them over all banks.
__device__ __forceinline__ u32 tile_offset(int row, int chunk) {
  // 192-byte rows (HEAD_DIM 96) alternate between the two halves of the banks already, so 2 bits do.
  const int swizzle = HEAD_DIM % 64 == 0 ? row % 8 : (row / 2) % 4;
  return row * ROW_BYTES + ((chunk ^ swizzle) * 16);
}

// Where a lane reads a chunk (0 or 1) of a row, and the chunks 2 * `right` further right in rows a multiple of 16 further
// down. Permuted chunk numbers are reached by XOR: an instruction a step, where addresses would take a register each.
struct TileReader {
  u32 row_start, chunk_bytes;
  __device__ __forceinline__ TileReader(int row, int chunk)
      : row_start(row * ROW_BYTES), chunk_bytes(tile_offset(row, chunk) - row * ROW_BYTES) {}
  __device__ __forceinline__ u32 at(u32 tile, int rows, int right) const {
    return tile + rows * ROW_BYTES + row_start + (chunk_bytes ^ (right * 32));
  }
};
