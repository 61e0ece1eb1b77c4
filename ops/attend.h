// One attend through a ring: which launches, from which memory, in which order.
#pragma once

#include <functional>
#include <vector>

#include "ring.h"

namespace kvjax {

// Enqueues attention over spans whose stored cells lie from `base` on.
using Launch = std::function<Status(const char* base, const std::vector<Span>& spans)>;
// One slot's worth of memory for the ordered path, good until the call returns.
using Scratch = std::function<Status(int64_t bytes, char** memory)>;

struct AttendCall {
  AttendKey key;
  int32_t num_seqs, num_new;
  int64_t row_bytes;     // of one cell, all local heads
  int64_t device_cells;  // of each sequence; device is null if 0
  int64_t tail_cells;
  const char* device;
  const char* tail;
};

// The resident launch, then one launch a segment: out of slots, or, where the ring does
// not deliver (depth 0, declined, closed, out of order), copied on `compute` first. The
// same launches either way, so the same bits.
Status Attend(Ring& ring, Stream compute, const AttendCall& call, const Launch& launch,
              const Scratch& scratch);

}  // namespace kvjax
