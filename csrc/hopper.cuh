// What Hopper's tensor cores and copy engine need, in inline PTX (sm_90a).
//
// * An mbarrier, 8 bytes of shared memory, counts arrivals of threads and bytes from the copy engine. When all that are
//   expected have come, its phase is complete and the next begins. Who waits names the phase by its parity.
// * A named barrier lets some warps of a block wait for each other. Who only arrives does not wait.
// * The copy engine moves a box of a tensor to shared memory at the request of one thread. The tensor map, which the host
//   encodes, says where the tensor lies and how a box is laid out. What lies outside of the tensor arrives as zeros.
// * wgmma multiplies for a warpgroup, four warps together. It reads its right operand, and the left one if wanted, from
//   shared memory by itself, and runs in the background.
#pragma once
#include "attention_mma.cuh"

// ---- barriers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Between the last mbarrier_init and the first __syncthreads.
__device__ __forceinline__ void mbarriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expecting(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}
// Counting is there for ptxas: it takes a plain loop for a wait, and moves arithmetic from before it to behind it.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  for (u32 tries = 0; !mbarrier_passed(barrier, parity); ++tries)
    if (tries > 1 << 16) __nanosleep(100);
}

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to wgmma and the copy engine.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void clear16_shared(u32 address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// The calling warpgroup goes on with this many registers per thread; a block has as many in all as at its start.
template <int n> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

// ---- the copy engine ------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The box whose first element has these coordinates, innermost first. Its bytes count at `barrier`.
__device__ __forceinline__ void copy_box(u32 to_shared, const TensorMap& map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to_shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// Where wgmma and the copy engine have chunk `chunk` (16 bytes) of a row: rows are cut into columns of 128 bytes, which
// lie `column_bytes` apart; within one the chunks of a row are permuted by XOR with the row number.
__device__ __forceinline__ u32 column_offset(int row, int chunk, int column_bytes) {
  return chunk / 8 * column_bytes + row * 128 + ((chunk % 8 ^ row % 8) * 16);
}
// An operand laid out so, from the address of its first row (of 8 that lie together) and first chunk on. `column_bytes`
// counts only where one product spans two columns.
__device__ __forceinline__ u64 descriptor(u32 address, int column_bytes = 16) {
  return (u64)(address >> 4) | (u64)(column_bytes >> 4) << 16 | (u64)(8 * 128 >> 4) << 32 | (u64)1 << 62;
}
__device__ __forceinline__ u64 advance(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

#define PTX_bf16 "bf16"
#define PTX_fp16 "f16"
#define PTX_JOIN(T) PTX_##T
#define PTX_OF(T) PTX_JOIN(T)
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_OF(SCALAR) "." PTX_OF(SCALAR)
#define REGS8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define REGS32(c) REGS8(c, 0), REGS8(c, 8), REGS8(c, 16), REGS8(c, 24)
#define REGS48(c) REGS32(c), REGS8(c, 32), REGS8(c, 40)
#define REGS64(c) REGS48(c), REGS8(c, 48), REGS8(c, 56)
#define NAMES32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES48 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES64 NAMES48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// C [64 x n] = (add ? C : 0) + A [64 x 16] B [16 x n]; a thread holds n / 2 floats of C, laid out as by mma.sync. A lies
// in shared memory, or in registers as for mma.sync. `by_rows`: B's rows, not its columns, are contiguous.
template <int n, int by_rows> struct Wgmma;
#define DEFINE_WGMMA(N, NAMES, REGS, P0, P1, P2, P3, P4, P5, P6)                                                         \
  template <int by_rows> struct Wgmma<N, by_rows> {                                                                      \
    static __device__ __forceinline__ void run(float (&c)[N / 2], u64 a, u64 b, int add) {                               \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " P2 ", 0; " WGMMA(N) " {" NAMES "}, " P0 ", " P1 ", p, 1, 1, 0, " P3 \
                   "; }"                                                                                                 \
                   : REGS(c)                                                                                             \
                   : "l"(a), "l"(b), "r"(add), "n"(by_rows));                                                            \
    }                                                                                                                    \
    static __device__ __forceinline__ void run(float (&c)[N / 2], const u32 (&a)[4], u64 b, int add) {                   \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " P5 ", 0; " WGMMA(N) " {" NAMES "}, {" P0 "," P1 "," P2 "," P3       \
                   "}, " P4 ", p, 1, 1, " P6 "; }"                                                                       \
                   : REGS(c)                                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(by_rows));                        \
    }                                                                                                                    \
  };
DEFINE_WGMMA(64, NAMES32, REGS32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
DEFINE_WGMMA(96, NAMES48, REGS48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
DEFINE_WGMMA(128, NAMES64, REGS64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups run.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// For the compiler: `c` has its value here, and what uses it comes after. To be said of the sums after each wait.
template <int n> __device__ __forceinline__ void settle(float (&c)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
