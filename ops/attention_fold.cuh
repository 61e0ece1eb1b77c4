// Folding a launch's blocks, in order, into each query row's state or result.
#pragma once

#include "attention_spans.cuh"
#include "launch.h"

namespace kvjax {
namespace {

constexpr int kFoldThreads = 512;  // of a fold's CTA; and blocks of one of its rounds
constexpr int kFoldSlice = 64;     // values of a fold's CTA at least

__device__ float2 Two(const float* memory) {
  return *reinterpret_cast<const float2*>(memory);
}

// A running state of one query row, of which a thread holds two values.
struct Running {
  float2 values = {0.0f, 0.0f};
  float m = kEmpty, sum = 0.0f;
};

// How far a running state and an item are scaled when one is folded into the other; the
// scales depend on the largest scores alone. state < 0: nothing to fold.
struct Scales {
  float state, item;
};

// Thread i's scales when items with largest scores `m` (lane i of each run of `width`
// lanes has item i) are folded in order into a state whose largest was `before`.
__device__ Scales ScalesOf(float before, float m, int width) {
  const int i = threadIdx.x % width;
  float largest = m;  // of items 0 to i
  for (int step = 1; step < width; step *= 2) {
    const float other = __shfl_up_sync(~0u, largest, step, width);
    if (i >= step) largest = Max(largest, other);
  }
  float previous = __shfl_up_sync(~0u, largest, 1, width);
  previous = i == 0 ? before : Max(before, previous);
  if (m == kEmpty) return {-1.0f, 0.0f};
  const FoldScale fold = Folding(previous, m);
  return {fold.state, fold.item};
}

__device__ float FoldOne(float state, float item, Scales scales) {
  const float folded = Folded(state, item, {0.0f, scales.state, scales.item});
  return scales.state < 0.0f ? state : folded;
}

__device__ float2 FoldOne(float2 state, float2 item, Scales scales) {
  return make_float2(FoldOne(state.x, item.x, scales),
                     FoldOne(state.y, item.y, scales));
}

// Folds a span's blocks in order: [T * G * slices of the values, K, spans]. In rounds
// of kFoldThreads blocks: a thread for each block's scales, a warp for the groups';
// then some groups at a time, a thread for two values of each, and one for two values
// of the total. More than one slice only where no state is carried: they would share
// its m and sum.
__global__ void __launch_bounds__(kFoldThreads)
    FoldKernel(const __grid_constant__ Params p, int slices) {
  constexpr int kGroups = kFoldThreads / kGroup;
  __shared__ Scales block_scales[kFoldThreads], group_scales[kGroups];
  __shared__ float block_m[kFoldThreads], block_sum[kFoldThreads];
  __shared__ float group_m[kGroups], group_sum[kGroups];
  __shared__ float2 groups[kFoldThreads];  // [groups at a time, width]: their values
  __shared__ float total_m;

  const int size = p.s.value_dim;
  const int width = (size / slices + kFoldSlice - 1) / kFoldSlice * kFoldSlice / 2;
  const int row = blockIdx.x / slices,
            h = 2 * (blockIdx.x % slices * width + threadIdx.x % width);
  const int at = h < size ? h : 0, at_once = kFoldThreads / width;
  const int turn = threadIdx.x / width;  // which of the groups at a time
  const Work w{SpanAt(p, blockIdx.z), int32_t(blockIdx.y), row};
  float* const state =
      p.b.state == nullptr ? nullptr : StateOf(p, w.span.seq, w.head, row);
  // All threads keep m and sum of the group that is not full and of the total; the
  // thread of turn 0 also two values of both.
  Running open, total;
  if (!w.span.first) {
    open = {Two(state + at), state[size], state[size + 1]};
    total = {Two(state + size + 2 + at), state[2 * size + 2], state[2 * size + 3]};
  }
  const bool fits = w.span.last && Fits(p, w);
  const int first = w.span.first_block, end = first + w.span.num_blocks;
  const int first_group = first / kGroup;
  // Of the sequence's block 0, if this launch had it; floats from a block to the next.
  const float* const values =
      PartialOf(p, StartOf(p, blockIdx.z) - first, w.head, row) + at;
  const int stride = p.s.num_kv_heads * p.num_rows * (size + 2);
  const int begin = first < end ? first_group * kGroup : end;  // no block, no round
#if KVJAX_EARLY
  // The kernel that wrote the blocks may still run; without this they are read before
  // they are there.
  cudaGridDependencySynchronize();
#endif
  for (int round = begin; round < end; round += kFoldThreads) {
    const int i = threadIdx.x, block = round + i;
    const bool here = block >= first && block < end;
    const float* m_and_sum = values - at + size + int64_t(block) * stride;
    block_m[i] = here ? m_and_sum[0] : kEmpty;
    block_sum[i] = here ? m_and_sum[1] : 0.0f;
    const int num_groups = min(kGroups, (end - round + kGroup - 1) / kGroup);
    float2 items[kGroup];  // of one group at a time, loaded one turn ahead
    const auto load = [&](int g) {
      if (g >= num_groups || turn >= at_once) return;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        const int b = round + g * kGroup + j;
        items[j] = {0.0f, 0.0f};
        if (b >= first && b < end) items[j] = Two(values + int64_t(b) * stride);
      }
    };
    load(turn);

    const bool continues = block / kGroup == first_group;
    block_scales[i] = ScalesOf(continues ? open.m : kEmpty, block_m[i], kGroup);
    __syncthreads();  // the blocks' scales are there

    if (i < num_groups) {
      const bool opened = round / kGroup + i == first_group;
      Running group{{}, opened ? open.m : kEmpty, opened ? open.sum : 0.0f};
#pragma unroll
      for (int j = i * kGroup; j < i * kGroup + kGroup; ++j) {
        group.sum = FoldOne(group.sum, block_sum[j], block_scales[j]);
        group.m = Max(group.m, block_m[j]);
      }
      group_m[i] = group.m;
      group_sum[i] = group.sum;
    }
    __syncthreads();  // the groups' m and sum are there
    if (i < 32) {
      float before = total.m;
      for (int g = i; g < (num_groups + 31) / 32 * 32; g += 32) {
        // A group that is not full yet stays open.
        const bool full = g < num_groups && round + (g + 1) * kGroup <= end;
        const float m = full ? group_m[g] : kEmpty;
        group_scales[g] = ScalesOf(before, m, 32);
        float largest = m;
        for (int step = 16; step > 0; step /= 2) {
          largest = Max(largest, __shfl_xor_sync(~0u, largest, step));
        }
        before = Max(before, largest);
      }
      if (i == 0) total_m = before;
    }

    for (int base = 0; base < num_groups; base += at_once) {
      const int g = base + turn;
      if (g < num_groups && turn < at_once) {
        // The open group's values are with the thread of turn 0, which has group 0.
        float2 x = {0.0f, 0.0f};
        if (round / kGroup + g == first_group) x = open.values;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          x = FoldOne(x, items[j], block_scales[g * kGroup + j]);
        }
        groups[i] = x;
      }
      load(g + at_once);
      __syncthreads();  // these groups' values are there, and all groups' scales
      const int last = min(at_once, num_groups - base);
      if (turn == 0) {
#pragma unroll 8
        for (int t = 0; t < last; ++t) {
          const Scales scales = group_scales[base + t];
          total.values = FoldOne(total.values, groups[t * width + i], scales);
          total.sum = FoldOne(total.sum, group_sum[base + t], scales);
        }
        open.values = groups[(last - 1) * width + i];
      }
      __syncthreads();  // and are read
    }
    total.m = total_m;
    open.m = group_m[num_groups - 1];
    open.sum = group_sum[num_groups - 1];
  }
  if (end > first && end % kGroup == 0) open = Running{};
  if (turn > 0 || h >= size) return;
  if (w.span.last) {
    const FoldScale fold = Folding(total.m, open.m);
    const Scales scales = {open.m == kEmpty ? -1.0f : fold.state, fold.item};
    const float sum = FoldOne(total.sum, open.sum, scales);
    const float2 values = FoldOne(total.values, open.values, scales);
    WriteOut(p, w, row, h, Div(values.x, sum), fits);
    WriteOut(p, w, row, h + 1, Div(values.y, sum), fits);
    return;
  }
  state[h] = open.values.x, state[h + 1] = open.values.y;
  state[size + 2 + h] = total.values.x, state[size + 2 + h + 1] = total.values.y;
  if (h == 0) {
    state[size] = open.m;
    state[size + 1] = open.sum;
    state[2 * size + 2] = total.m;
    state[2 * size + 3] = total.sum;
  }
}

}  // namespace
}  // namespace kvjax
