// Attention over spans of blocks: what one launch computes, on either platform.
// The arithmetic and its order: block_math.h. Which blocks: ranges.h.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "block_math.h"
#include "ranges.h"
#include "status.h"

namespace kvjax {

enum class Type : int32_t { kF32, kBf16 };
inline int64_t SizeOf(Type type) { return type == Type::kF32 ? 4 : 2; }

struct AttentionShape {
  int32_t num_seqs;       // B
  int32_t num_new;        // T
  int32_t num_heads;      // N
  int32_t num_kv_heads;   // K, of this device
  int32_t head_dim;       // H
  int32_t value_dim;      // Hv
  int32_t record_size;    // R, elements
  int32_t capacity;       // cells of a sequence
  int32_t window;         // 0 = none
  float scale, soft_cap;  // soft_cap 0 = none
  Type query_type, cell_type;

  KVJAX_HD int32_t group() const { return num_heads / num_kv_heads; }
  KVJAX_HD int32_t rows() const {
    return num_new * group();
  }  // query rows of a kv head
};

// Floats of a running state of one query row: group and total, each (values, m, sum).
KVJAX_HD int64_t StateFloats(int32_t value_dim) { return 2 * (value_dim + 2); }

// Where a launch reads and writes. Memory of the launch's platform.
struct AttentionBuffers {
  const void* q;           // [B, T, N, H] query_type
  const void* rows;        // [B, T, K, R] cell_type
  const int32_t* lengths;  // [B]
  const int32_t* where;    // [B, T] logical cells; -1 = dropped
  void* out;               // [B, T, N, Hv] query_type
  float* state;            // [B, K, T * G, StateFloats], carried from launch to launch
  int32_t* error;          // set to 1 if lengths don't fit the plan or the cells
};

// Query row r of a kv head is token r / G, head r % G of the group.
//
// A query sees stored cells below `length` that no row of the step replaces, and rows
// of the step at its own place or before; a window leaves those above place - window.
// Its launches must hold all of that; a sequence for which they don't gets NaN.
KVJAX_HD bool PlanFits(const AttentionShape& s, int32_t planned, int32_t length) {
  return planned == length && length <= s.capacity;
}
KVJAX_HD int32_t EndCell(const AttentionShape& s, int32_t length) {
  return length + s.num_new < s.capacity ? length + s.num_new : s.capacity;
}
KVJAX_HD bool PlaceFits(const AttentionShape& s, int32_t length, int32_t place) {
  if (place >= EndCell(s, length)) return false;
  const int32_t first = s.window > 0 && length >= s.window ? length - s.window + 1 : 0;
  return place < 0 || first == 0 || place - s.window + 1 >= first;
}

// Runs f(0) .. f(n - 1), in any order, on as many threads as there are.
using ParallelFor =
    std::function<void(int64_t n, const std::function<void(int64_t)>& f)>;

// Attends over `spans` whose stored cells lie from `base` on: the cpu platform's
// launch.
void AttendSpans(const AttentionShape& shape, const AttentionBuffers& buffers,
                 const char* base, const std::vector<Span>& spans,
                 const ParallelFor& parallel);

}  // namespace kvjax
