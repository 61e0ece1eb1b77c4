// How fast a device's link and memory are, and how much of the memory is taken. For the
// bounds that delivery is held against (kvjax/measurement.py), outside any program.
//
// Each call waits for its own work. What it allocates it frees, outside XLA's memory.
// kExhausted if that doesn't fit. Thread-safe; other work on the device spoils the
// times.
#pragma once

#include <cstdint>

#include "status.h"

namespace kvjax {

// Copies `pieces` pieces of `piece_bytes` from pinned host memory to the device, in
// order on one stream: the way of a ring's deliveries.
//   seconds  [passes] of all pieces; one pass runs before that
Status MeasureCopy(int64_t device, int64_t piece_bytes, int64_t pieces, int64_t passes,
                   double* seconds);

// Reads `bytes` (a multiple of 16) of device memory once. On the cpu platform one
// thread reads, which is less than attention gets.
//   seconds  [passes]; one pass runs before that
Status MeasureRead(int64_t device, int64_t bytes, int64_t passes, double* seconds);

// What the driver says, for all processes: bytes that are free, and all that there are.
Status DeviceMemory(int64_t device, int64_t* free_bytes, int64_t* total_bytes);

}  // namespace kvjax
