#include "append.h"
#include "cuda_status.h"

namespace kvjax {
namespace {

__global__ void BeginKernel(const int32_t* lengths, int64_t num_seqs,
                            const uint32_t* stamp_in, uint2 stamp, int32_t* words,
                            uint32_t* stamp_out, int32_t* ticket) {
  for (int64_t i = threadIdx.x; i < num_seqs; i += blockDim.x) {
    words[kLengthsWord + i] = lengths[i];
  }
  if (threadIdx.x == 0) {
    words[kStampWord] = int32_t(stamp_in[0]);
    words[kStampWord + 1] = int32_t(stamp_in[1]);
    stamp_out[0] = stamp.x;
    stamp_out[1] = stamp.y;
    *ticket = 0;
  }
}

__global__ void AppendKernel(const uint4* rows, const int32_t* where, int64_t num_new,
                             int64_t num_cells, int64_t row_pieces, uint4* cells) {
  const int64_t row = blockIdx.x, cell = where[row];
  if (cell < 0 || cell >= num_cells) return;
  const uint4* source = rows + row * row_pieces;
  uint4* target = cells + (row / num_new * num_cells + cell) * row_pieces;
  for (int64_t i = threadIdx.x; i < row_pieces; i += blockDim.x) target[i] = source[i];
}

}  // namespace

Status LaunchBegin(cudaStream_t stream, const int32_t* lengths, int64_t num_seqs,
                   const uint32_t* stamp_in, uint64_t stamp, int32_t* words,
                   uint32_t* stamp_out, int32_t* ticket) {
  const uint2 halves = make_uint2(uint32_t(stamp), uint32_t(stamp >> 32));
  BeginKernel<<<1, 128, 0, stream>>>(lengths, num_seqs, stamp_in, halves, words,
                                     stamp_out, ticket);
  return KVJAX_CUDA(cudaGetLastError());
}

Status LaunchAppend(cudaStream_t stream, const char* rows, const int32_t* where,
                    int64_t num_seqs, int64_t num_new, int64_t num_cells,
                    int64_t row_bytes, char* cells) {
  const int64_t num_rows = num_seqs * num_new, pieces = row_bytes / 16;
  if (num_rows == 0 || pieces == 0) return Status::Ok();
  const unsigned threads = pieces < 256 ? unsigned((pieces + 31) / 32 * 32) : 256;
  AppendKernel<<<unsigned(num_rows), threads, 0, stream>>>(
      reinterpret_cast<const uint4*>(rows), where, num_new, num_cells, pieces,
      reinterpret_cast<uint4*>(cells));
  return KVJAX_CUDA(cudaGetLastError());
}

}  // namespace kvjax
