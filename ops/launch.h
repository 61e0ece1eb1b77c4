// Launching a kernel as an ordinary call, so that a host compiler takes it too
// (tests/simt).
#pragma once

#include <utility>

#include "cuda_status.h"

// Whether a kernel may start while the one in front of it ends. Code for a compute
// capability below 9.0 can't wait for that one: then none does (CMakeLists.txt).
#if !defined(KVJAX_EARLY)
#define KVJAX_EARLY 1
#endif

namespace kvjax {

struct Grid {
  dim3 ctas;
  int threads;    // of a CTA
  int bytes = 0;  // of dynamic shared memory
  cudaStream_t stream;
  // It starts before the kernel in front of it has ended, if KVJAX_EARLY, and waits for
  // that one itself: cudaGridDependencySynchronize.
  bool early = false;
};

// Enqueues a kernel; does not wait.
template <typename... Params, typename... Args>
Status LaunchKernel(const Grid& grid, void (*kernel)(Params...), Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.ctas;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.bytes;
  config.stream = grid.stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = grid.early && KVJAX_EARLY ? 1 : 0;
  return KVJAX_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace kvjax
