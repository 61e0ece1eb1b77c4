// How fast a device's link and memory are, and how much of the memory is taken. For the
// bounds that delivery is held against (kvjax/measurement.py), outside any program.
//
// Each call waits for its own work. What it allocates it frees, outside XLA's memory.
// kExhausted if that doesn't fit. Thread-safe; other work on the device spoils the
// times.
#pragma once

#include <cstdint>
#include <memory>

#include "status.h"

namespace kvjax {

// A device's link with something to copy: `pieces` pieces of `piece_bytes` of pinned
// host memory, and a piece of the device's. Of the thread that opens it.
class Link {
 public:
  static Status Open(int64_t device, int64_t piece_bytes, int64_t pieces,
                     std::unique_ptr<Link>* link);
  virtual ~Link() = default;

  // Copies all pieces, in order on one stream: the way of a ring's deliveries.
  virtual Status Copy(double* seconds) = 0;
};

// Times passes over the links of `count` devices at once, a thread each. A device that
// is through goes on copying until all are, so none is timed while another rests.
//   start    called once before the first timed copy, when all have their memory or one
//            couldn't get it; on the caller's thread; null = nothing to call
//   seconds  [count, passes]; one pass of each device runs before that
Status MeasureCopies(const int64_t* devices, int64_t count, int64_t piece_bytes,
                     int64_t pieces, int64_t passes, void (*start)(), double* seconds);

// Reads `bytes` (a multiple of 16) of device memory once. On the cpu platform one
// thread reads, which is less than attention gets.
//   seconds  [passes]; one pass runs before that
Status MeasureRead(int64_t device, int64_t bytes, int64_t passes, double* seconds);

// What the driver says, for all processes: bytes that are free, and all that there are.
Status DeviceMemory(int64_t device, int64_t* free_bytes, int64_t* total_bytes);

}  // namespace kvjax
