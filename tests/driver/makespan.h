// How long steps take on a simulated clock: copies, kernels and the host cost given
// times, events carry them from stream to stream. No thread, no byte, the same number
// every time.
#pragma once

#include <cstdint>
#include <vector>

#include "timeline.h"

namespace kvjax {

// Steps of layers, each of `segments` x copy_us of copies against as many launches of
// launch_us and mlp_us of other work.
struct Load {
  int64_t num_steps, num_layers, segments;
  double copy_us, launch_us, mlp_us;

  double copies() const { return num_steps * num_layers * segments * copy_us; }
  double compute() const {
    return num_steps * num_layers * (segments * launch_us + mlp_us);
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
