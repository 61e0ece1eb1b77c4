// The kernels of attention over a launch's spans, and which of them a launch takes.
#pragma once

#include "attention_choice.h"
#include "attention_tile.cuh"
#include "cuda_status.h"

namespace kvjax {
namespace {

constexpr int kRunRows = 8;              // query rows of a tile that folds as it goes
constexpr int kSharedBytes = 227 << 10;  // of a CTA, at most

// CTAs of a multiprocessor by their registers; with one more, those that hold values on
// their way would be spilled, and their loads waited for.
constexpr int CtasByRegisters(int vec, int rows) { return vec * rows > 4 ? 3 : 4; }

// ------------------------------------------------------------------ split by blocks

// A block of a launch that holds anything.
struct Place {
  int at;     // of the launch's blocks
  int span;   // that it belongs to
  int index;  // of the sequence
  int left;   // of its span, itself included
};

// Blocks that hold anything, of sequence first + lane of a layer without a tail.
__device__ int HeldBlocksOf(const Params& p, int first) {
  const int seq = first + int(threadIdx.x % 32);
  return seq < p.s.num_seqs ? SequenceSpan(p.s, p.b.lengths, seq).num_blocks : 0;
}

__device__ int WarpSum(int x) {
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Of a launch. All lanes call it.
__device__ int HeldBlocks(const Params& p) {
  if (p.table.count > 0) return p.num_blocks();
  int held = 0;
  for (int first = 0; first < p.s.num_seqs; first += 32) held += HeldBlocksOf(p, first);
  return WarpSum(held);
}

// The one with this number among them; all lanes call it.
__device__ Place FindBlock(const Params& p, int number, Span* found) {
  int span = 0, before = 0;
  if (p.table.count > 0) {
    while (number >= p.table.start[span + 1]) ++span;
    before = p.table.start[span];
  } else {
    for (int all = 0;; span += 32, before += all) {
      const int held = HeldBlocksOf(p, span);
      int up_to = held;  // and with this lane's
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(~0u, up_to, step);
        if (int(threadIdx.x % 32) >= step) up_to += lower;
      }
      all = __shfl_sync(~0u, up_to, 31);
      if (number >= before + all) continue;
      const int lane = WarpSum(number >= before + up_to);
      span += lane;
      before += __shfl_sync(~0u, up_to - held, lane);
      break;
    }
  }
  *found = SpanAt(p, span);
  const int i = number - before;
  return {StartOf(p, span) + i, span, found->first_block + i, found->num_blocks - i};
}

// The one `step` behind `now`; there must be one.
__device__ Place NextBlock(const Params& p, const Place& now, int step, Span* found) {
  if (now.left > step) {
    return {now.at + step, now.span, now.index + step, now.left - step};
  }
  int span = now.span, i = step - now.left;
  while (true) {
    *found = SpanAt(p, ++span);
    if (i < found->num_blocks) break;
    i -= found->num_blocks;
  }
  return {StartOf(p, span) + i, span, found->first_block + i, found->num_blocks - i};
}

// The blocks of a CTA: begin, begin + step, ... Neighbours, so that few are the first
// of a sequence; but of one sequence every gridDim.z-th, since CTAs that read
// neighbouring memory at a time read it faster.
struct Share {
  int begin, end, step;
};

__device__ Share ShareOf(const Params& p) {
  const int64_t held = HeldBlocks(p);
  const int ctas = int(gridDim.z), cta = int(blockIdx.z);
  if (p.num_spans() == 1) return {cta, int(held), ctas};
  return {int(held * cta / ctas), int(held * (cta + 1) / ctas), 1};
}

template <typename E, int VEC, int R, bool whole>
__device__ void WritePartial(const Params& p, int at,
                             const Tile<E, VEC, R, whole>& tile) {
  const int size = tile.value_dim(), stride = R * size, first_row = int(blockIdx.y) * R;
  for (int r = threadIdx.x / 32; r < R; r += kWarps) {
    if (first_row + r >= p.num_rows) break;
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
    if (threadIdx.x % 32 == 1) partial[size + 1] = tile.WeightSum(r);
  }
}

// Some blocks a CTA, one after another: [K, tiles of R rows, CTAs]. Of whole heads the
// compiler knows every size: addresses without arithmetic, loads ahead of the loop's
// turn.
template <typename E, int VEC, int R, bool whole>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(VEC, R))
    SplitKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  Tile<E, VEC, R, whole> tile(p, memory, false, int(blockIdx.x), int(blockIdx.y) * R);
  const Share share = ShareOf(p);
  Span span;
  Place now{-1, -1, 0, 0};
  int number = share.begin;
  for (bool at_hand = false;; at_hand = true, number += share.step) {
    if (at_hand) tile.Score();
    const bool more = number < share.end;
    Place next = now;
    if (more) {
      next =
          at_hand ? NextBlock(p, now, share.step, &span) : FindBlock(p, number, &span);
      if (next.span != now.span) tile.Enter(span);
      tile.Find(span, next.index);
    } else {
      if (!at_hand) return;
      __syncthreads();  // all have scored
    }
    tile.LoadKeys(more);
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

// Folds an item (m, sum: one a row; values [R, Hv]) into part 0 or 1 of shared.state.
template <int R, typename Sum, typename Value>
__device__ void FoldShared(const AttentionShape& s, float* state, int part,
                           const float* m, int stride, const Sum& sum,
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
    row[size + 1] = Folded(row[size + 1], sum(threadIdx.x), fold);
    row[size] = fold.largest;
  }
  __syncthreads();
}

template <int R>
__device__ void CloseGroup(const AttentionShape& s, float* state) {
  const int size = s.value_dim, row_floats = 2 * (size + 2);
  FoldShared<R>(
      s, state, 1, state + size, row_floats,
      [&](int r) { return state[r * row_floats + size + 1]; },
      [&](int i) { return state[i / size * row_floats + i % size]; });
  for (int i = threadIdx.x; i < R * (size + 2); i += kThreads) {
    const int r = i / (size + 2), h = i % (size + 2);
    state[r * row_floats + h] = h == size ? kEmpty : 0.0f;
  }
  __syncthreads();
}

// One block, start to end.
template <typename E, int VEC, int R, bool whole>
__device__ void AttendBlock(Tile<E, VEC, R, whole>& tile, const Span& span, int block) {
  tile.Find(span, block);
  tile.LoadKeys(true);
  tile.Advance();
  tile.LoadValues();
  tile.Score();
  __syncthreads();  // all have scored
  tile.LoadKeys(false);
  tile.Weigh();
  tile.Sum(false);
}

// One CTA a span and tile: [spans, K, tiles of R rows].
template <typename E, int VEC, int R, bool whole>
__global__ void __launch_bounds__(kThreads, CtasByRegisters(VEC, R))
    RunKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const AttentionShape& s = p.s;
  const Work w{SpanAt(p, blockIdx.x), int32_t(blockIdx.y), int32_t(blockIdx.z) * R};
  Tile<E, VEC, R, whole> tile(p, memory, true, w.head, w.first_row);
  const Shared<R>& shared = tile.shared;
  const int row_floats = 2 * (s.value_dim + 2);
  for (int i = threadIdx.x; i < R * row_floats; i += kThreads) {
    const int row = w.first_row + i / row_floats, j = i % row_floats;
    const bool is_m = j % (s.value_dim + 2) == s.value_dim;
    float x = is_m ? kEmpty : 0.0f;
    if (!w.span.first && row < p.num_rows) x = StateOf(p, w.span.seq, w.head, row)[j];
    shared.state[i] = x;
  }
  tile.LoadQueries(w.span.seq);
  tile.Enter(w.span);
  __syncthreads();  // the states and the queries' places are there
  int last_place = -1;
  for (int r = 0; r < R; ++r) last_place = max(last_place, shared.place[r]);

