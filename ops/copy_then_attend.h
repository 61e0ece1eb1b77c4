// Copy, then attend, layer by layer: the work of the ordered path without a ring, a
// plan or XLA. What that path is held against (experiments/bench_attention.py): the
// same ranges, copies and launches of the same bytes, enqueued by nothing but a loop.
//
//   each pass, on one stream:
//   layer 0: copy segment 0 | attend | copy segment 1 | attend ... layer 1: copy ...
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace kvjax {

// One new token of each sequence; every layer gets the same queries and rows.
struct CopyThenAttend {
  AttentionShape shape;  // num_new is 1
  int64_t num_layers;
  const char* const* tails;  // [num_layers] pinned, each [B, capacity, K, R] cell_type
  const int32_t* lengths;    // [B] host; at least 1 each, with room for one more
  const void* q;             // [B, 1, N, H] query_type, host
  const void* rows;          // [B, 1, K, R] cell_type, host
  int64_t slot_bytes;        // of a segment at most
  int64_t passes;
  void* out;  // [num_layers, B, 1, N, Hv] query_type, host: of the last pass

  int64_t row_bytes() const {
    return int64_t(shape.num_kv_heads) * shape.record_size * SizeOf(shape.cell_type);
  }
  int64_t q_bytes() const {
    return int64_t(shape.num_seqs) * shape.num_heads * shape.head_dim *
           SizeOf(shape.query_type);
  }
  int64_t rows_bytes() const { return shape.num_seqs * row_bytes(); }
  int64_t out_bytes() const {  // of a layer
    return int64_t(shape.num_seqs) * shape.num_heads * shape.value_dim *
           SizeOf(shape.query_type);
  }
  int64_t state_floats() const {
    return int64_t(shape.num_seqs) * shape.num_kv_heads * shape.rows() *
           StateFloats(shape.value_dim);
  }
};

// The segments of every layer's tail: lengths and shapes are the same in all.
Status CutLayer(const CopyThenAttend& work, std::vector<Segment>* segments);

// Runs one pass, then `passes` without a wait between them. On a GPU timed by two of
// its events, on the cpu platform by the clock, on one thread there.
//   seconds  of all `passes` together
// Waits for its work. What it allocates it frees, outside XLA's memory.
Status RunCopyThenAttend(int64_t device, const CopyThenAttend& work, double* seconds);

}  // namespace kvjax
