// What a launch of attention covers and where its results go; shared by its kernels.
#pragma once

#include "attention_gpu.h"

namespace kvjax {

// The spans of a launch. count 0: every sequence of a layer without a tail.
struct SpanTable {
  int32_t count;
  int32_t start[kMaxSpans + 1];  // blocks before each span
  Span spans[kMaxSpans];
};

struct Params {
  AttentionShape s;
  AttentionBuffers b;
  const char* base;
  float* workspace;  // [block of the launch, K, T * G, Hv + 2]: values, m, sum
  int32_t num_rows;  // T * G
  SpanTable table;

  __host__ __device__ int num_spans() const {
    return table.count > 0 ? table.count : s.num_seqs;
  }
  __host__ __device__ int num_blocks() const {
    return table.count > 0 ? table.start[table.count]
                           : int(int64_t(s.num_seqs) * s.capacity / kBlock);
  }
};

namespace {

// What is at hand: one sequence's span, one kv head, a tile of query rows.
struct Work {
  Span span;
  int32_t head;
  int32_t first_row;
};

__device__ const int32_t* WhereOf(const Params& p, const Work& w) {
  return p.b.where + int64_t(w.span.seq) * p.s.num_new;
}

__device__ int64_t RecordBytes(const AttentionShape& s) {
  return int64_t(s.record_size) * (s.cell_type == Type::kF32 ? 4 : 2);
}

// The span that covers a whole sequence of a layer without a tail.
__device__ Span SequenceSpan(const AttentionShape& s, const int32_t* lengths, int seq) {
  const int length = lengths[seq];
  const int visible = s.window > 0 && length >= s.window ? length - s.window + 1 : 0;
  const int first_block = min(visible, length) / kBlock;
  const int end_block = (EndCell(s, length) + kBlock - 1) / kBlock;
  const int start = first_block * kBlock;
  Span span;
  span.seq = seq;
  span.length = length;
  span.first_block = first_block;
  span.num_blocks = max(0, end_block - first_block);
  span.first_cell = start;
  span.end_cell = max(start, min(length, s.capacity));
  span.offset = (int64_t(seq) * s.capacity + start) * s.num_kv_heads * RecordBytes(s);
  span.first = span.last = true;
  return span;
}

__device__ Span SpanAt(const Params& p, int index) {
  return p.table.count > 0 ? p.table.spans[index]
                           : SequenceSpan(p.s, p.b.lengths, index);
}

// Blocks of the launch before span `index`.
__device__ int StartOf(const Params& p, int index) {
  return p.table.count > 0 ? p.table.start[index] : index * (p.s.capacity / kBlock);
}

__device__ float* PartialOf(const Params& p, int64_t block, int head, int row) {
  const int64_t index = (block * p.s.num_kv_heads + head) * p.num_rows + row;
  return p.workspace + index * (p.s.value_dim + 2);
}

__device__ float* StateOf(const Params& p, int seq, int head, int row) {
  const int64_t index = (int64_t(seq) * p.s.num_kv_heads + head) * p.num_rows + row;
  return p.b.state + index * StateFloats(p.s.value_dim);
}

__device__ void WriteOut(const Params& p, const Work& w, int row, int h, float x,
                         bool fits) {
  const AttentionShape& s = p.s;
  const int t = row / s.group(), n = w.head * s.group() + row % s.group();
  if (WhereOf(p, w)[t] < 0) x = 0.0f;
  if (!fits) x = NAN;
  const int64_t at =
      ((int64_t(w.span.seq) * s.num_new + t) * s.num_heads + n) * s.value_dim + h;
  if (s.query_type == Type::kF32) {
    static_cast<float*>(p.b.out)[at] = x;
  } else {
    static_cast<uint16_t*>(p.b.out)[at] = ToBf16(x);
  }
}

// Whether the launches held all that the sequence's queries see; all threads call it.
__device__ bool Fits(const Params& p, const Work& w) {
  bool fits = PlanFits(p.s, w.span.length, p.b.lengths[w.span.seq]);
  for (int t = threadIdx.x; t < p.s.num_new; t += blockDim.x) {
    fits &= PlaceFits(p.s, w.span.length, WhereOf(p, w)[t]);
  }
  fits = __syncthreads_and(fits);
  if (!fits && threadIdx.x == 0 && p.b.error != nullptr) *p.b.error = 1;
  return fits;
}

}  // namespace
}  // namespace kvjax
