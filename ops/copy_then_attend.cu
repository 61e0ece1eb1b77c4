// copy_then_attend.h on a GPU: a stream of its own, plain copies, the kernels of
// attention.cu. Times are those of the device's own events.
#include <algorithm>

#include "attention_gpu.h"
#include "copies_cuda.h"
#include "copy_then_attend.h"
#include "timed_stream.h"

namespace kvjax {
namespace {

// Device memory of a run, freed at its end.
class Memory {
 public:
  explicit Memory(cudaStream_t stream) : stream_(stream) {}
  ~Memory() {
    for (void* memory : taken_) (void)cudaFree(memory);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <typename T>
  Status Take(int64_t bytes, T** memory) {
    void* made = nullptr;
    KVJAX_RETURN_IF_CUDA_ERROR(cudaMalloc(&made, std::max<int64_t>(bytes, 16)));
    taken_.push_back(made);
    *memory = static_cast<T*>(made);
    return Status::Ok();
  }

  // Takes as many bytes and fills them from the host, in the stream's order.
  template <typename T>
  Status Bring(const void* from, int64_t bytes, T** memory) {
    KVJAX_RETURN_IF_ERROR(Take(bytes, memory));
    return KVJAX_CUDA(
        cudaMemcpyAsync(taken_.back(), from, bytes, cudaMemcpyHostToDevice, stream_));
  }

 private:
  const cudaStream_t stream_;
  std::vector<void*> taken_;
};

int64_t LargestWorkspace(const AttentionShape& shape,
                         const std::vector<Segment>& segments) {
  int64_t floats = 0;
  for (const Segment& segment : segments) {
    int64_t blocks = 0;
    for (const Span& span : segment.spans) blocks += span.num_blocks;
    floats = std::max(floats, WorkspaceFloats(shape, blocks));
  }
  return floats;
}

}  // namespace

Status RunCopyThenAttend(int64_t device, const CopyThenAttend& work, double* seconds) {
  std::vector<Segment> segments;
  KVJAX_RETURN_IF_ERROR(CutLayer(work, &segments));
  TimedStream timed(static_cast<int>(device));
  KVJAX_RETURN_IF_ERROR(timed.Open());
  KVJAX_RETURN_IF_ERROR(PrepareAttention(static_cast<int>(device)));

  const AttentionShape& shape = work.shape;
  const int64_t workspace_floats = LargestWorkspace(shape, segments);
  const int64_t outs_bytes = work.num_layers * work.out_bytes();
  int32_t found = 0;
  Memory memory(timed.get());
  AttentionBuffers buffers{};
  char *slot = nullptr, *outs = nullptr;
  float* workspace = nullptr;
  KVJAX_RETURN_IF_ERROR(memory.Bring(work.q, work.q_bytes(), &buffers.q));
  KVJAX_RETURN_IF_ERROR(memory.Bring(work.rows, work.rows_bytes(), &buffers.rows));
  KVJAX_RETURN_IF_ERROR(
      memory.Bring(work.lengths, shape.num_seqs * 4, &buffers.lengths));
  KVJAX_RETURN_IF_ERROR(memory.Bring(&found, 4, &buffers.error));
  KVJAX_RETURN_IF_ERROR(memory.Take(work.state_floats() * 4, &buffers.state));
  KVJAX_RETURN_IF_ERROR(memory.Take(workspace_floats * 4, &workspace));
  KVJAX_RETURN_IF_ERROR(memory.Take(work.slot_bytes, &slot));
  KVJAX_RETURN_IF_ERROR(memory.Take(outs_bytes, &outs));
  buffers.where = buffers.lengths;  // the row's cell is the one behind the last

  const auto pass = [&]() -> Status {
    for (int64_t layer = 0; layer < work.num_layers; ++layer) {
      buffers.out = outs + layer * work.out_bytes();
      for (const Segment& segment : segments) {
        KVJAX_RETURN_IF_ERROR(
            EnqueueCopies(timed.get(), segment.copies, work.tails[layer], slot));
        KVJAX_RETURN_IF_ERROR(
            LaunchSpans(timed.get(), shape, buffers, slot, segment.spans, workspace));
      }
    }
    return Status::Ok();
  };
  KVJAX_RETURN_IF_ERROR(pass());
  KVJAX_RETURN_IF_ERROR(timed.Start());
  for (int64_t i = 0; i < work.passes; ++i) KVJAX_RETURN_IF_ERROR(pass());
  KVJAX_RETURN_IF_ERROR(timed.Stop(seconds));

  KVJAX_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(work.out, outs, outs_bytes, cudaMemcpyDeviceToHost));
  KVJAX_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(&found, buffers.error, 4, cudaMemcpyDeviceToHost));
  return found == 0 ? Status::Ok() : Status::Internal("lengths don't fit the cells");
}

}  // namespace kvjax
