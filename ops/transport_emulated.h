// The transport of the cpu platform: worker threads for streams, memcpy for copies. It
// really moves the bytes, late if asked to, so that a missing wait shows.
#pragma once

#include <cstdint>
#include <functional>

#include "transport.h"

namespace kvjax {

// What an emulated device is like.
struct Emulation {
  uint64_t seed = 0;
  int64_t max_delay_us = 0;  // of each piece of work, drawn at random
  int64_t free_bytes = int64_t(1) << 40;
  bool fail_allocation = false;      // although free_bytes would do
  bool sources_stay_mapped = false;  // XLA's cpu platform frees host memory for good
};

class EmulatedTransport : public Transport {
 public:
  explicit EmulatedTransport(const Emulation& emulation);
  ~EmulatedTransport() override;

  Status Allocate(int64_t bytes, char** memory) override;
  void Free(char* memory) override;
  Status FreeBytes(int64_t* bytes) override;
  Status MakeStream(Stream* stream) override;
  void FreeStream(Stream stream) override;
  Status MakeEvent(Event* event) override;
  void FreeEvent(Event event) override;
  Status MakeTimedEvent(Event* event) override;
  Status Elapsed(Event from, Event to, double* seconds) override;
  Status Enqueue(Stream stream, const std::vector<Copy>& copies, const char* source,
                 char* target) override;
  Status Record(Event event, Stream stream) override;
  Status Wait(Stream stream, Event event) override;
  bool SourcesStayMapped() const override { return emulation_.sources_stay_mapped; }
  Status Synchronize(Event event) override;

 private:
  Emulation emulation_;
  uint64_t streams_made_ = 0;
};

// Any other work on a stream: what a kernel launch is on a GPU.
void EnqueueWork(Stream stream, std::function<void()> work);

}  // namespace kvjax
