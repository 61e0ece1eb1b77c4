// What a scenario runs on: memory that XLA would own, a compute stream and transports.
// Two of them: streams that really work (streams.h), and a log of what orders what
// (clocks.h). Every member is called by one host thread, but what a transport does.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport_emulated.h"

namespace kvjax {

// A stored cell, and what it holds: its bytes follow from this number alone (Word).
struct CellWrite {
  char* at;
  uint64_t content;
};

// A cell that a launch reads `at`, in a slot, in scratch or where it is stored.
struct CellRead {
  const char* at;
  const char* home;  // where it is stored
  uint64_t content;  // what it must hold
};

// Word `index` of a cell with this content. Never that of poison, kPoison.
inline uint32_t Word(uint64_t content, int64_t index) {
  return uint32_t((content + uint64_t(index) + 1) * 0x9e3779b97f4a7c15u >> 33);
}
constexpr uint32_t kPoison = 0xffffffffu;  // a NaN, as float32 and as bfloat16

// One run of memory, filled with poison once it is free.
struct Range {
  char* data = nullptr;
  int64_t bytes = 0;
};

class Machine {
 public:
  virtual ~Machine() = default;

  virtual Stream compute() = 0;
  virtual std::unique_ptr<Transport> MakeTransport(const Emulation& emulation) = 0;

  // Host memory of cells, and the scratch of ordered attends; alive until Free.
  virtual Range Allocate(int64_t bytes) = 0;

  // The rest is enqueued on the compute stream.
  virtual void Store(std::vector<CellWrite> cells, int64_t row_bytes) = 0;
  // A launch: reads cells, fails on what it didn't expect, then poisons where it read
  // from (nothing if that is `cells' home`).
  virtual void Launch(std::vector<CellRead> cells, int64_t row_bytes, Range poison) = 0;
  virtual void Duplicate(Range source, Range target) = 0;
  // `late_reads`: copies may still read it, as they may if host memory stays mapped.
  virtual void Free(Range range, bool late_reads) = 0;

  // The host waits for the compute stream.
  virtual void Finish() = 0;

  // Bytes that transports were asked to copy: gaps and all.
  int64_t copied_bytes() const { return copied_bytes_; }
  // Counts a copy to a slot or the scratch memory at `target`, which it must stay
  // inside.
  void NoteCopy(const Copy& copy, const char* target) {
    copied_bytes_ += copy.width * copy.height;
    const int64_t room = target == scratch.data ? scratch.bytes : slot_bytes;
    const int64_t end =
        copy.target + (copy.height - 1) * copy.target_pitch + copy.width;
    if (copy.target < 0 || end > room) Fail("a copy leaves its slot");
  }
  int64_t slot_bytes = 0;
  Range scratch;

  int64_t timed_events = 0;  // that transports made

  // What went wrong first; "" if nothing did.
  std::string failure() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  void Fail(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = text;
  }

 private:
  int64_t copied_bytes_ = 0;
  std::mutex mutex_;
  std::string failure_;
};

}  // namespace kvjax
