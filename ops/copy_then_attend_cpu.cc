// copy_then_attend.h for the emulated device: its memory is the host's.
#include <chrono>
#include <cstring>
#include <functional>

#include "copy_then_attend.h"

namespace kvjax {
namespace {

void Serially(int64_t n, const std::function<void(int64_t)>& f) {
  for (int64_t i = 0; i < n; ++i) f(i);
}

void CopyRows(const Copy& copy, const char* tail, char* slot) {
  for (int64_t i = 0; i < copy.height; ++i) {
    std::memcpy(slot + copy.target + i * copy.target_pitch,
                tail + copy.source + i * copy.source_pitch, copy.width);
  }
}

}  // namespace

Status RunCopyThenAttend(int64_t, const CopyThenAttend& work, double* seconds) {
  std::vector<Segment> segments;
  KVJAX_RETURN_IF_ERROR(CutLayer(work, &segments));
  std::vector<char> slot(work.slot_bytes);
  std::vector<float> state(work.state_floats());
  int32_t error = 0;

  // The row's cell is the one behind the last.
  AttentionBuffers buffers{work.q,  work.rows,    work.lengths, work.lengths,
                           nullptr, state.data(), &error};
  const auto pass = [&] {
    for (int64_t layer = 0; layer < work.num_layers; ++layer) {
      buffers.out = static_cast<char*>(work.out) + layer * work.out_bytes();
      for (const Segment& segment : segments) {
        for (const Copy& copy : segment.copies) {
          CopyRows(copy, work.tails[layer], slot.data());
        }
        AttendSpans(work.shape, buffers, slot.data(), segment.spans, Serially);
      }
    }
  };
  pass();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < work.passes; ++i) pass();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  *seconds = taken.count();
  return error == 0 ? Status::Ok() : Status::Internal("lengths don't fit the cells");
}

}  // namespace kvjax
