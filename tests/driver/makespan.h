// How long steps take on a simulated clock: copies, kernels and the host cost given
// times, events carry them from stream to stream. No thread, no byte, the same number
// every time.
#pragma once

#include <cstdint>
#include <vector>

#include "timeline.h"

namespace kvjax {

// Steps of layers, each of `segments` x copy_us of copies, `in_slot` of them through a
// slot at once, against a launch of launch_us for each slotful and mlp_us of other
// work.
struct Load {
  int64_t num_steps, num_layers, segments;
  double copy_us, launch_us, mlp_us;
  int64_t in_slot = 1;

  double copies() const { return num_steps * num_layers * segments * copy_us; }
  double compute() const {
    const int64_t launches = (segments + in_slot - 1) / in_slot;
    return num_steps * num_layers * (launches * launch_us + mlp_us);
  }
};

struct Host {
  double call_us;         // for each call that enqueues something
  double synchronize_us;  // to wake up once what it waits for is done
  bool is_inline;         // work is done when its call returns, as on the cpu platform
};

// Microseconds of all steps through a ring; num_slots = 0: ordered, without one. Each
// begin waits for the step before, as it must to know the lengths. Traced if there is
// somewhere to put the marks.
double Makespan(const Load& load, const Host& host, int64_t depth, int64_t num_slots,
                std::vector<Mark>* marks = nullptr);

}  // namespace kvjax
