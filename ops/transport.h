// What moves bytes for a ring: memory, one stream's copies, events. Two of them: CUDA,
// and one on host threads for the cpu platform that really copies
// (transport_emulated.h).
//
// Handles are opaque. A Stream is a queue of work that the host does not wait for; the
// compute stream of a call is XLA's (cpu platform: kInlineStream, work is done at
// once). Events have CUDA's meaning: Wait orders later work of a stream behind the
// latest Record before the call. Not thread-safe: one ring, one transport, one caller
// at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "ranges.h"
#include "status.h"

namespace kvjax {

using Stream = void*;
using Event = void*;
constexpr Stream kInlineStream = nullptr;

class Transport {
 public:
  virtual ~Transport() = default;

  // Memory that the device's kernels read fastest; kExhausted if there isn't enough.
  virtual Status Allocate(int64_t bytes, char** memory) = 0;
  virtual void Free(char* memory) = 0;
  virtual Status FreeBytes(int64_t* bytes) = 0;

  virtual Status MakeStream(Stream* stream) = 0;
  virtual void FreeStream(Stream stream) = 0;  // its work is done
  virtual Status MakeEvent(Event* event) = 0;
  virtual void FreeEvent(Event event) = 0;
  // An event that also tells when it was passed; only a trace needs such.
  virtual Status MakeTimedEvent(Event* event) = 0;
  // Seconds between two timed events that were passed (Synchronize).
  virtual Status Elapsed(Event from, Event to, double* seconds) = 0;

  // Enqueues copies from pinned host memory at `source` to `target`, in any order.
  virtual Status Enqueue(Stream stream, const std::vector<Copy>& copies,
                         const char* source, char* target) = 0;
  virtual Status Record(Event event, Stream stream) = 0;
  virtual Status Wait(Stream stream, Event event) = 0;
  // Whether memory that XLA freed may still be read (its pinned pool stays mapped):
  // then a copy may outlive the step that issued it.
  virtual bool SourcesStayMapped() const = 0;

  // The host waits for the event's latest Record, if there was one; for close, and at a
  // step's end where sources don't stay mapped.
  virtual Status Synchronize(Event event) = 0;
};

}  // namespace kvjax
