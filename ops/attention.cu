// The kernels of attention over a launch's spans, and their launchers.
#include <algorithm>
#include <mutex>
#include <set>

#include "attention_fold.cuh"
#include "attention_gpu.h"
#include "attention_tile.cuh"
#include "launch.h"
#include "on_device.h"

namespace kvjax {
namespace {

constexpr int kRunRows = 8;              // query rows of a tile that folds as it goes
constexpr int kSharedBytes = 227 << 10;  // of a CTA, at most
constexpr int kSharedOfAll = 228 << 10;  // of a multiprocessor
constexpr int kSharedOfCta = 1 << 10;    // that CUDA takes for each CTA

// CTAs of a multiprocessor by their registers; with one more, those that hold values on
// their way would be spilled, and their loads waited for.
constexpr int CtasByRegisters(int rows) { return rows > 2 ? 3 : 4; }

// ------------------------------------------------------------------ split by blocks

// A block of a launch.
struct Place {
  int at;     // of the launch; none = num_blocks()
  int span;   // that it belongs to
  int index;  // of the sequence
};

// The first block that holds anything, of at, at + step, ...; `span` is not behind it.
__device__ Place NextBlock(const Params& p, int at, int step, int span, Span* found) {
  const int num_blocks = p.num_blocks(), num_spans = p.num_spans();
  while (at < num_blocks) {
    while (span + 1 < num_spans && at >= StartOf(p, span + 1)) ++span;
    *found = SpanAt(p, span);
    const int i = at - StartOf(p, span);
    if (i < found->num_blocks) return {at, span, found->first_block + i};
    // The span's rest is empty.
    const int end = span + 1 < num_spans ? StartOf(p, span + 1) : num_blocks;
    at += (end - at + step - 1) / step * step;
  }
  return {num_blocks, span, 0};
}

template <typename E, int VEC, int R>
__device__ void WritePartial(const Params& p, int at, const Tile<E, VEC, R>& tile) {
  const int size = p.s.value_dim, stride = R * size, first_row = int(blockIdx.y) * R;
  for (int r = threadIdx.x / 32; r < R; r += kWarps) {
    if (first_row + r >= p.s.rows()) break;
    float* const partial = PartialOf(p, at, blockIdx.x, first_row + r);
    for (int h = threadIdx.x % 32 * 2; h < size; h += 64) {
      const float* sums = tile.shared.sums + r * size + h;
      float2 chain[kChains];
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        chain[i] = *reinterpret_cast<const float2*>(sums + i * stride);
      }
      *reinterpret_cast<float2*>(partial + h) =
          make_float2(ChainSum(chain[0].x, chain[1].x, chain[2].x, chain[3].x),
                      ChainSum(chain[0].y, chain[1].y, chain[2].y, chain[3].y));
    }
    if (threadIdx.x % 32 == 0) partial[size] = tile.shared.m[r];
    if (threadIdx.x % 32 == 1) partial[size + 1] = tile.shared.sum[r];
  }
}

// Some blocks a CTA, one after another: [K, tiles of R rows, CTAs]. Heads first: CTAs
// that find nothing to do then leave no multiprocessor idle beside full ones.
template <typename E, int VEC, int R>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(R))
    SplitKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  Tile<E, VEC, R> tile(p, memory, false, int(blockIdx.x), int(blockIdx.y) * R);
  const int step = int(gridDim.z), num_blocks = p.num_blocks();
  Span span;
  Place now{int(blockIdx.z) - step, 0, 0};
  for (bool at_hand = false;; at_hand = true) {
    if (at_hand) tile.Score();
    const Place next = NextBlock(p, now.at + step, step, now.span, &span);
    const bool more = next.at < num_blocks;
    if (more) {
      tile.Find(span, next.index);
      tile.LoadKeys();
    } else {
      if (!at_hand) return;
      __syncthreads();  // all have scored
    }
    if (at_hand) {
      tile.Weigh();
      tile.Sum(more);
      WritePartial(p, now.at, tile);
      if (!more) return;
    }
    tile.Advance();
    if (!at_hand) tile.LoadValues();
    if (!at_hand || next.span != now.span) tile.LoadQueries(span.seq);
    now = next;
  }
}

// ------------------------------------------------------------------ fold as it goes

