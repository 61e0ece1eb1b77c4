// The CUDA that ops/*.cu need, played on a host: found before the real one, so that a
// C++ compiler takes those files as they are. A kernel's threads are fibers (cta.h), so
// a missing barrier shows as another result. Nothing here is a GPU's speed or its
// rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "cta.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
template <typename T>
T __ldg(const T* memory) {
  return *memory;
}

// ---------------------------------------------------------------- threads of a CTA

// Macros, so that a wait knows where it stands and one of them can be left out.
#define __syncthreads() (void)simt::Cta::current()->Sync(__FILE__, __LINE__, 0)
#define __syncthreads_and(x) \
  (simt::Cta::current()->Sync(__FILE__, __LINE__, (x) ? 0 : 1) == 0)
#define __syncwarp() simt::Cta::current()->SyncWarp(__FILE__, __LINE__)

// Lane i gets the x of lane `from`; all 32 lanes take part.
template <typename T>
T __shfl_sync(unsigned, T x, int from, int width = 32) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  const int lane = threadIdx.x % 32;
  word = simt::Cta::current()->Exchange(word, lane / width * width + from % width);
  std::memcpy(&x, &word, sizeof x);
  return x;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
  return __shfl_sync(mask, x, int(threadIdx.x % width) ^ bits, width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int step, int width = 32) {
  const int i = threadIdx.x % width;
  return __shfl_sync(mask, x, i < step ? i : i - step, width);
}

// ---------------------------------------------------------------- the host's side

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorInvalidValue };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline const char* cudaGetErrorString(cudaError_t) { return "a launch that can't be"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
struct cudaFuncAttributes {};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = simt::kProcessors, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace simt {

// Runs a kernel, one CTA after the other.
template <typename Kernel>
void RunGrid(dim3 grid, dim3 block, const Kernel& kernel) {
  gridDim = grid;
  blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        Cta::current()->Run(
            int(block.x), [](int thread) { threadIdx = dim3(unsigned(thread), 0, 0); },
            kernel);
      }
    }
  }
}

// The kernel that was launched last, until somebody waits for it.
inline thread_local std::function<void()> pending;

inline void Finish() {
  if (pending) std::exchange(pending, nullptr)();
}

// From within a kernel: the one in front of it runs now, as late as can be.
inline void AwaitPending(const char* file, int line) {
  if (!pending || Cta::current()->IsLeftOut(file, line)) return;
  const auto place = std::make_tuple(gridDim, blockDim, blockIdx, threadIdx);
  Cta::Nested([] { Finish(); });
  std::tie(gridDim, blockDim, blockIdx, threadIdx) = place;
}

}  // namespace simt

#define cudaGridDependencySynchronize() simt::AwaitPending(__FILE__, __LINE__)

// A kernel runs once the next is launched, or from within that if it starts early.
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Params...), Args&&... args) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  const bool fits = config->dynamicSmemBytes <= simt::kSharedBytes &&
                    block.x <= simt::kMaxThreads && grid.y <= 65535 && grid.z <= 65535;
  if (!fits || grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaErrorInvalidValue;
  const auto run = [=] { simt::RunGrid(grid, block, [&] { kernel(args...); }); };
  if (config->numAttrs > 0) run();
  simt::Finish();
  if (config->numAttrs == 0) simt::pending = run;
  return cudaSuccess;
}