  for (int i = 0; i < w.span.num_blocks; ++i) {
    const int block = w.span.first_block + i;
    const bool stored = w.span.end_cell > block * kBlock;
    if (last_place >= 0 && (stored || last_place >= block * kBlock)) {
      AttendBlock(tile, w.span, block);
      FoldShared<R>(
          s, shared.state, 0, shared.m, 1, [&](int r) { return tile.WeightSum(r); },
          [&](int j) { return tile.Value(j); });
    }
    if (block % kGroup == kGroup - 1) CloseGroup<R>(s, shared.state);
  }

  if (w.span.last) {
    CloseGroup<R>(s, shared.state);
    const bool fits = Fits(p, w);
    for (int i = threadIdx.x; i < R * s.value_dim; i += kThreads) {
      const int r = i / s.value_dim, h = i % s.value_dim;
      if (w.first_row + r >= p.num_rows) break;
      const float* total = shared.state + r * row_floats + s.value_dim + 2;
      WriteOut(p, w, w.first_row + r, h, Div(total[h], total[s.value_dim + 1]), fits);
    }
    return;
  }
  for (int i = threadIdx.x; i < R * row_floats; i += kThreads) {
    const int row = w.first_row + i / row_floats;
    if (row < p.num_rows) {
      StateOf(p, w.span.seq, w.head, row)[i % row_floats] = shared.state[i];
    }
  }
}

