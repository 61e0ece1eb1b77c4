// CUDA's results as kvjax's: the failed expression and CUDA's own words.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "status.h"

namespace kvjax {

inline Status CudaStatus(cudaError_t error, const char* expression) {
  if (error == cudaSuccess) return Status::Ok();
  (void)cudaGetLastError();  // told once: the next call must not find it
  const std::string text = std::string(expression) + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? Status::Exhausted(text)
                                            : Status::Internal(text);
}

}  // namespace kvjax

#define KVJAX_CUDA(expr) ::kvjax::CudaStatus((expr), #expr)
#define KVJAX_RETURN_IF_CUDA_ERROR(expr) KVJAX_RETURN_IF_ERROR(KVJAX_CUDA(expr))
