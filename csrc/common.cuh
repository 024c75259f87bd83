// What every kernel here shares: 16-bit float types, 16-byte vectors, warp reductions.
//
// No CUDA toolkit header is used. NVRTC needs none for built-ins (threadIdx, __shfl_xor_sync, fmaxf, ...); cuda_bf16.h is
// not in the pip wheels we install, and leaving it out keeps a compile near 0.1 s. Conversions are PTX `cvt` or a shift.
//
// Conventions: SCALAR is a macro given at compile time (-DSCALAR=bf16 or fp16). Tensors arrive as raw pointers; inner
// dimensions are contiguous and outer strides are passed explicitly, counted in ELEMENTS. Offsets into the KV cache are
// 64-bit, since a cache holds more than 2^31 elements.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARP = 32;
constexpr u32 FULL_MASK = 0xffffffffu;
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC has no <math.h>

// ---- 16-bit floats --------------------------------------------------------------------------------------------------

struct bf16 { u16 bits; };  // 1 sign, 8 exponent, 7 mantissa bits: a float32 cut in half
struct fp16 { u16 bits; };  // 1 sign, 5 exponent, 10 mantissa bits: IEEE half

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Round to nearest even, as torch does.
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> __device__ __forceinline__ fp16 from_float<fp16>(float x) {
  fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Two values in one 32-bit register: the operand format of mma.sync. `lo` is the element at the lower address.
template <typename T> __device__ __forceinline__ u32 pack2(float lo, float hi);
template <> __device__ __forceinline__ u32 pack2<bf16>(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <> __device__ __forceinline__ u32 pack2<fp16>(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

template <typename T> __device__ __forceinline__ float2 unpack2(u32 x);
template <> __device__ __forceinline__ float2 unpack2<bf16>(u32 x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack2<fp16>(u32 x) {
  return make_float2(to_float(fp16{(u16)(x & 0xffffu)}), to_float(fp16{(u16)(x >> 16)}));
}

// ---- 16-byte vectors: the widest access one thread can make ---------------------------------------------------------

__device__ __forceinline__ uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }

// For data touched exactly once (bulk copies, the KV cache): evict it from the caches first.
__device__ __forceinline__ uint4 load16_streaming(const void* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }

// 8 values of a 16-bit type, widened to float32 and back.
template <typename T> __device__ __forceinline__ void unpack8(uint4 v, float (&out)[8]) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<T>(words[i]);
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}
template <typename T> __device__ __forceinline__ uint4 pack8(const float (&in)[8]) {
  return make_uint4(pack2<T>(in[0], in[1]), pack2<T>(in[2], in[3]), pack2<T>(in[4], in[5]), pack2<T>(in[6], in[7]));
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// (Template parameters are lower case: upper-case names are left to -D macros.)
//
// Over groups of `width` neighbouring lanes (a power of two); every lane of the group gets the result.
template <int width = WARP> __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
  return x;
}
template <int width = WARP> __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
  return x;
}

// Over all `threads` threads of the block. `scratch` is shared memory for threads / 32 floats. Every thread must call it.
template <int threads> __device__ __forceinline__ float block_sum(float x, float* scratch) {
  constexpr int warps = threads / WARP;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < warps; ++w) total += scratch[w];
  __syncthreads();  // scratch may be reused by the next call
  return total;
}