// Folds item (values by f, m, sum: one a row) into part 0 or 1 of shared.state.
template <int R, typename Value>
__device__ void FoldShared(const AttentionShape& s, float* state, int part,
                           const float* m, const float* sum, int stride,
                           const Value& value) {
  const int size = s.value_dim, row_floats = 2 * (size + 2);
  state += part * (size + 2);
  for (int i = threadIdx.x; i < R * size; i += kThreads) {
    const int r = i / size, h = i % size;
    if (m[r * stride] == kEmpty) continue;
    float* row = state + r * row_floats;
    row[h] = Folded(row[h], value(i), Folding(row[size], m[r * stride]));
  }
  __syncthreads();  // the state's m is read by all before it is written
  if (threadIdx.x < R && m[threadIdx.x * stride] != kEmpty) {
    float* row = state + threadIdx.x * row_floats;
    const FoldScale fold = Folding(row[size], m[threadIdx.x * stride]);
    row[size + 1] = Folded(row[size + 1], sum[threadIdx.x * stride], fold);
    row[size] = fold.largest;
  }
  __syncthreads();
}

template <int R>
__device__ void CloseGroup(const AttentionShape& s, float* state) {
  const int size = s.value_dim, row_floats = 2 * (size + 2);
  FoldShared<R>(s, state, 1, state + size, state + size + 1, row_floats,
                [&](int i) { return state[i / size * row_floats + i % size]; });
  for (int i = threadIdx.x; i < R * (size + 2); i += kThreads) {
    const int r = i / (size + 2), h = i % (size + 2);
    state[r * row_floats + h] = h == size ? kEmpty : 0.0f;
  }
  __syncthreads();
}

// One block, start to end.
template <typename E, int VEC, int R>
__device__ void AttendBlock(Tile<E, VEC, R>& tile, const Span& span, int block) {
  tile.Find(span, block);
  tile.LoadKeys();
  tile.Advance();
  tile.LoadValues();
  tile.Score();
  __syncthreads();  // all have scored
  tile.Weigh();
  tile.Sum(false);
}

// One CTA a span and tile: [spans, K, tiles of R rows].
template <typename E, int VEC, int R>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(R))
    RunKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const AttentionShape& s = p.s;
  const Work w{SpanAt(p, blockIdx.x), int32_t(blockIdx.y), int32_t(blockIdx.z) * R};
  Tile<E, VEC, R> tile(p, memory, true, w.head, w.first_row);
  const Shared<R>& shared = tile.shared;
  const int row_floats = 2 * (s.value_dim + 2);
  for (int i = threadIdx.x; i < R * row_floats; i += kThreads) {
    const int row = w.first_row + i / row_floats, j = i % row_floats;
    const bool is_m = j % (s.value_dim + 2) == s.value_dim;
    float x = is_m ? kEmpty : 0.0f;
    if (!w.span.first && row < s.rows()) x = StateOf(p, w.span.seq, w.head, row)[j];
    shared.state[i] = x;
  }
  tile.LoadQueries(w.span.seq);  // its barrier orders the state, too
  int last_place = -1;
  for (int r = 0; r < R; ++r) last_place = max(last_place, shared.place[r]);

  for (int i = 0; i < w.span.num_blocks; ++i) {
    const int block = w.span.first_block + i;
    const bool stored = w.span.end_cell > block * kBlock;
    if (last_place >= 0 && (stored || last_place >= block * kBlock)) {
      AttendBlock(tile, w.span, block);
      FoldShared<R>(s, shared.state, 0, shared.m, shared.sum, 1,
                    [&](int j) { return tile.Value(j); });
    }
    if (block % kGroup == kGroup - 1) CloseGroup<R>(s, shared.state);
  }

  if (w.span.last) {
    CloseGroup<R>(s, shared.state);
    const bool fits = Fits(p, w);
    for (int i = threadIdx.x; i < R * s.value_dim; i += kThreads) {
      const int r = i / s.value_dim, h = i % s.value_dim;
      if (w.first_row + r >= s.rows()) break;
      const float* total = shared.state + r * row_floats + s.value_dim + 2;
      WriteOut(p, w, w.first_row + r, h, Div(total[h], total[s.value_dim + 1]), fits);
    }
    return;
  }
  for (int i = threadIdx.x; i < R * row_floats; i += kThreads) {
    const int row = w.first_row + i / row_floats;
    if (row < s.rows()) {
      StateOf(p, w.span.seq, w.head, row)[i % row_floats] = shared.state[i];
    }
  }
}

