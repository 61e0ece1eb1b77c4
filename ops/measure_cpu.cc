// measure.h for the emulated device: host memory is its memory, memcpy its link.
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "measure.h"

namespace kvjax {
namespace {

// The seconds that `pass` takes.
double Clocked(const std::function<void()>& pass) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  pass();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Status OutOfMemory(int64_t bytes) {
  return Status::Exhausted("no " + std::to_string(bytes) + " bytes to measure with");
}

class HostLink : public Link {
 public:
  HostLink(int64_t piece_bytes, int64_t pieces)
      : source_(piece_bytes * pieces, 1), target_(piece_bytes, 0) {}

  Status Copy(double* seconds) override {
    *seconds = Clocked([this] {
      for (size_t at = 0; at < source_.size(); at += target_.size()) {
        std::memcpy(target_.data(), source_.data() + at, target_.size());
      }
    });
    return Status::Ok();
  }

 private:
  std::vector<char> source_, target_;
};

}  // namespace

Status Link::Open(int64_t, int64_t piece_bytes, int64_t pieces,
                  std::unique_ptr<Link>* link) {
  try {
    *link = std::make_unique<HostLink>(piece_bytes, pieces);
  } catch (const std::bad_alloc&) {
    return OutOfMemory(piece_bytes * (pieces + 1));
  }
  return Status::Ok();
}

Status MeasureRead(int64_t, int64_t bytes, int64_t passes, double* seconds) {
  std::vector<uint64_t> words;
  try {
    words.assign(bytes / sizeof(uint64_t), 1);
  } catch (const std::bad_alloc&) {
    return OutOfMemory(bytes);
  }
  volatile uint64_t sum = 0;  // keeps the compiler from leaving the reads out
  const auto read = [&] {
    uint64_t folded = 0;
    for (const uint64_t word : words) folded += word;
    sum = folded;
  };
  read();
  for (int64_t i = 0; i < passes; ++i) seconds[i] = Clocked(read);
  return Status::Ok();
}

Status DeviceMemory(int64_t, int64_t* free_bytes, int64_t* total_bytes) {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  *free_bytes = sysconf(_SC_AVPHYS_PAGES) * page_bytes;
  *total_bytes = sysconf(_SC_PHYS_PAGES) * page_bytes;
  return Status::Ok();
}

}  // namespace kvjax
