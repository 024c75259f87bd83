// What a kernel of csrc/ finds when it is compiled for the CPU (cuda_on_cpu.py). The threads of a block are fibers of one
// thread, which yield to each other at barriers and wherever lanes of a warp exchange something. Blocks run one after the
// other, so a `static` is as good as shared memory. Copies are complete as soon as they are issued.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __shared__ static
#define __log2f log2f
#define __expf expf

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- threads ---------------------------------------------------------------------------------------------------------

struct Barrier { int arrived = 0, phase = 0; };
struct Group { Barrier barrier; int alive = 0; };  // a warp, or the block
struct Warp : Group { std::array<uint64_t, 32> lanes; std::array<std::array<unsigned, 6>, 32> operands; };
struct Fiber { ucontext_t context; std::vector<char> stack; bool ended; };
struct Dim3 { unsigned x, y, z; };

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Group block;
static int current;
static ucontext_t outside;
static std::function<void()> body;
static Dim3 gridDim, blockIdx;
static struct { struct { operator unsigned() const { return current; } } x; } threadIdx;
alignas(1024) static unsigned char dynamic_shared[256 * 1024];

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "%s: thread %d of block (%u, %u, %u)\n", what, current, blockIdx.x, blockIdx.y, blockIdx.z);
  std::abort();
}
inline int next_alive() {
  const int count = fibers.size();
  for (int i = 1; i < count; ++i)
    if (const int other = (current + i) % count; !fibers[other].ended) return other;
  return -1;
}
inline void switch_to(int other) {
  Fiber& from = fibers[current];
  current = other;
  swapcontext(&from.context, &fibers[other].context);
}
// A thread that has ended is not waited for, as on the GPU.
inline void meet(Group& group) {
  Barrier& barrier = group.barrier;
  const int phase = barrier.phase;
  ++barrier.arrived;
  for (long turns = 0; barrier.phase == phase; ++turns) {
    if (barrier.arrived == group.alive) {
      barrier.arrived = 0;
      ++barrier.phase;
      return;
    }
    const int other = next_alive();
    if (other < 0 || turns > 1000000) fail("waits for ever at a barrier");
    switch_to(other);
  }
}
inline int lane_id() { return current % 32; }
inline Warp& own_warp() { return warps[current / 32]; }

static void run_fiber() {
  body();
  fibers[current].ended = true;
  --own_warp().alive;
  --block.alive;
  const int other = next_alive();
  if (other < 0) setcontext(&outside);
  current = other;
  setcontext(&fibers[other].context);
}
static void run_block(int threads) {
  std::memset(dynamic_shared, 0xff, sizeof dynamic_shared);  // NaN
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, {});
  block = {};
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.ended = false;
    fiber.stack.resize(128 * 1024);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
    ++warps[i / 32].alive;
    ++block.alive;
  }
  current = 0;
  swapcontext(&outside, &fibers[0].context);
}

// --- what threads say to each other ----------------------------------------------------------------------------------

inline void __syncthreads() { meet(block); }
inline void __syncwarp() { meet(own_warp()); }
inline void __threadfence() {}

template <typename T> std::array<T, 32> all_lanes(T value) {
  Warp& warp = own_warp();
  std::memcpy(&warp.lanes[lane_id()], &value, sizeof value);
  meet(warp);
  std::array<T, 32> found;
  for (int lane = 0; lane < 32; ++lane) std::memcpy(&found[lane], &warp.lanes[lane], sizeof value);
  meet(warp);
  return found;
}
template <typename T> T __shfl_sync(unsigned, T value, int lane) { return all_lanes(value)[lane & 31]; }
template <typename T> T __shfl_xor_sync(unsigned, T value, int mask) { return all_lanes(value)[lane_id() ^ mask]; }
template <typename T> T __shfl_up_sync(unsigned, T value, int by) {
  return all_lanes(value)[lane_id() < by ? lane_id() : lane_id() - by];
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto lanes = all_lanes(value);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= (unsigned)lanes[lane] << lane;
  return votes;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == 0xffffffffu; }
inline int __reduce_add_sync(unsigned, int value) {
  int sum = 0;
  for (int other : all_lanes(value)) sum += other;
  return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
  const auto lanes = all_lanes(value);
  return *std::max_element(lanes.begin(), lanes.end());
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  const unsigned old = *address;
  *address = old >= limit ? 0 : old + 1;
  return old;
}

// --- memory and numbers ----------------------------------------------------------------------------------------------

template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> void __stcs(T* p, T value) { *p = value; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned bf16_pair(float lo, float hi) { return bf16_bits(lo) | (unsigned)bf16_bits(hi) << 16; }

inline unsigned shared_offset(const void* p) { return (const unsigned char*)p - dynamic_shared; }
inline void copy16(unsigned to, const void* from, bool valid) {
  if (to % 16 || (uintptr_t)from % 16) fail("a copy of 16 bytes that is not aligned");
  if (valid) std::memcpy(dynamic_shared + to, from, 16);
  else std::memset(dynamic_shared + to, 0, 16);
}
// ldmatrix and mma.sync.m16n8k16 in bf16: see attention_mma.cuh for what lies in which lane.
inline void load_four_matrices(unsigned (&r)[4], unsigned address, bool transposed) {
  if (address % 16) fail("ldmatrix from a row that is not aligned");
  const auto rows = all_lanes(address);
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = 0;
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? 2 * t + e : g, column = transposed ? g : 2 * t + e;
      uint16_t value;
      std::memcpy(&value, dynamic_shared + rows[matrix * 8 + row] + 2 * column, 2);
      r[matrix] |= (unsigned)value << 16 * e;
    }
  }
}
inline unsigned transpose_pairs(unsigned pair) {
  const auto pairs = all_lanes(pair);
  const int g = lane_id() / 4, t = lane_id() % 4;
  const auto value = [&](int row, int column) { return pairs[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
  return value(2 * t, g) | value(2 * t + 1, g) << 16;
}
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Warp& warp = own_warp();
  warp.operands[lane_id()] = {a[0], a[1], a[2], a[3], b0, b1};
  meet(warp);
  const auto value = [&](int lane, int index, int half) {
    return __uint_as_float(warp.operands[lane][index] >> 16 * half << 16);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane_id() / 4 + i / 2 * 8, column = lane_id() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      c[i] += value(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2) * value(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
  }
  meet(warp);
}