// ------------------------------------------------------------------ launchers

using Kernel = void (*)(Params);

struct Choice {
  Kernel kernel;
  int rows;   // of a tile
  int bytes;  // of shared memory
};

template <typename E, int VEC, int R, bool run>
Choice Make(const AttentionShape& s) {
  const Kernel kernel = run ? RunKernel<E, VEC, kRunRows> : SplitKernel<E, VEC, R>;
  return {kernel, R, Shared<R>::Bytes(s, sizeof(E), run)};
}

template <typename E, int VEC>
Choice ChooseByRows(const AttentionShape& s, bool run) {
  if (run) return Make<E, VEC, kRunRows, true>(s);
  if (s.rows() == 1) return Make<E, VEC, 1, false>(s);
  if (s.rows() == 2) return Make<E, VEC, 2, false>(s);
  if (s.rows() <= 4) return Make<E, VEC, 4, false>(s);
  return Make<E, VEC, 8, false>(s);
}

template <typename E>
Choice ChooseByValues(const AttentionShape& s, bool run) {
  if (s.value_dim <= 64) return ChooseByRows<E, 2>(s, run);
  if (s.value_dim <= 128) return ChooseByRows<E, 4>(s, run);
  return ChooseByRows<E, 8>(s, run);
}

Choice Choose(const AttentionShape& s, bool run) {
  return s.cell_type == Type::kF32 ? ChooseByValues<float>(s, run)
                                   : ChooseByValues<uint16_t>(s, run);
}

// CTAs that the device holds at once.
Status Resident(const Choice& choice, int64_t* ctas) {
  int device = 0, processors = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  KVJAX_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int by_memory = kSharedOfAll / (choice.bytes + kSharedOfCta);
  *ctas = processors * std::max(1, std::min(by_memory, CtasByRegisters(choice.rows)));
  return Status::Ok();
}

// As many CTAs as there are blocks, or as the device holds at once: each then loads its
// next block while it computes.
Status Split(cudaStream_t stream, const Params& p, const Choice& choice,
             unsigned tiles) {
  const int num_blocks = p.num_blocks();
  if (num_blocks == 0) return Status::Ok();
  int64_t resident = 0;
  KVJAX_RETURN_IF_ERROR(Resident(choice, &resident));
  const int64_t share = resident / (int64_t(p.s.num_kv_heads) * tiles);
  const dim3 grid(p.s.num_kv_heads, tiles,
                  unsigned(std::clamp<int64_t>(share, 1, num_blocks)));
  return LaunchKernel({grid, kThreads, choice.bytes, stream}, choice.kernel, p);
}

Status Enqueue(cudaStream_t stream, const Params& p, bool carries) {
  const AttentionShape& s = p.s;
  const bool run = s.rows() > kMaxSplitRows;
  const Choice choice = Choose(s, run);
  const unsigned tiles = (s.rows() + choice.rows - 1) / choice.rows;
  const unsigned num_spans = p.num_spans(), num_heads = s.num_kv_heads;
  if (run) {
    const dim3 grid(num_spans, num_heads, tiles);
    return LaunchKernel({grid, kThreads, choice.bytes, stream}, choice.kernel, p);
  }
  KVJAX_RETURN_IF_ERROR(Split(stream, p, choice, tiles));
  const int slices = carries ? 1 : (s.value_dim + kFoldSlice - 1) / kFoldSlice;
  const dim3 folds(s.rows() * slices, num_heads, num_spans);
  return LaunchKernel({folds, kFoldThreads, 0, stream}, FoldKernel, p, slices);
}

template <typename E, int VEC>
Status PrepareKernels() {
  const Kernel kernels[] = {SplitKernel<E, VEC, 1>, SplitKernel<E, VEC, 2>,
                            SplitKernel<E, VEC, 4>, SplitKernel<E, VEC, 8>,
                            RunKernel<E, VEC, kRunRows>};
  for (Kernel kernel : kernels) {
    KVJAX_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  }
  return Status::Ok();
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
  Params p{shape, buffers, base, workspace, {}};
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
  Params p{shape, buffers, cells, workspace, {}};
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
  KVJAX_RETURN_IF_ERROR((PrepareKernels<float, 2>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<float, 4>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<float, 8>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<uint16_t, 2>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<uint16_t, 4>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<uint16_t, 8>()));
  ready.insert(device);
  return Status::Ok();
}

}  // namespace kvjax
