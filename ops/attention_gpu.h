// Attention on a GPU: the same bits as attention.h's AttendSpans, enqueued on a stream.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "attention.h"

namespace kvjax {

// Query rows of a kv head (T x G) up to which a launch is split by blocks, with a fold
// behind it. More rows fold as they go. delivery/ffi.py sizes attend_device's workspace
// by the same rule.
constexpr int32_t kMaxSplitRows = 64;

// Floats of the workspace of a launch over `num_blocks` blocks.
int64_t WorkspaceFloats(const AttentionShape& shape, int64_t num_blocks);

// Enqueues attention over at most kMaxSpans spans. buffers.error is memory that the
// host reads too. Does not wait.
Status LaunchSpans(cudaStream_t stream, const AttentionShape& shape,
                   const AttentionBuffers& buffers, const char* base,
                   const std::vector<Span>& spans, float* workspace);

// The same over the cells of a layer that has no tail: lengths come from the device,
// the grid from the capacity, so a captured launch stays right as sequences grow.
// buffers.state and buffers.error are not used.
Status LaunchDevice(cudaStream_t stream, const AttentionShape& shape,
                    const AttentionBuffers& buffers, const char* cells,
                    float* workspace);

// Loads every kernel on a device and sets its attributes, once.
Status PrepareAttention(int device);

}  // namespace kvjax