// ------------------------------------------------------------------ choice

template <typename E, int VEC, int R, bool run, bool whole>
constexpr Kernel kKernel =
    run ? RunKernel<E, VEC, kRunRows, whole> : SplitKernel<E, VEC, R, whole>;

template <typename E, int VEC, int R, bool run>
Choice Make(const AttentionShape& s) {
  const bool whole = Tile<E, VEC, R>::IsWhole(s);
  const Kernel kernel =
      whole ? kKernel<E, VEC, R, run, true> : kKernel<E, VEC, R, run, false>;
  return {kernel, R, Shared<R>::Bytes(s, sizeof(E), run), CtasByRegisters(VEC, R)};
}

template <typename E, int VEC>
Choice ChooseByRows(const AttentionShape& s, bool run) {
  if (run) return Make<E, VEC, kRunRows, true>(s);
  if (s.rows() == 1) return Make<E, VEC, 1, false>(s);
  if (s.rows() == 2) return Make<E, VEC, 2, false>(s);
  if (s.rows() <= 4) return Make<E, VEC, 4, false>(s);
  return Make<E, VEC, 8, false>(s);
}

// The kernel for cells of type E.
template <typename E>
Choice ChooseOf(const AttentionShape& s, bool run) {
  if (s.value_dim <= 64) return ChooseByRows<E, 2>(s, run);
  if (s.value_dim <= 128) return ChooseByRows<E, 4>(s, run);
  return ChooseByRows<E, 8>(s, run);
}

template <typename E, int VEC, bool whole>
Status PrepareKernels() {
  const Kernel kernels[] = {
      SplitKernel<E, VEC, 1, whole>, SplitKernel<E, VEC, 2, whole>,
      SplitKernel<E, VEC, 4, whole>, SplitKernel<E, VEC, 8, whole>,
      RunKernel<E, VEC, kRunRows, whole>};
  for (Kernel kernel : kernels) {
    KVJAX_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  }
  return Status::Ok();
}

// Loads the kernels for cells of type E and sets their attributes.
template <typename E>
Status PrepareOf() {
  KVJAX_RETURN_IF_ERROR((PrepareKernels<E, 2, false>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<E, 4, false>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<E, 8, false>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<E, 2, true>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<E, 4, true>()));
  return PrepareKernels<E, 8, true>();
}

}  // namespace
}  // namespace kvjax
