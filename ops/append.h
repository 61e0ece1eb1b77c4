// The small kernels of a step: begin's words, and rows to their cells.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "status.h"

namespace kvjax {

// What begin tells the host, in pinned words: the error of earlier kernels, the stamp
// of the step before, then lengths [B].
constexpr int64_t kErrorWord = 0, kStampWord = 1, kLengthsWord = 3;

// Writes stamp_in [2] and lengths [B] to `words`, stamp_out and a ticket to the device.
Status LaunchBegin(cudaStream_t stream, const int32_t* lengths, int64_t num_seqs,
                   const uint32_t* stamp_in, uint64_t stamp, int32_t* words,
                   uint32_t* stamp_out, int32_t* ticket);

// Copies rows [B, T, row_bytes] to cells [B, S, row_bytes] where `where` [B, T] says;
// below 0 or beyond S drops the row. Cells may be pinned host memory: stores go over
// the link. row_bytes is a multiple of 16.
Status LaunchAppend(cudaStream_t stream, const char* rows, const int32_t* where,
                    int64_t num_seqs, int64_t num_new, int64_t num_cells,
                    int64_t row_bytes, char* cells);

}  // namespace kvjax
