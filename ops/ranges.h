// Which cells of which sequence: the only place that computes ranges. Deliveries,
// ordered copies and launches all take theirs from here.
//
//   block        0      1      2      3      4        (kBlock cells each)
//   sequence b   DDDDDD DDDDDD TTTTTT TTTT.n n
//                device part   tail       ^ length; n: the step's rows, at most num_new
//
// A launch of attention covers some blocks of some sequences: a span each. The resident
// launch covers the device part (and rows, where no cell of the tail is live); each
// segment of the tail is one more launch.
#pragma once

#include <cstdint>
#include <vector>

namespace kvjax {

constexpr int kMaxSpans = 64;             // of a launch: a table in kernel parameters
constexpr int64_t kGapBytes = 160 << 10;  // copied along sooner than one more copy

// One sequence's part of a launch.
struct Span {
  int32_t seq;
  int32_t length;       // cells before the step, as the host knows it
  int32_t first_block;  // logical
  int32_t num_blocks;
  int32_t
      first_cell;  // stored cells [first_cell, end_cell) are readable, from `offset`
  int32_t end_cell;
  int64_t offset;  // bytes from the launch's base to first_cell
  bool first;      // starts the sequence: no state to carry in
  bool last;       // ends it: rows included, the result is written
};

// One strided copy into a slot, in bytes.
struct Copy {
  int64_t source;  // from the tail's base
  int64_t target;  // from the slot's base
  int64_t width, height, source_pitch, target_pitch;
};

// A slot's worth of a layer's tail.
struct Segment {
  std::vector<Span> spans;
  std::vector<Copy> copies;
  int64_t live_bytes = 0;
  int64_t gap_bytes = 0;  // copied along between sequences
};

// A layer's cells and what a step asks of them.
struct LayerShape {
  int32_t num_seqs;
  int32_t num_new;       // T
  int64_t device_cells;  // of each sequence; the tail starts there
  int64_t tail_cells;
  int64_t row_bytes;  // of one cell, all local heads
  int64_t window;     // 0 = none

  int64_t num_cells() const { return device_cells + tail_cells; }
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first cell that any query of a step sees: place length - window + 1 on.
int64_t FirstVisible(int64_t length, int64_t window);

// The spans of the resident launch, in sequence order. Base: the layer's device part.
std::vector<Span> ResidentSpans(const LayerShape& shape, const int32_t* lengths);

// Cuts a layer's live tail cells into segments of at most slot_bytes, in the order in
// which attention consumes them. Segments end at block borders or a sequence's end.
// slot_bytes must hold a block (kBlock * row_bytes).
//   even_end  the last sequence's last two segments share what is left for them; it is
//             the last one with live cells
std::vector<Segment> CutTail(const LayerShape& shape, const int32_t* lengths,
                             int64_t slot_bytes, bool even_end = false);

}  // namespace kvjax
