// Launches of attention: which kernels, how many CTAs, the fold behind them.
#include <algorithm>
#include <mutex>
#include <set>

#include "attention_choice.h"
#include "attention_fold.cuh"
#include "attention_gpu.h"
#include "launch.h"
#include "on_device.h"

namespace kvjax {
namespace {

constexpr int kSharedOfAll = 228 << 10;  // of a multiprocessor
constexpr int kSharedOfCta = 1 << 10;    // that CUDA takes for each CTA

Choice Choose(const AttentionShape& s, bool run) {
  return s.cell_type == Type::kF32 ? ChooseF32(s, run) : ChooseBf16(s, run);
}

Status Processors(int* processors) {
  int device = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  return KVJAX_CUDA(
      cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device));
}

// As many CTAs as there are blocks, or as the device holds at once: each then loads its
// next block while it computes.
Status Split(cudaStream_t stream, const Params& p, const Choice& choice, unsigned tiles,
             int processors) {
  const int num_blocks = p.num_blocks();
  if (num_blocks == 0) return Status::Ok();
  const int by_memory = kSharedOfAll / (choice.bytes + kSharedOfCta);
  const int64_t resident = processors * std::max(1, std::min(by_memory, choice.ctas));
  const int64_t share = resident / (int64_t(p.s.num_kv_heads) * tiles);
  const dim3 grid(p.s.num_kv_heads, tiles,
                  unsigned(std::clamp<int64_t>(share, 1, num_blocks)));
  return LaunchKernel({grid, kThreads, choice.bytes, stream}, choice.kernel, p);
}

// A CTA for some of a row's values each, where processors would be left without one.
Status Fold(cudaStream_t stream, const Params& p, bool carries, int processors) {
  const int64_t rows = int64_t(p.num_rows) * p.s.num_kv_heads * p.num_spans();
  int slices = 1;
  while (!carries && slices * kFoldSlice < p.s.value_dim &&
         rows * slices < processors) {
    slices *= 2;
  }
  const dim3 grid(p.num_rows * slices, p.s.num_kv_heads, p.num_spans());
  const bool behind_split = p.num_blocks() > 0;
  return LaunchKernel({grid, kFoldThreads, 0, stream, behind_split}, FoldKernel, p,
                      slices);
}

Status Enqueue(cudaStream_t stream, const Params& p, bool carries) {
  const AttentionShape& s = p.s;
  const bool run = s.rows() > kMaxSplitRows;
  const Choice choice = Choose(s, run);
  const unsigned tiles = (s.rows() + choice.rows - 1) / choice.rows;
  if (run) {
    const dim3 grid(p.num_spans(), s.num_kv_heads, tiles);
    return LaunchKernel({grid, kThreads, choice.bytes, stream}, choice.kernel, p);
  }
  int processors = 0;
  KVJAX_RETURN_IF_ERROR(Processors(&processors));
  KVJAX_RETURN_IF_ERROR(Split(stream, p, choice, tiles, processors));
  return Fold(stream, p, carries, processors);
}

}  // namespace

int64_t WorkspaceFloats(const AttentionShape& s, int64_t num_blocks) {
  if (s.rows() > kMaxSplitRows) return 0;
  return num_blocks * s.num_kv_heads * s.rows() * (s.value_dim + 2);
}

Status LaunchSpans(cudaStream_t stream, const AttentionShape& shape,
                   const AttentionBuffers& buffers, const char* base,
                   const std::vector<Span>& spans, float* workspace) {
  if (spans.empty()) return Status::Ok();
  Params p{shape, buffers, base, workspace, shape.rows(), {}};
  p.table.count = int32_t(spans.size());
  bool carries = false;
  for (size_t i = 0; i < spans.size(); ++i) {
    carries |= !spans[i].first || !spans[i].last;
    p.table.spans[i] = spans[i];
    p.table.start[i + 1] = p.table.start[i] + spans[i].num_blocks;
  }
  return Enqueue(stream, p, carries);
}

Status LaunchDevice(cudaStream_t stream, const AttentionShape& shape,
                    const AttentionBuffers& buffers, const char* cells,
                    float* workspace) {
  Params p{shape, buffers, cells, workspace, shape.rows(), {}};
  p.b.state = nullptr;
  p.b.error = nullptr;
  return Enqueue(stream, p, false);
}

Status PrepareAttention(int device) {
  static std::mutex mutex;
  static std::set<int> ready;
  std::lock_guard<std::mutex> lock(mutex);
  if (ready.count(device) > 0) return Status::Ok();
  const OnDevice on(device);
  KVJAX_RETURN_IF_ERROR(on.status());
  cudaFuncAttributes fold;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&fold, FoldKernel));
  KVJAX_RETURN_IF_ERROR(PrepareF32());
  KVJAX_RETURN_IF_ERROR(PrepareBf16());
  ready.insert(device);
  return Status::Ok();
}

}  // namespace kvjax
