// A segment's copies on a CUDA stream.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "ranges.h"
#include "status.h"

namespace kvjax {

// Enqueues copies from pinned host memory at `source` to device memory at `target`, in
// any order among themselves. `stream` is not the null stream, and not being captured.
Status EnqueueCopies(cudaStream_t stream, const std::vector<Copy>& copies,
                     const char* source, char* target);

}  // namespace kvjax
