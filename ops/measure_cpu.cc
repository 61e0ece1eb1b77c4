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

// Runs `pass` once, then `passes` times against the clock.
void Time(int64_t passes, double* seconds, const std::function<void()>& pass) {
  using Clock = std::chrono::steady_clock;
  pass();
  for (int64_t i = 0; i < passes; ++i) {
    const auto start = Clock::now();
    pass();
    seconds[i] = std::chrono::duration<double>(Clock::now() - start).count();
  }
}

Status OutOfMemory(int64_t bytes) {
  return Status::Exhausted("no " + std::to_string(bytes) + " bytes to measure with");
}

}  // namespace

Status MeasureCopy(int64_t, int64_t piece_bytes, int64_t pieces, int64_t passes,
                   double* seconds) {
  std::vector<char> source, target;
  try {
    source.assign(piece_bytes * pieces, 1);
    target.assign(piece_bytes, 0);
  } catch (const std::bad_alloc&) {
    return OutOfMemory(piece_bytes * (pieces + 1));
  }
  Time(passes, seconds, [&] {
    for (int64_t i = 0; i < pieces; ++i) {
      std::memcpy(target.data(), source.data() + i * piece_bytes, piece_bytes);
    }
  });
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
  Time(passes, seconds, [&] {
    uint64_t read = 0;
    for (const uint64_t word : words) read += word;
    sum = read;
  });
  return Status::Ok();
}

Status DeviceMemory(int64_t, int64_t* free_bytes, int64_t* total_bytes) {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  *free_bytes = sysconf(_SC_AVPHYS_PAGES) * page_bytes;
  *total_bytes = sysconf(_SC_PHYS_PAGES) * page_bytes;
  return Status::Ok();
}

}  // namespace kvjax
